"""N data-parallel workers in one process, built from the project's own plan, compressors, memories and exchanges.

For research and tests: what a compressor does to a training run on N workers, without N processes. It equals real gloo
processes bit for bit where the order of a sum cannot matter (two_way and all_gather at any N, all_reduce at N = 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_compress.compressors.base import Compressor
from lightning_compress.exchange.collectives import perform
from lightning_compress.exchange.debt import repay
from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.hook import GradientExchange
from lightning_compress.exchange.momenta import Momenta
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeName, Memory, MemoryName
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import Steps
from lightning_compress.kernels.table import ABSENT, PRESENT
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.optim.compatibility import mark_corrected, require_compatible
from lightning_compress.schedule import DensityWarmup

Gradients = dict[str, Tensor]


class SimulatedExchange:
    """The gradient exchange of ``world_size`` workers that hold the same parameters; a single one leaves gradients alone.

    Args:
        module: The model; all its trainable parameters have one dtype.
        world_size: Number of simulated workers.
        compressor: As in ``GradientExchange``, like the next five.
        memory: What workers remember.
        exchange: How payloads travel.
        dense: How small tensors travel.
        start_step: Dense steps before compression begins.
        schedule: The density's warm-up.
        steps_per_epoch: For a schedule that counts epochs.
        optimizer: A ``CompressedAdam`` that brings settings along.
        ranks_per_node: For a hierarchical exchange: workers that follow each other share a node.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world_size: int,
        compressor: str | Compressor = "default",
        memory: MemoryName | Memory = "auto",
        exchange: ExchangeName = "auto",
        dense: str | int | DenseRule = "auto",
        start_step: int | None = None,
        schedule: DensityWarmup | None = None,
        steps_per_epoch: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        asked = GradientExchange(compressor, memory, exchange, dense, start_step, schedule)
        optimizers = [] if optimizer is None else [optimizer]
        asked.configure(optimizers)
        self.settings, momenta = asked.settings, Momenta(optimizers)
        self.world_size = world_size
        nodes = Nodes.of([rank // ranks_per_node for rank in range(world_size)])
        self.workers = [
            RankExchange(
                self.settings,
                module,
                rank,
                nodes,
                ExchangeStats(),
                steps_per_epoch=steps_per_epoch,
                momenta=momenta,
            )
            for rank in range(world_size)
        ]
        self._parameters = self.workers[0].parameters
        if len({p.dtype for p in self._parameters.values()}) != 1:
            raise ValueError("The simulator needs a model whose trainable parameters have one dtype.")
        corrected = isinstance(self.settings.memory, MomentumCorrection)
        mark_corrected(self._parameters, self.workers[0].plan if corrected else None)
        self._step = 0

    def mean(self, gradients: Sequence[Gradients]) -> Gradients:
        """Exchanges one step's gradients.

        Args:
            gradients: For every worker its gradients by parameter name; a name that is missing takes no part.

        Returns:
            What every worker holds after the exchange; names that no worker gave are missing.
        """
        buffers = [self._flatten(of_one) for of_one in gradients]
        running = [self._start(*of_one) for of_one in zip(self.workers, buffers, gradients, strict=True)]
        self._in_lockstep(running)
        self._step += 1
        seen = set().union(*gradients)
        return {name: part for name, part in self._split(buffers[0]).items() if name in seen}

    def stats(self, rank: int = 0) -> dict[str, Any]:
        """The figures of one worker, as ``GradientExchange.stats`` gives them."""
        return self.workers[rank].stats.as_dict()

    def _start(self, worker: RankExchange, buffer: Tensor, gradients: Gradients) -> Steps:
        names = tuple(self._parameters)
        status = torch.tensor([PRESENT if name in gradients else ABSENT for name in names], dtype=torch.uint8)
        worker.stats.begin_step()
        worker.begin_step(self._step)
        if worker.passes_through:
            repay(worker, names, status, buffer, 1.0)
            return iter(())
        worker.stats.count_dense(buffer, self.world_size)
        if worker.clip is not None:
            worker.clip.add([buffer])
            worker.clip.end_step(1.0)
        return worker.steps(buffer, names, status, self._step, 1.0)

    def _in_lockstep(self, running: list[Steps]) -> None:
        while True:
            collectives = [next(steps, None) for steps in running]
            issued = [c for c in collectives if c is not None]
            if not issued:
                return
            for worker, collective in zip(self.workers, issued, strict=True):
                worker.stats.count_wire(collective, *worker.nodes.position(collective.level, worker.rank))
                peers = worker.nodes.peers(collective.level, worker.rank)
                if worker.rank == peers[-1]:
                    perform([issued[rank] for rank in peers])

    def _flatten(self, gradients: Gradients) -> Tensor:
        return torch.cat([gradients.get(name, torch.zeros_like(p)).flatten() for name, p in self._parameters.items()])

    def _split(self, buffer: Tensor) -> Gradients:
        parts = buffer.split([p.numel() for p in self._parameters.values()])
        return {name: part.view_as(p) for part, (name, p) in zip(parts, self._parameters.items(), strict=True)}


def simulate(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[torch.nn.Module, Any], Tensor],
    batches: Iterable[Sequence[Any]],
    exchange: SimulatedExchange,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Trains ``module`` as ``exchange.world_size`` workers would.

    Buffers behave as under DDP: every worker starts a step from the buffers of worker 0, and its updates are kept.

    Args:
        module: The model, shared by all workers: their parameters are identical after every step.
        optimizer: Of ``module``'s parameters.
        loss: ``loss(module, batch)`` gives a worker's mean loss.
        batches: For every step one batch per worker.
        exchange: Made for ``module``.
        on_step: Called with the number of steps done after each step.
    """
    require_compatible(optimizer, exchange.settings.memory)
    for step, of_workers in enumerate(batches):
        gradients = _backward_of_all(module, loss, of_workers)
        mean = exchange.mean(gradients)
        for name, parameter in module.named_parameters():
            parameter.grad = mean.get(name)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1)


def _backward_of_all(
    module: torch.nn.Module, loss: Callable[[torch.nn.Module, Any], Tensor], batches: Sequence[Any]
) -> list[Gradients]:
    before = [buffer.clone() for buffer in module.buffers()]
    after: list[Tensor] = []
    gradients: list[Gradients] = []
    for rank, batch in enumerate(batches):
        _set_buffers(module, before)
        module.zero_grad(set_to_none=True)
        loss(module, batch).backward()
        gradients.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        if rank == 0:
            after = [buffer.clone() for buffer in module.buffers()]
    _set_buffers(module, after)
    return gradients


def _set_buffers(module: torch.nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.copy_(value)

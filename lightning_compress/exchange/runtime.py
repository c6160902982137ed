"""What exists only while a model is attached: process groups, threads, hooks, memories and plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_compress.exchange.codec import compile_kernels
from lightning_compress.exchange.memories import Memories
from lightning_compress.exchange.participation import Participation
from lightning_compress.exchange.pipeline import Pipeline, make_pipeline
from lightning_compress.exchange.plan import BlockPlan, parameter_specs
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import BucketJob, Steps, Topology, exchange_dense
from lightning_compress.state import local_state, restore

log = logging.getLogger(__name__)


class Runtime:
    """The exchange of one wrapped model.

    Args:
        settings: What the user chose.
        stats: Where everything is counted.
        ddp: The wrapped model.
        grad_scaler: The loss scaler, if there is one.
        timeout: Of the exchange's process groups.
        memories: Of an earlier fit of the same module, to go on with.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        stats: ExchangeStats,
        ddp: DistributedDataParallel,
        grad_scaler: Any | None,
        timeout: timedelta | None,
        memories: Memories | None = None,
    ) -> None:
        self._settings, self._stats, self._scaler = settings, stats, grad_scaler
        self.world_size = dist.get_world_size(ddp.process_group)
        self.rank = dist.get_rank(ddp.process_group)
        self.module = ddp.module
        self.parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self.plan = make_plan(settings, ddp.module, self.world_size)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._topologies: dict[tuple[str, ...], Topology] = {}
        self._participation = Participation(self.parameters.items())
        fresh = Memories(self.plan, settings, self.rank, transactional=_scales(grad_scaler))
        self.memories = memories if memories is not None and memories.fits(fresh) else fresh
        self.open = True
        self._closers: list[Callable[[], None]] = [self._participation.close]
        self._pipeline: Pipeline | None = None
        if self.world_size > 1:
            compile_for(settings, ddp.module)
            _require_equal_settings(settings, self._names.values(), ddp.process_group)
            self._pipeline = self._start_pipeline(ddp, timeout)
        if _scales(grad_scaler):
            self._closers.append(register_optimizer_step_post_hook(self._note_step).remove)

    def begin_step(self) -> None:
        """Before the first bucket: what is open from earlier steps is kept or forgotten."""
        self._stats.begin_step()
        self.memories.settle(self._scale())

    def state(self) -> dict[str, Any]:
        """This rank's memories, settled."""
        self.memories.settle(self._scale())
        return local_state(self.memories, self.plan, self.parameters, self.rank, self.world_size)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Fills this rank's memories (see ``state.restore``)."""
        restore(state, self.memories, self.plan, self.parameters, self.rank, self.world_size)

    def exchange(self, bucket: dist.GradBucket, step: int, dense: bool) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one bucket; the future holds the bucket's buffer when it is the mean of all ranks."""
        buffer = bucket.buffer()
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        status = self._participation.take(names)
        if self._pipeline is None:
            self.memories.repay(names, status, buffer, self._scale())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        self._stats.count_dense(_nbytes(buffer), self.world_size)
        if dense or self._settings.topology is None or buffer.is_sparse:
            steps = exchange_dense(buffer, self.world_size)
        else:
            steps = self._compressed(buffer, names, status, step)
        label = f"step {step}, bucket {bucket.index()}, rank {self.rank}"
        return self._pipeline.submit(steps, buffer, label, self._stats)

    def close(self) -> None:
        """Ends threads, hooks and groups; the memories stay readable."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        while self._closers:
            self._closers.pop()()
        self.open = False

    def _compressed(self, buffer: Tensor, names: tuple[str, ...], status: Tensor, step: int) -> Steps:
        worker, owner = self.memories.views(names, buffer)
        topology = self._topologies.get(names)
        if topology is None:
            assert self._settings.topology is not None
            plan = self.plan.bucket(names, *self.memories.offsets(buffer))
            topology = self._settings.topology(plan, self.rank, self.world_size, buffer.device)
            self._topologies[names] = topology
        job = BucketJob(buffer, status.to(buffer.device), step, self._scale(), worker, owner, self._stats)
        return topology.run(job)

    def _scale(self) -> float | Tensor:
        if not _scales(self._scaler):
            return 1.0
        scale = self._scaler._scale  # type: ignore[union-attr]  # the device tensor; get_scale() would wait for it
        if scale is None:
            return float(self._scaler.get_scale())  # type: ignore[union-attr]
        return scale if scale.is_cuda else float(scale)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        self.memories.note_step([self._names[key] for key in stepped if key in self._names])

    def _start_pipeline(self, ddp: DistributedDataParallel, timeout: timedelta | None) -> Pipeline:
        ranks = dist.get_process_group_ranks(ddp.process_group)

        def new_group() -> Any:
            group = dist.new_group(ranks, timeout=timeout)
            self._closers.append(lambda: _destroy(group))
            return group

        topology = self._settings.topology
        device = next(ddp.module.parameters()).device
        return make_pipeline(device, topology.collectives if topology else 1, new_group)


def make_plan(settings: ExchangeSettings, module: torch.nn.Module, world_size: int) -> BlockPlan:
    """The blocks of ``module`` under ``settings``: the same on every rank."""
    topology = settings.topology or Topology
    specs = parameter_specs(module, settings.dense, settings.compressor.keeps_zero)
    owners = topology.owners(world_size)
    return BlockPlan(specs, settings.compressor, settings.dense_compressor, owners, topology.whole_tensors)


def compile_for(settings: ExchangeSettings, module: torch.nn.Module) -> None:
    """Compiles the CPU kernels that ``module`` will need; quick when they are in numba's cache on disk.

    Done before the first step and outside every collective, where another rank's timeout would be running.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if settings.topology is None or not parameters or parameters[0].device.type != "cpu":
        return
    wide = (torch.float64, torch.complex128)
    dtypes = {torch.float64 if p.dtype in wide else torch.float32 for p in parameters}
    start = time.perf_counter()
    compile_kernels([settings.compressor, settings.dense_compressor], dtypes)
    if (seconds := time.perf_counter() - start) > 1.0:
        log.info("lightning-compress: compiled the CPU kernels in %.1f s (cached for the next run)", seconds)


def _scales(grad_scaler: Any | None) -> bool:
    return grad_scaler is not None and grad_scaler.is_enabled()


def _nbytes(buffer: Tensor) -> int:
    """Bytes of a bucket's gradients; of a sparse one what is in it."""
    if buffer.is_sparse:
        return sum(part.numel() * part.element_size() for part in (buffer._indices(), buffer._values()))
    return buffer.numel() * buffer.element_size()


def _destroy(group: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _refuse_python_reducer(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' gives communication hooks no buckets; "
            "set torch._dynamo.config.optimize_ddp = True (or False) before wrapping the model."
        )


def _require_equal_settings(settings: ExchangeSettings, names: Iterable[str], group: Any) -> None:
    """Ranks that plan differently would read each other's bytes wrongly: find out before the first step."""
    mine = f"{settings!r}, {len(tuple(names))} parameters"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(f"All ranks need the same settings. Rank 0 has {everyone[0]}; rank {rank} has {theirs}.")



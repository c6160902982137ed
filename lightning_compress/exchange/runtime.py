"""What exists only while a model is attached: process groups, threads and hooks around one rank's exchange."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_compress.exchange.accumulation import AccumulationGuard
from lightning_compress.exchange.codec import compile_kernels
from lightning_compress.exchange.collectives import Level
from lightning_compress.exchange.debt import Debt, repay
from lightning_compress.exchange.momenta import Momenta
from lightning_compress.exchange.nodes import Nodes, find_nodes
from lightning_compress.exchange.nonfinite import NonfiniteWatch
from lightning_compress.exchange.participation import Participation
from lightning_compress.exchange.pipeline import Exchange, Pipeline, make_pipeline
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.verification import Verification
from lightning_compress.kernels.table import PRESENT
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.optim.compatibility import mark_corrected, require_compatible

log = logging.getLogger(__name__)


class Runtime:
    """The exchange of one wrapped model.

    Args:
        settings: What the user chose.
        stats: Where everything is counted.
        ddp: The wrapped model.
        grad_scaler: The loss scaler, if there is one.
        timeout: Of the exchange's process groups.
        previous: Of the same module, to go on with.
        debts: Of exchanges with other settings, to be paid out of this one's gradients.
        watch: Looks for gradients that are not finite.
        steps_per_epoch: For schedules that count epochs.
        optimizers: Those that serve the model.
        ranks_per_node: Where the launcher knows it.
        tell: Told, on rank 0, which exchange was chosen.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        stats: ExchangeStats,
        ddp: DistributedDataParallel,
        grad_scaler: Any | None,
        timeout: timedelta | None,
        previous: RankExchange | None,
        debts: Sequence[Debt],
        watch: NonfiniteWatch,
        steps_per_epoch: int | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        ranks_per_node: int | None = None,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self._stats, self._scaler = stats, grad_scaler
        self.module, self._device = ddp.module, next(ddp.module.parameters()).device
        self.debts = list(debts)
        if settings.compression_threads > 1 and self._device.type != "cpu":
            raise ValueError(
                f"compression_threads={settings.compression_threads} is for gradients on the CPU, and these are on "
                f"{self._device}, which encodes and decodes itself: leave compression_threads out."
            )
        rank, world_size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
        if world_size > 1:
            _require_equal_settings(settings, ddp.module, ddp.process_group)
        nodes = find_nodes(ddp.process_group, ranks_per_node) if settings.hierarchical else Nodes.alone(world_size)
        self.exchange = RankExchange(
            settings,
            ddp.module,
            rank,
            nodes,
            stats,
            _scales(grad_scaler),
            steps_per_epoch,
            previous,
            Momenta(optimizers),
            watch,
        )
        topology = self.exchange.settings.topology
        if settings.by_bytes and topology is not None and rank == 0:
            tell(f"lightning-compress: exchange='auto' sends least as {topology.name} on {world_size} ranks")
        self.exchange.memories.watch(self._scale())
        self._names = {id(p): name for name, p in self.exchange.parameters.items()}
        self._frozen = {name: p for name, p in ddp.module.named_parameters() if not p.requires_grad}
        self._frozen = {name: p for name, p in self._frozen.items() if name not in ddp.parameters_to_ignore}
        self._participation = Participation(self.exchange.parameters.items())
        self.open, self.has_exchanged, self._weighed = True, False, False
        self._closers: list[Callable[[], None]] = [self._participation.close, self.exchange.close]
        self._waiting: list[Exchange] = []
        self._pipeline: Pipeline | None = None
        self._verification: Verification | None = None
        self._guard: AccumulationGuard | None = None
        if not self.exchange.passes_through:
            compile_for(settings, ddp.module)
            new_group = self._group_maker(ddp, timeout)
            self._pipeline = make_pipeline(self._device, self.exchange.settings.stages, new_group)
            if settings.verify_every and world_size > 1:
                self._verification = Verification(ddp.module, settings.verify_every, new_group("world"), stats)
        self._closers.append(ddp.register_forward_pre_hook(self._note_buffers).remove)
        self._watch_optimizers()
        # whoever drops the model without closing must not keep its threads
        self._finalizer = weakref.finalize(ddp, self.close)
        self._finalizer.atexit = False

    def begin_step(self, step: int) -> None:
        """Before the first bucket: what was written for a skipped step is forgotten."""
        self._warn_if_nothing_is_saved(step)
        self._stats.begin_step()
        self._require_wrapped()
        if self._verification is not None:
            self._verification.check(step)
        self.has_exchanged = True
        self.settle()
        self.debts = [debt for debt in self.debts if not debt.paid()]
        self.exchange.begin_step(step)

    def settle(self) -> None:
        """Brings the memories up to date with the loss scaler."""
        self._stats.count_skipped(self.exchange.settle(self._scale()))
        for debt in self.debts:
            debt.exchange.settle(self._scale())

    def hand_over(self, bucket: Any, step: int) -> torch.futures.Future[Tensor]:
        """Starts the exchange of one ``GradBucket``; the future holds the bucket's buffer when it is the mean of all ranks."""
        buffer = bucket.buffer()
        try:
            names = tuple(self._names[id(p)] for p in bucket.parameters())
        except KeyError:
            raise RuntimeError(
                "lightning-compress: DDP exchanges a parameter that was frozen when the exchange was attached. Attach it "
                "(register_comm_hook) right after wrapping the model, before parameters are frozen."
            ) from None
        status = self._participation.take(names)
        for debt in self.debts:
            debt.repay(names, status, buffer, self._scale())
        if self._pipeline is None:
            # nothing is left out on a single rank: what a larger run owed joins the gradient
            repay(self.exchange, names, status, buffer, self._scale())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            # DDP's all-reduce would have coalesced it, and the optimizer sums duplicates in another order
            future.set_result(buffer.coalesce() if buffer.is_sparse else buffer)
            return future
        self._stats.count_dense(buffer, self.exchange.world_size)
        steps = self.exchange.steps(buffer, names, status, step, self._scale())
        label = f"step {step}, bucket {bucket.index()}, rank {self.exchange.rank}"
        exchange = Exchange(steps, buffer, self._pipeline.future(), label, self._stats)
        if self.exchange.clip is not None and not buffer.is_sparse:
            self.exchange.clip.add(_reached(bucket, status))
        self._submit(self._pipeline, exchange, bucket.is_last())
        if self._guard is not None and self.exchange.quantity(step) != "gradient":
            self._guard.note_exchange(compress(names, status.tolist()))
        return exchange.future

    def close(self) -> None:
        """Ends threads, hooks and groups; the memories stay readable. Done once: others may serve the optimizers since."""
        if not self.open:
            return
        self.open = False
        self._finalizer.detach()  # it would keep the memories for as long as the model is wrapped
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        while self._closers:
            self._closers.pop()()
        self.exchange.momenta.announce(False)

    def _submit(self, pipeline: Pipeline, exchange: Exchange, last: bool) -> None:
        """Hands a bucket to the pipeline, unless local clipping has to see the whole gradient first."""
        clip = self.exchange.clip
        if clip is None:
            pipeline.submit(exchange)
            return
        self._waiting.append(exchange)
        if last and clip.squares is not None:  # else this backward has reached nothing
            clip.end_step(self._scale())
        if last or not clip.waits:
            for waiting in self._waiting:
                pipeline.submit(waiting)
            self._waiting.clear()

    def _warn_if_nothing_is_saved(self, step: int) -> None:
        """Looks once at what the first compressed step has sent: of tiny tensors headers, pads and indices may be most."""
        settings = self.exchange.settings
        # a hierarchical exchange saves bytes between nodes, not in all
        compresses = settings.topology is not None and not settings.hierarchical and self.exchange.world_size > 1
        if self._weighed or not compresses or not self.has_exchanged or self.exchange.density(step - 1) == 1.0:
            return
        self._weighed = True
        sent, dense = self._stats.last_bytes()
        if sent >= dense and self.exchange.rank == 0:
            warnings.warn(
                f"{self.exchange.settings.compressor!r} has sent {sent} bytes in a step in which dense DDP would have sent "
                f"{dense}: this model's tensors are too small for it, and training is slower than without. Use "
                "compressor='bf16', or plain DDP.",
                stacklevel=2,
            )

    def _require_wrapped(self) -> None:
        """DDP exchanges the parameters that were trainable when it wrapped the model; the ranks' others would drift apart."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"lightning-compress: {name!r} was frozen when DDP wrapped the model and is trained now: its gradients "
                    "would never be exchanged. Wrap the model again, ddp = DistributedDataParallel(ddp.module), and attach the "
                    "exchange to it, exchange.attach(ddp), which keeps its memories. (Lightning's Trainer does so by itself "
                    "before each batch.)"
                )

    def _scale(self) -> float | Tensor:
        if not _scales(self._scaler):
            return 1.0
        scale = self._scaler._scale  # type: ignore[union-attr]  # the device tensor; get_scale() would wait for it
        if scale is None:
            return float(self._scaler.get_scale())  # type: ignore[union-attr]
        return scale if scale.is_cuda else float(scale)

    def _watch_optimizers(self) -> None:
        if _scales(self._scaler):
            self._closers.append(register_optimizer_step_post_hook(self._note_step).remove)
        corrected = isinstance(self.exchange.settings.memory, MomentumCorrection)
        mark_corrected(self.exchange.parameters, self.exchange.plan if corrected else None)
        if corrected:
            self._closers.append(register_optimizer_step_pre_hook(self._check_optimizer).remove)
        if isinstance(self.exchange.settings.memory, (MomentumCorrection, SharedMomentum)):
            self._guard = AccumulationGuard(self.exchange.parameters)
            self._closers.append(self._guard.close)

    def _note_buffers(self, ddp: torch.nn.Module, _: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        if self.exchange.world_size > 1 and ddp.will_sync_module_buffers():
            self._stats.count_buffers(sum(buffer.nbytes for buffer in ddp.modules_buffers))

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in self._names for group in optimizer.param_groups for p in group["params"]):
            require_compatible(optimizer, self.exchange.settings.memory)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        found_inf = getattr(
            optimizer, "found_inf", None
        )  # the scaler gives it to optimizers that skip steps themselves (fused)
        taken = True if found_inf is None else found_inf == 0
        names = [self._names[key] for key in stepped if key in self._names]
        for exchange in (self.exchange, *(debt.exchange for debt in self.debts)):
            exchange.memories.note_step(names, taken)

    def _group_maker(self, ddp: DistributedDataParallel, timeout: timedelta | None) -> Callable[[Level], Any]:
        """Makes process groups of the model's ranks of a level, which ``close`` ends; called alike on all ranks."""
        ranks = dist.get_process_group_ranks(ddp.process_group)
        # torch would take the backend's default, half an hour, not what the user gave the model's group
        patience = timeout or ddp.process_group._get_backend(self._device).options._timeout
        backend = dist.get_backend(ddp.process_group)

        def new_group(level: Level) -> Any:
            members = [ranks[peer] for peer in self.exchange.nodes.peers(level, self.exchange.rank)]
            # of a model on a part of the ranks, and of a node, the others know nothing: they make no group with us
            alone = len(members) < dist.get_world_size()
            group = dist.new_group(members, patience, backend, use_local_synchronization=alone)
            self._closers.append(lambda: _destroy(group))
            return group

        return new_group


def compile_for(settings: ExchangeSettings, module: torch.nn.Module, tell: Callable[[str], None] = log.info) -> None:
    """Compiles the CPU kernels that ``module`` will need; quick when they are in numba's cache on disk.

    Done before the first step and outside every collective, where another rank's timeout would be running.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if settings.topology is None or not parameters or parameters[0].device.type != "cpu":
        return
    wide = (torch.float64, torch.complex128)
    dtypes = {torch.float64 if p.dtype in wide else torch.float32 for p in parameters}  # owners work in these
    dtypes |= {p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)}
    start = time.perf_counter()
    compile_kernels([settings.compressor, settings.dense_compressor], dtypes)
    if (seconds := time.perf_counter() - start) > 1.0:
        tell(f"lightning-compress: compiled the CPU kernels in {seconds:.1f} s (cached for the next run)")


def _reached(bucket: Any, status: Tensor) -> list[Tensor]:
    """The gradients of a bucket that are this backward's: the whole buffer, where all are."""
    fresh = [seen == PRESENT for seen in status.tolist()]
    return [bucket.buffer()] if all(fresh) else list(compress(bucket.gradients(), fresh))


def _scales(grad_scaler: Any | None) -> bool:
    return grad_scaler is not None and grad_scaler.is_enabled()


def _destroy(group: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _require_equal_settings(settings: ExchangeSettings, module: torch.nn.Module, group: Any) -> None:
    """Ranks that plan differently would read each other's bytes wrongly: find out before the first step."""
    mine = {field.name: repr(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.compare}
    mine["compressor"] += repr(sorted(vars(settings.compressor).items()))
    mine["parameters"] = repr([(n, tuple(p.shape), p.dtype) for n, p in module.named_parameters() if p.requires_grad])
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"All ranks need the same settings and the same model; {name} differs: rank 0 has "
                    f"{everyone[0][name][:500]}; rank {rank} has {value[:500]}."
                )

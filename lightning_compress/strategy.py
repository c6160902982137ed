"""Lightning's DDP strategy with a compressed gradient exchange: glue only, for either of Lightning's import names."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_compress.checkpoint import all_ranks_are_at, readable, replaced_at_once
from lightning_compress.checks import check_timeout
from lightning_compress.compressors.base import Compressor
from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.hook import GradientExchange, refuse_python_reducer
from lightning_compress.exchange.settings import ExchangeName, Memory, MemoryName
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.optim.compatibility import require_compatible
from lightning_compress.presets import PRESETS, strategy_names
from lightning_compress.schedule import DensityWarmup
from lightning_compress.state import SaveMode, empty_state, gather_state, lost_state

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object  # the import name in use supplies it as the next class

log = logging.getLogger(__name__)

STATE_KEY = "lightning_compress"
"""Where a Lightning checkpoint keeps the state of the exchange."""

_HOOK_REMEDY = "the compressed exchange is the hook: choose compressor=..., or strategy='ddp' for a hook of your own"
_REFUSED = {
    "ddp_comm_hook": _HOOK_REMEDY,
    "ddp_comm_state": _HOOK_REMEDY,
    "ddp_comm_wrapper": "wrap by choosing a compressor: compressor='fp16' or 'bf16'",
    "model_averaging_period": "post-localSGD exchanges parameters, not gradients: use strategy=DDPStrategy(...) for it",
    "mixed_precision": "DDP's mixed precision takes the hook's place: use Trainer(precision='bf16-mixed' or '16-mixed')",
}
_LIGHTNING_ARGUMENTS = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
}
_LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Timed out waiting")
"""What gloo says when a rank is gone."""
_UNUSED_PARAMETERS = (
    "It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step. "
    "If this is intentional, append `_find_unused_parameters_true` to the strategy's name (`strategy="
    "'compressed_find_unused_parameters_true'`) or set `CompressedStrategy(..., find_unused_parameters=True)`."
)


class CompressionGlue(DDPStrategy):
    """Mixed into a DDPStrategy: the strategy behind ``Trainer(strategy="compressed")``.

    What is given here must not contradict what a ``CompressedAdam`` among the optimizers says. "default", "auto" and None leave
    it open.

    Args:
        compressor: Code of the gradients: a name or an instance; see the README's table for what each costs. "default": what a
            ``CompressedAdam`` says, else "quantize" (4 bits), the gentle one.
        memory: "auto" (error feedback for biased compressors), "none", "error_feedback", or an ``ErrorFeedback`` or
            ``MomentumCorrection`` instance.
        exchange: "auto" (all_reduce where payloads can be added, else two_way, and between two ranks all_gather, which sends
            the same and encodes once), "all_reduce", "all_gather", "two_way", or "hierarchical" (dense inside a node,
            compressed between nodes, there as by "auto"; "hierarchical_all_reduce", "hierarchical_all_gather" and
            "hierarchical_two_way" choose).
        dense: How norms, biases and other small tensors travel: "auto", a code, a size in bytes, or a ``DenseRule``.
        start_step: Exchanges that are dense before compression begins; None: as a ``CompressedAdam`` says, else 0. An exchange
            is a backward whose gradients are synchronized: one per optimizer step, however many batches it accumulates, but
            two where two backwards are (a GAN's turns, manual optimization), and one more where a static graph is learned
            while accumulating.
        schedule: ``DensityWarmup`` for compressors with a density; begins after the dense steps.
        save_state: What checkpoints keep of the residuals: "exact" (every rank's: world size x model size; a resumed
            run is bit-identical; beyond 4 GiB the mean, with a warning), "mean" (one model size: what is owed to the
            model is kept), or "none".
        verify_every: For debugging: compares a checksum of every parameter over all ranks at each n-th step and fails at
            once on all of them, naming the first parameter that differs; 0 for never.
        compression_threads: Threads that encode or decode one bucket on the CPU; the numbers are the same for any count. 1
            suits a process whose cores are busy with backward; more pay where cores are idle while the exchange is waited for.
        kwargs: Everything that ``DDPStrategy`` takes, except a communication hook of your own.

    Raises:
        ValueError: An argument is unknown or does not go with another; raised before any process starts.
    """

    root: ClassVar[str]
    """Import name of Lightning that this class belongs to."""
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    """Arguments by the suffix of the strategy's name."""

    def __init__(
        self,
        compressor: str | Compressor = "default",
        memory: MemoryName | Memory = "auto",
        exchange: ExchangeName = "auto",
        dense: str | int | DenseRule = "auto",
        start_step: int | None = None,
        schedule: DensityWarmup | None = None,
        save_state: SaveMode = "exact",
        verify_every: int = 0,
        compression_threads: int = 1,
        **kwargs: Any,
    ) -> None:
        _check_ddp_arguments(kwargs)
        if save_state not in get_args(SaveMode):
            raise ValueError(f"save_state={save_state!r} is unknown; known are {', '.join(get_args(SaveMode))}.")
        self._save_state = save_state
        self._gathered: _Gathered | None = None
        self._wrapped: set[int] = set()  # which parameters DDP was wrapped with
        refuse_python_reducer()
        self.exchange = GradientExchange(
            compressor, memory, exchange, dense, start_step, schedule, verify_every, compression_threads
        )
        super().__init__(**kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, arguments in strategy_names(cls.presets).items():
            settings = ", ".join(f"{key}={value}" for key, value in arguments.items())
            strategy_registry.register(name, cls, description=f"Compressed DDP: {settings}", override=True, **arguments)

    @override
    def setup_environment(self) -> None:
        if self.lightning_module is not None:
            # before the process group exists: nobody's timeout runs while kernels are compiled
            self.exchange.compile(self.lightning_module, self._tell)
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._gathered = None
        super().setup(trainer)
        if trainer.state.fn == "fit":
            if (
                self._trained() != self._wrapped
            ):  # configure_optimizers, which comes after the wrapping, has frozen some
                self._wrap_again()
            self._attach()
            self._check_exchanged_quantity(trainer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._saves_state(checkpoint):
            state = self._state_of_all_ranks()
            if state is not None:
                checkpoint[STATE_KEY] = state
        if self.is_global_zero and _is_plain_file(self.checkpoint_io, filepath):
            with replaced_at_once(filepath) as path:
                super().save_checkpoint(checkpoint, path, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with readable(checkpoint_path):
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._gathered = None
        if self._fitting and self._save_state != "none":
            if STATE_KEY not in checkpoint and self.is_global_zero:
                warnings.warn(
                    "The checkpoint holds no state of the gradient exchange: residuals start at zero.", stacklevel=2
                )
            begin = {**empty_state(), "step": checkpoint.get("global_step", 0)}
            self.exchange.load_state_dict(checkpoint.get(STATE_KEY, begin))
        return checkpoint

    def _saves_state(self, checkpoint: dict[str, Any]) -> bool:
        """Not into a checkpoint of weights only."""
        if self._save_state == "none" or "optimizer_states" not in checkpoint:
            return False
        if not dist.is_initialized():  # after a fit in forked or spawned processes
            warnings.warn(
                "The residuals stayed in the processes that trained: they are not in this checkpoint.",
                stacklevel=2,
            )
            return False
        return True

    def _state_of_all_ranks(self) -> dict[str, Any] | None:
        """The exchange's state, on rank 0; None on the others.

        An interrupted run gathers nothing, since its peers may be gone: it keeps what was last gathered at this optimizer
        step, or says that there is nothing. A SIGTERM that stops all ranks at the same step is no such interruption.
        """
        assert self.lightning_module is not None
        step, interrupted = self.lightning_module.trainer.global_step, self._interrupted
        known = self._gathered
        if known is not None and known.global_step == step and (interrupted or known.exchanges == self.exchange.step):
            return known.state
        if interrupted and not (_stopped_by_sigterm() and all_ranks_are_at(step)):
            return lost_state(self.exchange.step) if self.is_global_zero else None
        state = gather_state(self.exchange.state_dict(), self._save_state)
        self._gathered = _Gathered(step, self.exchange.step, state)
        return state

    @property
    def _fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit"

    @property
    def _interrupted(self) -> bool:
        # after a run in spawned processes the module here belongs to no Trainer
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.interrupted

    # A run that is being interrupted must not wait for ranks that may be gone: callbacks save their last checkpoint alone.
    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._interrupted:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._interrupted else super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self._interrupted else super().reduce(tensor, *args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        ddp = self.model
        if isinstance(ddp, DistributedDataParallel) and ddp.static_graph and not self.exchange.has_exchanged:
            # torch learns a static graph in the first backward and fails if that one is not synchronized: the first
            # micro-batch is exchanged too, and mean(mean + rest) = mean
            yield
        else:
            with super().block_backward_sync():
                yield

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        if self._gathered is not None and self._gathered.global_step != self.lightning_module.trainer.global_step:
            self._gathered = None  # as large as all ranks' residuals
        self._follow_trained_parameters()

    def _follow_trained_parameters(self) -> None:
        """Wraps the model again when parameters were frozen or unfrozen; DDP itself would let the ranks drift apart."""
        ddp, now = self.model, self._trained()
        assert isinstance(ddp, DistributedDataParallel)
        # what is frozen after the wrapping is an unused parameter to DDP
        unused = now < self._wrapped and ddp.find_unused_parameters
        del ddp  # its hooks must be gone before those of the next one come
        if now != self._wrapped and not unused:
            log.info("The parameters that are trained have changed: the model is wrapped in DDP again.")
            self._wrap_again()
            self._attach()

    def _wrap_again(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self.configure_ddp()

    def _trained(self) -> set[int]:
        assert self.lightning_module is not None
        return {id(p) for p in self.lightning_module.parameters() if p.requires_grad}

    @override
    def on_exception(self, exception: BaseException) -> None:
        said = str(exception)
        if "Expected to have finished reduction in the prior iteration" in said:
            exception.args = (f"{said} {_UNUSED_PARAMETERS}",)
        elif isinstance(exception, RuntimeError) and "lightning-compress" not in said and any(w in said for w in _LOST):
            exception.args = (
                f"lightning-compress: at step {self.exchange.step} rank {self.global_rank} has lost another rank, which has "
                f"ended or hangs: look for its own error. A collective outside the gradient exchange has noticed it, such as "
                f"DDP's broadcast of buffers: {said}",
            )

    @override
    def teardown(self) -> None:
        self.exchange.close()
        super().teardown()

    @override
    def _configure_launcher(self) -> None:
        if self.root_device.type == "mps":
            raise ValueError(
                "Compressed strategies need gloo or NCCL, which MPS has not: use Trainer(accelerator='cpu')."
            )
        super()._configure_launcher()

    @override
    def configure_ddp(self) -> None:
        self._wrapped = self._trained()
        super().configure_ddp()

    @override
    def _register_ddp_hooks(self) -> None:
        """Nothing yet: the optimizers, which may bring settings along, come after the wrapping."""

    def _attach(self) -> None:
        self._pl_static_graph_delay_done = False  # of this wrap
        assert isinstance(self.model, DistributedDataParallel)
        self.exchange.configure(self.optimizers)
        scaler = getattr(self.precision_plugin, "scaler", None)
        steps = self._steps_per_epoch() if self.exchange.settings.schedule is not None else None
        self.exchange.attach(
            self.model,
            grad_scaler=scaler,
            timeout=self._timeout,
            steps_per_epoch=steps,
            optimizers=self.optimizers,
            ranks_per_node=self.num_processes,
            tell=self._tell,
        )

    def _steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch, None if nobody knows; a schedule that outlasts the run is said."""
        schedule = self.exchange.settings.schedule
        assert schedule is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()  # only then is the length of an epoch known
        batches, total = trainer.num_training_batches, trainer.estimated_stepping_batches
        if math.isinf(batches) and schedule.steps is None:
            raise ValueError(
                "DensityWarmup counts epochs and the length of this train_dataloader is unknown: give DensityWarmup(steps=...)."
            )
        steps = None if math.isinf(batches) else max(1, math.ceil(batches / trainer.accumulate_grad_batches))
        warmup = self.exchange.settings.start_step + len(schedule.densities) * schedule.stage_steps(steps)
        if 0 < total < warmup and self.is_global_zero:  # Lightning says -1 where it does not know
            warnings.warn(
                f"The density warm-up takes {warmup} optimizer steps and the run has {total:.0f}: it will not end.",
                stacklevel=2,
            )
        return steps

    def _check_exchanged_quantity(self, trainer: Trainer) -> None:
        memory = self.exchange.settings.memory
        if not isinstance(memory, (MomentumCorrection, SharedMomentum)):
            return
        self.barrier()  # a rank that leaves with an error must not break the connections that others still make
        for optimizer in self.optimizers:
            require_compatible(getattr(optimizer, "optimizer", optimizer), memory)
        if not trainer.gradient_clip_val:  # 0 is off, as None
            return
        if isinstance(memory, SharedMomentum):
            raise ValueError(
                "gradient_clip_val would clip momenta, not gradients, under exchanged='momentum': leave it out, or use "
                "CompressedAdam(exchanged='gradient')."
            )
        raise ValueError(
            "gradient_clip_val would clip velocities, not gradients, under MomentumCorrection: "
            f"use MomentumCorrection(clip_norm={trainer.gradient_clip_val}) and leave gradient_clip_val out."
        )

    def _tell(self, text: str) -> None:
        """Says it once, where Lightning's own messages go."""
        importlib.import_module(f"{self.root}.utilities").rank_zero_info(text)

    def __repr__(self) -> str:
        # Lightning's other import name refuses this object and shows its repr: say what to do
        other = {"pytorch_lightning": "lightning.pytorch", "lightning.pytorch": "pytorch_lightning"}[self.root]
        module = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}[other]
        return (
            f"<{type(self).__name__}({self.exchange.settings.compressor!r}) for {self.root}.Trainer; "
            f"{other}.Trainer takes lightning_compress.{module}.{type(self).__name__} or a name such as 'compressed'>"
        )


class _Gathered(NamedTuple):
    """What was last gathered for a checkpoint: a step's second checkpoint, or that of its interruption, takes it too."""

    global_step: int
    exchanges: int
    state: dict[str, Any] | None


def _is_plain_file(checkpoint_io: Any, path: Any) -> bool:
    """Whether Lightning's default writes to a local file here; other plugins know themselves how to save."""
    return type(checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(path)


def _stopped_by_sigterm() -> bool:
    """Whether this is called while Lightning handles the SIGTERM that ends a run (callbacks' ``on_exception``)."""
    return type(sys.exc_info()[1]).__name__ == "SIGTERMException"


def _check_ddp_arguments(arguments: dict[str, Any]) -> None:
    """DDP would complain only when the model is wrapped, in every process."""
    check_timeout(arguments.get("timeout"))
    for name, remedy in _REFUSED.items():
        if arguments.get(name) is not None:
            raise ValueError(f"CompressedStrategy cannot take {name}: {remedy}.")
    known = _LIGHTNING_ARGUMENTS | set(_REFUSED) | set(inspect.signature(DistributedDataParallel.__init__).parameters)
    known -= {"self", "module", "device_ids", "output_device", "process_group"}
    # a configuration file spells out all of DDP's defaults, also those that Lightning sets itself
    unknown = sorted(name for name, value in arguments.items() if name not in known and value is not None)
    if unknown:
        known |= set(inspect.signature(CompressionGlue.__init__).parameters) - {"self", "kwargs"}
        raise ValueError(
            f"CompressedStrategy does not know the argument {unknown[0]!r}; it takes its own and DDP's: {sorted(known)}"
        )

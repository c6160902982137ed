"""The gradient exchange of a DistributedDataParallel model: one bucket comes in, its mean over all ranks goes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.checks import check_timeout
from lightning_compress.compressors.base import Compressor
from lightning_compress.exchange.debt import Debt
from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.momenta import agreed_settings
from lightning_compress.exchange.nonfinite import NonfiniteWatch
from lightning_compress.exchange.runtime import Runtime, compile_for
from lightning_compress.exchange.sampling import sample_norms
from lightning_compress.exchange.settings import ExchangeName, ExchangeSettings, Memory, MemoryName
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.memory.error_feedback import ErrorFeedback
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.schedule import DensityWarmup
from lightning_compress.state import empty_state, require_state, share


class GradientExchange:
    """Compresses what data-parallel workers say to each other. Needs no Lightning.

    The steps, per bucket and optimizer step:

    1. The bucket's plan: which blocks, which code, who owns them (computed once per bucket layout).
    2. Worker: p = gradient + residual; encode; residual = p - decode(encode(p)).
    3. Exchange the payloads; in a two-way exchange the owners average, add their own residual and encode again.
    4. Decode into DDP's buffer. Every rank decodes the same bytes, so parameters stay bit-identical.

    What is given here must not contradict what a ``CompressedAdam`` among the optimizers says. "default", "auto" and None leave
    it open.

    Args:
        compressor: A name or an instance; more bits are gentler, fewer faster. "default": what a ``CompressedAdam`` says, else
            "quantize" (4 bits).
        memory: "auto" (error feedback for biased compressors), "none", "error_feedback", or an ``ErrorFeedback`` or
            ``MomentumCorrection`` instance.
        exchange: "auto" (all_reduce where payloads can be added, else two_way, and between two ranks all_gather, which
            sends the same and encodes once), "all_reduce", "all_gather" (only for a few ranks: its traffic grows
            with their number), "two_way", or "hierarchical": dense inside every node and compressed between the nodes, by
            all_reduce where payloads can be added and else by two_way; "hierarchical_all_gather" and the like choose it.
        dense: How norms, biases and other small tensors travel: "auto", a code, a size in bytes, or a ``DenseRule``.
        start_step: Exchanges that are dense before compression begins; None: as a ``CompressedAdam`` says, else 0. An exchange
            is a backward whose gradients are synchronized: one per optimizer step, however many batches it accumulates, but
            two where two backwards are (a GAN's turns, manual optimization), and one more where a static graph is learned
            while accumulating.
        schedule: ``DensityWarmup`` for compressors with a density; begins after the dense steps.
        verify_every: For debugging: compares a checksum of every parameter over all ranks at each n-th step and fails at
            once on all of them, naming the first parameter that differs; 0 for never. Costs a pass over the parameters
            and 8 bytes for each of them.
        compression_threads: Threads that encode or decode one bucket on the CPU, each of them a range of its blocks: the
            numbers are the same for any count. 1 suits a process whose cores are busy with backward (the stages of different
            buckets run beside each other anyway); more pay where cores are idle while the exchange is waited for.

    Raises:
        ValueError: An argument is unknown or does not go with another.
    """

    def __init__(
        self,
        compressor: str | Compressor = "default",
        memory: MemoryName | Memory = "auto",
        exchange: ExchangeName = "auto",
        dense: str | int | DenseRule = "auto",
        start_step: int | None = None,
        schedule: DensityWarmup | None = None,
        verify_every: int = 0,
        compression_threads: int = 1,
    ) -> None:
        self.choose(
            compressor=compressor,
            memory=memory,
            exchange=exchange,
            dense=dense,
            start_step=start_step,
            schedule=schedule,
            verify_every=verify_every,
            compression_threads=compression_threads,
        )
        self._stats = ExchangeStats()
        self._step = 0
        self._runtime: Runtime | None = None
        self._restored: Mapping[str, Any] | None = None
        self._debts: list[Debt] = []
        self._watch = NonfiniteWatch()
        self._told: dict[str, Any] = {}  # of the training around it, when it was attached

    def attach(
        self,
        ddp: DistributedDataParallel,
        grad_scaler: Any | None = None,
        timeout: timedelta | None = None,
        steps_per_epoch: int | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        ranks_per_node: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> GradientExchange:
        """Takes over the gradient exchange of ``ddp``; called on all ranks.

        Wrapping the same module again keeps its memories, by parameter name where other parameters are trained than before, and
        the last four arguments where they are None.

        Args:
            ddp: A wrapped model that has no communication hook yet.
            grad_scaler: The ``torch.amp.GradScaler`` of the training, if any: memories then hold unscaled values, and a
                skipped step leaves them as they were.
            timeout: Of the exchange's own process groups; None: that of ``ddp``'s group.
            steps_per_epoch: Optimizer steps of an epoch, for a schedule that counts epochs.
            optimizers: The model's; settings that a ``CompressedAdam`` brings along complete the exchange's own.
            ranks_per_node: For a hierarchical exchange; None: torchrun's LOCAL_WORLD_SIZE, else ranks are asked for the name
                of their host.
            tell: Told, on rank 0, which exchange "auto" chose; None: the logger.

        Raises:
            ValueError: ``ddp`` cannot be served; the message says why and what to do.
        """
        self._check(ddp, timeout)
        told = _given(steps_per_epoch=steps_per_epoch, optimizers=optimizers, ranks_per_node=ranks_per_node, tell=tell)
        last = self._runtime
        previous = last.exchange if last is not None and last.module is ddp.module else None
        self._told = told if previous is None else {**self._told, **told}
        self.close()
        self.configure(self._told.get("optimizers", ()))
        if isinstance(self.settings.memory, SharedMomentum) and ddp.find_unused_parameters:
            raise ValueError(
                "exchanged='momentum' needs a gradient of every parameter on every rank: set find_unused_parameters=False, "
                "or use CompressedAdam(exchanged='gradient')."
            )
        if last is not None and previous is not None:
            last.settle()  # with the scaler of that time
        elif last is not None and self._restored is None:
            self._step = 0  # another model
        arguments = (grad_scaler, timeout, previous, self._debts, self._watch)
        self._runtime, self._debts = Runtime(self.settings, self._stats, ddp, *arguments, **self._told), []
        if not ddp._comm_hooks:
            ddp.register_comm_hook(None, self._hook)
        exchange = self._runtime.exchange
        if self._restored is not None:
            exchange.restore(self._restored)
            self._restored = None
        elif previous is not None and exchange.memories is not previous.memories:
            # other parameters are trained than before, or a loss scaler has come or gone: by name
            exchange.restore(share(previous.state(), ddp.process_group))
        return self

    def choose(self, **arguments: Any) -> None:
        """Takes other arguments than the constructor's, before the exchange is attached.

        Raises:
            ValueError: As the constructor does.
        """
        self._said = {name: value for name, value in arguments.items() if not _is_unsaid(name, value)}
        self.settings = self._own_settings = ExchangeSettings.make(**self._said)

    def configure(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Completes the settings by what a ``CompressedAdam`` among the optimizers says.

        Raises:
            ValueError: It says something else than this exchange; the message shows both.
        """
        self.settings = agreed_settings(self._said, optimizers) or self._own_settings

    def switch(
        self,
        arguments: Mapping[str, Any],
        ddp: DistributedDataParallel,
        grad_scaler: Any | None = None,
        timeout: timedelta | None = None,
        steps_per_epoch: int | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        """Goes on with other settings; called on all ranks between two steps of the attached model.

        Memories start at zero; what the old ones owed to the model joins the next step's gradients, a parameter's when it next
        takes part.

        Args:
            arguments: The constructor's, from the next step on.
            ddp: The attached model, like the next four as in ``attach``.
            grad_scaler: The loss scaler of the training.
            timeout: Of the exchange's process groups.
            steps_per_epoch: For a schedule that counts epochs.
            ranks_per_node: For a hierarchical exchange.

        Raises:
            ValueError: A wrong argument, or one of both exchanges something else than gradients: nothing can be carried over.
                The old settings stay in force.
        """
        old = self._runtime
        if old is None or not old.open:
            raise RuntimeError("lightning-compress: switch() needs an attached exchange; call attach() first.")
        self._check(ddp, timeout)
        told = {**self._told, **_given(steps_per_epoch=steps_per_epoch, ranks_per_node=ranks_per_node)}
        new = GradientExchange(**arguments)
        new.configure(told.get("optimizers", ()))
        for one in (self.settings, new.settings):
            if one.memory is not None and not isinstance(one.memory, ErrorFeedback):
                raise ValueError(f"{type(one.memory).__name__} cannot be switched on or off between steps.")
        if new.settings.schedule is not None:
            new.settings.schedule.stage_steps(told.get("steps_per_epoch"))
        old.settle()
        before = dict(vars(self))
        self._said, self._own_settings = new._said, new._own_settings
        self._debts = [*old.debts, Debt(old.exchange)]
        self.close()
        self._runtime = None
        try:
            self.attach(ddp, grad_scaler, timeout, **told)
        except ValueError:  # ranks differ: attach() can go on as before
            vars(self).update(before)
            raise

    def compile(self, module: torch.nn.Module, tell: Callable[[str], None]) -> None:
        """Compiles the CPU kernels for ``module`` ahead of ``attach``, best before the process group exists.

        Args:
            module: The model.
            tell: Told how long it took, if that was more than a second.
        """
        compile_for(self.settings, module, tell)

    def stats(self) -> dict[str, Any]:
        """Figures of this rank since the start, and of the last step.

        Returns:
            steps (exchanges, see ``start_step``); skipped_steps (by the loss scaler);
            bytes_sent and bytes_received (on the wire, everything counted); bytes_between_nodes (those of bytes_sent that
            leave the node; a hierarchical exchange knows its nodes, in all others every rank counts as one);
            dense_bytes (what a ring all-reduce of the same gradients sends); buffer_bytes (of the buffers, such as batch
            norm's, that DDP itself has broadcast before forwards: not part of bytes_sent); ratio = dense_bytes /
            bytes_sent; encode_seconds, decode_seconds, wait_seconds (waiting for collectives, summed over the pipeline's
            stages: much of it is hidden behind backward); density (share of the elements of large tensors that the last
            step could send; 1 for codes without a density); ``last``: the same of the last step.
        """
        if self._runtime is not None:
            self._runtime.settle()
        return {**self._stats.as_dict(), "density": self._density()}

    def planned_ratio(self) -> float:
        """The ratio that the plan promises for the last step if the whole model is one bucket.

        1 before ``attach``, on one rank, and in dense steps.
        """
        return 1.0 if self._runtime is None else self._runtime.exchange.planned_ratio(max(0, self._step - 1))

    def residual_norms(self) -> tuple[float, float] | None:
        """Norms of the same few thousand elements of this rank's residuals (of its shard) and of the gradients in ``.grad``.

        Best read between backward and the optimizer's step. None where nothing is remembered or no gradient is there.
        """
        if self._runtime is None:
            return None
        return sample_norms(self._runtime.exchange)

    @property
    def step(self) -> int:
        """Number of the next exchange."""
        return self._step

    @property
    def has_exchanged(self) -> bool:
        """Whether a backward has been exchanged since the model was attached."""
        return self._runtime is not None and self._runtime.has_exchanged

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers: residuals by parameter name, and the step. Loads with ``weights_only=True``.

        Every rank saves its own; ``lightning_compress.state.merge`` puts them together for another number of ranks.
        """
        if self._restored is not None:
            return dict(self._restored)
        if self._runtime is None:
            state = empty_state()
        else:
            self._runtime.settle()
            state = self._runtime.exchange.state()
        return {**state, "step": self._step, "settings": repr(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()`` of this rank, or from a merged state on any number of ranks.

        Before ``attach`` the state is kept until the model is known.

        Raises:
            ValueError: The state is damaged or of another version.
        """
        require_state(state)
        if "step" not in state:
            raise ValueError("This is no state of a gradient exchange, or a damaged one: step missing.")
        if self._runtime is not None and self._runtime.open:
            self._runtime.exchange.restore(state)
        else:
            self._restored = state
        self._step = int(state["step"])

    def close(self) -> None:
        """Ends threads and removes hooks. No collective runs in here. Figures and state stay readable."""
        if self._runtime is not None and self._runtime.open:
            self._runtime.close()

    def _density(self) -> float:
        final = float(getattr(self.settings.compressor, "ratio", 1.0))
        if self._runtime is None or self._step == 0:
            return final
        density = self._runtime.exchange.density(self._step - 1)
        return final if density is None else density

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runtime": None, "_told": {}}

    def _check(self, ddp: DistributedDataParallel, timeout: timedelta | None) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(f"Wrap the model first: DistributedDataParallel(model), got {type(ddp).__name__}.")
        check_timeout(timeout)
        refuse_python_reducer(ddp)
        hooks = [hook for hook, _ in ddp._comm_hooks]
        if hooks not in ([], [self._hook]):
            raise ValueError(
                f"DDP takes only one communication hook and this model has {hooks[0].__qualname__} already: wrap it again, "
                "without another hook and without mixed_precision, and attach the exchange to that."
            )

    # DDP inspects the signature: the second parameter must be called bucket and must not carry a string annotation
    def _hook(self, _state, bucket):  # type: ignore[no-untyped-def]
        runtime = self._runtime
        if runtime is None or not runtime.open:
            raise RuntimeError("lightning-compress: the gradient exchange of this model was closed; attach() it again.")
        if bucket.index() == 0:
            runtime.begin_step(self._step)
        future = runtime.hand_over(bucket, self._step)
        if bucket.is_last():
            self._step += 1
        return future


_UNSAID = {
    name: parameter.default
    for name, parameter in inspect.signature(GradientExchange.__init__).parameters.items()
    if name != "self"
}
"""Arguments that leave a choice open."""


def _is_unsaid(name: str, value: Any) -> bool:
    default = _UNSAID[name]
    return type(value) is type(default) and value == default  # True is not the 1 that it equals


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_python_reducer(ddp: DistributedDataParallel | None = None) -> None:
    """Raises if torch.compile is set to bypass DDP's buckets (for ``ddp``, or for models wrapped from now on)."""
    if ddp is None:
        import torch._dynamo.config as dynamo

        used = dynamo.optimize_ddp in ("python_reducer", "python_reducer_without_compiled_forward")
    else:
        used = getattr(ddp, "_use_python_reducer", False)
    if used:
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' gives communication hooks no buckets; "
            "set torch._dynamo.config.optimize_ddp = True (or False) before wrapping the model."
        )


def register_comm_hook(
    ddp: DistributedDataParallel,
    compressor: str | Compressor = "default",
    memory: MemoryName | Memory = "auto",
    exchange: ExchangeName = "auto",
    dense: str | int | DenseRule = "auto",
    start_step: int | None = None,
    schedule: DensityWarmup | None = None,
    grad_scaler: Any | None = None,
    timeout: timedelta | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify_every: int = 0,
    compression_threads: int = 1,
    steps_per_epoch: int | None = None,
    ranks_per_node: int | None = None,
) -> GradientExchange:
    """Gives plain DistributedDataParallel (or Fabric) the compressed gradient exchange; called on all ranks.

    Args:
        ddp: The wrapped model, without another communication hook.
        compressor: See ``GradientExchange``, like the next five.
        memory: What workers remember.
        exchange: How payloads travel.
        dense: How small tensors travel.
        start_step: Dense exchanges before compression begins.
        schedule: The density's warm-up.
        grad_scaler: The ``torch.amp.GradScaler`` of the training loop, if it has one.
        timeout: How long a rank waits for the others; None: as long as ``ddp``'s own process group.
        optimizer: A ``CompressedAdam`` that brings settings along.
        verify_every: Steps from one comparison of the ranks' parameters to the next; 0 for none.
        compression_threads: Threads that encode or decode one bucket on the CPU.
        steps_per_epoch: Optimizer steps of an epoch, for a schedule that counts epochs.
        ranks_per_node: For a hierarchical exchange; None: LOCAL_WORLD_SIZE, else ranks tell each other the name of their host.

    Returns:
        The exchange: ``stats()`` reads its figures, ``close()`` ends its threads.
    """
    optimizers = [] if optimizer is None else [optimizer]
    made = GradientExchange(
        compressor, memory, exchange, dense, start_step, schedule, verify_every, compression_threads
    )
    return made.attach(ddp, grad_scaler, timeout, steps_per_epoch, optimizers, ranks_per_node)

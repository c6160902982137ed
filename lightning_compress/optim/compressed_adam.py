"""Adam and LANS that bring the settings of their compressed exchange along."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.onebit import OneBit
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.optim.lans import Scales, accumulate, lans_update
from lightning_compress.optim.moments import Batch, MomentOptimizer

if TYPE_CHECKING:
    from lightning_compress.compressors.base import Compressor
    from lightning_compress.exchange.dense import DenseRule
    from lightning_compress.exchange.settings import ExchangeName, Memory, MemoryName
    from lightning_compress.schedule import DensityWarmup

CLAN_CODE = OneBit(block_size=256)
"""One bit, with four times the scales of ``OneBit()`` for a tenth more bytes: on small batches, where rows of an embedding that
have no gradient share blocks with others, that is worth points of accuracy (docs/clan.md)."""


class CompressedAdam(MomentOptimizer):
    """The one place to say "compressed Adam": CLAN (arXiv 2105.07829) by default, 1-bit Adam as an option.

    Return it from ``configure_optimizers`` under ``Trainer(strategy="compressed_clan")``, or give it to
    ``register_comm_hook(ddp, optimizer=optimizer)``. The exchange reads the settings that stand here; where neither says
    anything, it is 1-bit with error feedback on both sides. Under a strategy that does not compress it trains dense and
    says so once.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay. Put biases and norms into a group with 0.
        update: "lans" (see ``LANS``) or "adam" (AdamW).
        exchanged: "gradient", or "momentum": from ``freeze_step`` on the second moment stays as it is and ranks exchange
            their first moments (see ``SharedMomentum``). Compression errors of momenta are not divided by a variance that
            they have themselves inflated, so it bears coarser codes; the variance must have settled before. With "lans"
            the direction of the gradient alone, w, is then missing, as in LAMB.
        freeze_step: For "momentum": exchanges before that, dense unless ``start_step`` says otherwise. 15 to 25 % of a
            run, and more than the learning rate's warm-up.
        normalize_grad: Of "lans". None: on, but off with "momentum", where nobody knows the norm of the mean gradient.
        maximize: Ascends instead.
        compressor: As in ``CompressedStrategy``, like the next five; None: what the strategy says, else ``CLAN_CODE``.
        memory: What workers remember.
        exchange: How payloads travel.
        dense: How small tensors travel.
        start_step: Dense exchanges before compression begins.
        schedule: The density's warm-up.

    Raises:
        ValueError: An argument is out of its range or does not go with another.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        update: Literal["lans", "adam"] = "lans",
        exchanged: Literal["gradient", "momentum"] = "gradient",
        freeze_step: int | None = None,
        normalize_grad: bool | None = None,
        maximize: bool = False,
        compressor: str | Compressor | None = None,
        memory: MemoryName | Memory | None = None,
        exchange: ExchangeName | None = None,
        dense: str | int | DenseRule | None = None,
        start_step: int | None = None,
        schedule: DensityWarmup | None = None,
    ) -> None:
        _check(update, exchanged, freeze_step, normalize_grad, memory)
        self.exchanged = exchanged
        said = {
            "compressor": compressor,
            "memory": SharedMomentum(freeze_step) if freeze_step is not None else memory,
            "exchange": exchange,
            "dense": dense,
            "start_step": start_step,
            "schedule": schedule,
        }
        self.exchange_arguments = {name: value for name, value in said.items() if value not in (None, "auto")}
        self.exchange_defaults: dict[str, Any] = {"compressor": CLAN_CODE, "start_step": freeze_step or 0}
        self._attached = self._receives_momenta = False
        self._names: dict[int, str] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "update": update,
            "normalize_grad": exchanged == "gradient" if normalize_grad is None else normalize_grad,
            "maximize": maximize,
            "grad_averaging": True,
            "bias_correction": True,
            "decoupled_weight_decay": True,
            "trust_clip": None,
        }
        super().__init__(params, defaults)

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Called by the exchange that will serve this optimizer, with what it exchanges, by name."""
        self._attached, self._receives_momenta = True, False
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def receive(self, momenta: bool) -> None:
        """Called before each exchange: whether ``grad`` will be the mean of momenta in the next step."""
        self._receives_momenta = momenta

    def momentum(self, parameter: Tensor) -> tuple[float, Tensor | None]:
        """The decay of a parameter's first moment and the moment itself, None before its first step.

        Raises:
            KeyError: The parameter is not in this optimizer.
        """
        beta1: float = next(group["betas"][0] for group in self.param_groups if _holds(group, parameter))
        return beta1, self.state.get(parameter, {}).get("exp_avg")

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimizer step; ``closure`` re-evaluates the model and returns the loss."""
        if not self._attached:
            self._attached = True
            warnings.warn(
                'CompressedAdam runs dense: no compressed exchange knows of it. Use Trainer(strategy="compressed_clan"), or '
                "register_comm_hook(ddp, optimizer=optimizer) with plain DDP.",
                stacklevel=2,
            )
        return super().step(closure)

    @override
    def __getstate__(
        self,
    ) -> dict[str, Any]:  # torch keeps defaults, state and groups only; no exchange knows of a copy
        own = {name: getattr(self, name) for name in ("exchanged", "exchange_arguments", "exchange_defaults")}
        return {**super().__getstate__(), **own, "_attached": False, "_receives_momenta": False, "_names": {}}

    @override
    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["update"] not in ("lans", "adam"):
            raise ValueError(f"update must be 'lans' or 'adam', got {group['update']!r}")
        if self.exchanged == "momentum" and group["normalize_grad"]:
            raise ValueError(
                "normalize_grad=True needs the norm of the mean gradient, which exchanged='momentum' never has"
            )
        if self.exchanged == "momentum" and group["maximize"]:
            raise ValueError("maximize=True does not go with exchanged='momentum': negate the loss")

    @override
    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        if self._receives_momenta:
            self._take_momenta(batch)
        else:
            for state in batch.states:
                if "frozen_at" in state:  # gradients again: the second moment goes on from there
                    state["frozen_at"] += 1
        if group["update"] == "lans":
            lans_update(batch, group, accumulates=not self._receives_momenta)
        else:
            _adam_update(batch, group, accumulates=not self._receives_momenta)

    def _take_momenta(self, batch: Batch) -> None:
        """What has arrived is the first moment; the second one is frozen."""
        for part in batch.parts():
            torch._foreach_copy_(part.m, part.g)
        for parameter, state in zip(batch.parameters, batch.states, strict=True):
            if "frozen_at" not in state and self._has_variance(parameter, state):
                state["frozen_at"] = max(1, state["step"] - 1)
                # an element whose gradient has always been zero would move by m / eps at its first one
                v = state["exp_avg_sq"]
                v.masked_fill_(v == 0, v.mean())

    def _has_variance(self, parameter: Tensor, state: dict[str, Any]) -> bool:
        """Whether a second moment can be frozen. It, and what has arrived, are the same on all ranks, and so is the error."""
        if bool(state["exp_avg_sq"].any()):
            return True
        if bool(state["exp_avg"].any()):
            raise ValueError(
                f"exchanged='momentum' divides by variances that were frozen at freeze_step, and "
                f"{self._names[id(parameter)]!r} has none: no gradient had reached it before. Train it from the start "
                "(unfreeze it long before freeze_step), raise freeze_step, or use CompressedAdam(exchanged='gradient')."
            )
        return False  # nothing has arrived either


def _adam_update(batch: Batch, group: dict[str, Any], accumulates: bool) -> None:
    """AdamW (Loshchilov & Hutter 2019)."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    scales = Scales.of(batch, group)
    for part in batch.parts():
        if accumulates:
            accumulate(part, part.g, beta1, beta2, 1.0 - beta1)
        torch._foreach_mul_(part.x, 1.0 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(part.x, part.m, scales.denominators(part.v), [-lr * first for first in scales.first])


def _holds(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(p is parameter for p in group["params"])


def _check(update: Any, exchanged: Any, freeze_step: Any, normalize_grad: Any, memory: Any) -> None:
    if exchanged not in ("gradient", "momentum"):
        raise ValueError(f"exchanged must be 'gradient' or 'momentum', got {exchanged!r}")
    if update == "adam" and normalize_grad:
        raise ValueError("normalize_grad=True is a part of update='lans'; update='adam' has no such step")
    if exchanged == "gradient":
        if freeze_step is not None:
            raise ValueError(f"freeze_step={freeze_step!r} belongs to exchanged='momentum'")
        return
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise ValueError(
            "exchanged='momentum' needs freeze_step, the number of steps after which the second moment is frozen, 1 or more: "
            f"15 to 25 % of the run; got {freeze_step!r}"
        )
    if memory not in (None, "auto", "error_feedback"):
        raise ValueError(
            f"memory={memory!r} does not go with exchanged='momentum', which brings its own error feedback"
        )

"""Momentum correction: Deep Gradient Compression's memory (Lin et al. 2017, sections 3.1 to 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_compress.checks import check_switch, is_number


@dataclass(frozen=True)
class MomentumCorrection:
    """Accumulates velocities instead of gradients: what is sent late arrives as momentum SGD would have sent it.

    Per rank and tensor, with gradient g, velocity u and accumulation v:

    1. g is scaled down when the norm of the rank's whole gradient exceeds its share of ``clip_norm``.
    2. u = momentum * u + g and v = v + u (Nesterov: u = momentum * (u + g) and v = v + u + g).
    3. v is encoded; v keeps what encoding left out. Where something was sent, u is set to zero (factor masking).

    What is exchanged is a velocity, so the optimizer must not apply momentum again: use ``optim.DGCSGD``. Small tensors
    travel as gradients and get their momentum there. In dense steps velocities are exchanged whole and nothing is masked:
    that is momentum SGD.

    Args:
        momentum: As the optimizer would have it, in [0, 1).
        nesterov: Nesterov's form.
        clip_norm: Threshold for the norm of the summed gradient, as you would give ``gradient_clip_val``; every rank
            clips its own gradient to clip_norm / sqrt(N) after scaling by 1/N, before it accumulates. None: no
            clipping. Use it where training without compression does (recurrent networks), or when the loss jumps early.
        clip_norm_from: "this_step" waits for the whole local gradient before the first bucket is sent: exact, but
            backward and exchange no longer overlap. "previous_step" uses the last step's norm and keeps the overlap.
        factor_masking: Step 3's masking. It stops stale momentum from pushing a coordinate that has just been sent.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = None
    clip_norm_from: Literal["this_step", "previous_step"] = "this_step"
    factor_masking: bool = True

    def __post_init__(self) -> None:
        if not is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be a number in [0, 1), got {self.momentum!r}")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0.0):
            raise ValueError(f"clip_norm must be a positive number, got {self.clip_norm!r}; None switches clipping off")
        if self.clip_norm_from not in ("this_step", "previous_step"):
            raise ValueError(f"clip_norm_from must be 'this_step' or 'previous_step', got {self.clip_norm_from!r}")
        check_switch("nesterov", self.nesterov)
        check_switch("factor_masking", self.factor_masking)

    def advance(self, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the velocity.

        Returns:
            The new velocity, and what the accumulation grows by.
        """
        if self.nesterov:
            velocity = self.momentum * (velocity + gradient)
            return velocity, velocity + gradient
        velocity = self.momentum * velocity + gradient
        return velocity, velocity

    def clip_factor(self, norm: Tensor, world_size: int) -> Tensor:
        """min(1, clip_norm * sqrt(N) / norm) for a rank's gradient of that norm (unscaled, float64); 1 if it is not finite.

        Rounded to float32, so that the order in which the norm was summed up, and so DDP's choice of buckets, does not show.
        """
        assert self.clip_norm is not None
        factor = (self.clip_norm * world_size**0.5 / norm.clamp_min(1e-30)).clamp_max(1.0)
        return torch.where(norm.isfinite(), factor, 1.0).float()

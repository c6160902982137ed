"""What is encoded instead of one bucket's gradients: velocities, or momenta; and local clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.exchange.plan import Span
from lightning_compress.memory.layout import bucket_strides
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.store import StoreView


@dataclass
class LocalClip:
    """The clipping of one rank's whole gradient, shared by the buckets of one step; on the gradients' device.

    Attributes:
        memory: Where the threshold stands.
        world_size: Number of ranks.
        previous: Norm of the last step's gradient that was finite, unscaled, float64; None before the first.
        before: What ``previous`` was a step earlier, for a step that is undone; None where none can be.
        squares: Sum of squares over this step's buckets so far, in scaled units, float64.
        factor: What gradients are multiplied by.
    """

    memory: MomentumCorrection
    world_size: int
    previous: Tensor | None = None
    before: Tensor | None = None
    squares: Tensor | None = None
    factor: Tensor | float = 1.0

    @property
    def waits(self) -> bool:
        """Whether buckets wait until the whole gradient is there."""
        return self.memory.clip_norm is not None and self.memory.clip_norm_from == "this_step"

    def recall(self, norm: Tensor | None) -> None:
        """Goes on after a step whose gradient had that norm."""
        self.previous, self.before = norm, None

    def settle(self, skipped: Tensor | bool) -> None:
        """Forgets the last step's norm if a loss scaler has skipped that step."""
        if self.previous is not None and self.before is not None and skipped is not False:
            undone = torch.as_tensor(skipped, device=self.previous.device)
            self.previous = torch.where(undone, self.before, self.previous)

    def begin_step(self) -> None:
        """Before the first bucket."""
        self.squares = None
        self.factor = 1.0
        if self.previous is not None and self.memory.clip_norm_from == "previous_step":
            self.factor = self.memory.clip_factor(self.previous, self.world_size)

    def add(self, gradients: Iterable[Tensor]) -> None:
        """Notes local gradients of a bucket: of the parameters that the backward has reached, others hold old ones."""
        for gradient in gradients:
            wide = gradient if gradient.dtype == torch.float64 else gradient.float()
            # in float64 the order of the sum, and so DDP's choice of buckets, does not show in the float32 factor
            square = wide.square().sum(dtype=torch.float64)
            self.squares = square if self.squares is None else self.squares + square

    def end_step(self, scale: float | Tensor) -> None:
        """After the last bucket has been noted."""
        assert self.squares is not None
        norm = self.squares.sqrt() / scale
        if self.waits:
            self.factor = self.memory.clip_factor(norm, self.world_size)
        self.before = torch.zeros_like(norm) if self.previous is None else self.previous  # a norm of zero clips nothing
        self.previous = torch.where(norm.isfinite(), norm, self.before)


@dataclass
class Correction(ABC):
    """One bucket in one step.

    Attributes:
        present: Which parameters take part.
        spans: Where they lie in the bucket.
    """

    masks: ClassVar[bool] = False
    """Whether ``mask`` wants to see what has been sent."""

    present: Sequence[bool]
    spans: list[Span] = field(repr=False)

    @abstractmethod
    def begin(self, buffer: Tensor, scale: float | Tensor) -> Tensor:
        """What is encoded instead of the gradients, float32 or float64, in their loss scale."""

    def mask(self, sent: Tensor, status_written: Tensor) -> None:  # noqa: B027
        """After ``sent`` (this rank's own decoded payload) has been encoded."""

    def mark_written(self, status_written: Tensor) -> None:  # noqa: B027
        """Notes which parameters' state has changed."""

    def release(self, values: Tensor, accumulated: StoreView, scale: float | Tensor) -> None:
        """Dense steps: everything accumulated is sent along, so nothing is left."""
        for span in self._corrected():
            part = span.of(values)
            old = accumulated.get(span.index)
            part += scale * old
            accumulated.set(span.index, torch.where(torch.isfinite(part).all(), torch.zeros_like(old), old))

    def _corrected(self) -> list[Span]:
        return [span for span in self.spans if self.present[span.index]]


@dataclass
class MomentumBucket(Correction):
    """Momenta instead of gradients (see ``SharedMomentum``).

    Attributes:
        parameters: Of the bucket, in its order.
        momentum: Gives a parameter's beta1 and first moment.
    """

    parameters: Sequence[Tensor]
    momentum: Callable[[Tensor], tuple[float, Tensor | None]]

    @override
    def begin(self, buffer: Tensor, scale: float | Tensor) -> Tensor:
        if not all(self.present):
            raise ValueError(
                "exchanged='momentum' needs a gradient of every parameter on every rank in every step: use "
                "CompressedAdam(exchanged='gradient') where the backward does not reach all of them."
            )
        values = buffer.to(torch.float64 if buffer.dtype == torch.float64 else torch.float32, copy=True)
        for span, parameter in zip(self.spans, self.parameters, strict=True):
            beta1, m = self.momentum(parameter)
            part = span.of(values)
            part *= 1.0 - beta1
            if m is not None:
                shaped = part.as_strided(parameter.size(), bucket_strides(parameter), part.storage_offset())
                shaped += (beta1 * scale) * m
        return values


@dataclass
class BucketCorrection(Correction):
    """Momentum correction: velocities instead of large tensors' gradients.

    Attributes:
        memory: The rule.
        velocity: Access to the velocities of the bucket's parameters.
        clip: The rank's clipping, None without.
    """

    masks: ClassVar[bool] = True

    memory: MomentumCorrection
    velocity: StoreView
    clip: LocalClip | None

    @override
    def begin(self, buffer: Tensor, scale: float | Tensor) -> Tensor:
        """Large tensors' velocity steps, small tensors' gradients. A velocity whose gradient is not finite stays as it was."""
        values = buffer.to(self.velocity.store.data.dtype, copy=True)
        if self.clip is not None:
            values *= self.clip.factor
        for span in self._corrected():
            part = span.of(values)
            old = self.velocity.get(span.index)
            new, growth = self.memory.advance(old, part / scale)
            self.velocity.set(span.index, torch.where(torch.isfinite(part).all(), new, old))
            part.copy_(growth * scale)
        return values

    @override
    def mask(self, sent: Tensor, status_written: Tensor) -> None:
        """Sets the velocity to zero where ``sent`` (this rank's own decoded payload) is not zero."""
        if self.memory.factor_masking:
            for span in self._corrected():
                velocity = self.velocity.written(span.index)
                self.velocity.set(span.index, velocity.masked_fill(span.of(sent) != 0, 0.0))
        self.velocity.mark_written(status_written)

    @override
    def mark_written(self, status_written: Tensor) -> None:
        self.velocity.mark_written(status_written)

    @override
    def _corrected(self) -> list[Span]:
        return [span for span in self.spans if self.present[span.index] and not span.dense]

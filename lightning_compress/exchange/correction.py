"""Momentum correction at work: what happens to one bucket's gradients before and after they are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_compress.exchange.plan import Span
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.store import StoreView


@dataclass
class LocalClip:
    """The clipping of one rank's whole gradient, shared by the buckets of one step; on the gradients' device.

    Attributes:
        memory: Where the threshold stands.
        world_size: Number of ranks.
        previous: Norm of the last step's gradient, unscaled, float64; None before the first.
        squares: Sum of squares over this step's buckets so far, in scaled units, float64.
        factor: What gradients are multiplied by.
    """

    memory: MomentumCorrection
    world_size: int
    previous: Tensor | None = None
    squares: Tensor | None = None
    factor: Tensor | float = 1.0

    @property
    def waits(self) -> bool:
        """Whether buckets wait until the whole gradient is there."""
        return self.memory.clip_norm is not None and self.memory.clip_norm_from == "this_step"

    def begin_step(self) -> None:
        """Before the first bucket."""
        self.squares = None
        self.factor = 1.0
        if self.previous is not None and self.memory.clip_norm_from == "previous_step":
            self.factor = self.memory.clip_factor(self.previous, self.world_size)

    def add(self, buffer: Tensor) -> None:
        """Notes a bucket's local gradients."""
        wide = buffer if buffer.dtype == torch.float64 else buffer.float()
        # in float64 the order of the sum, and so DDP's choice of buckets, does not show in the float32 factor
        square = wide.square().sum(dtype=torch.float64)
        self.squares = square if self.squares is None else self.squares + square

    def end_step(self, scale: float | Tensor) -> None:
        """After the last bucket has been noted."""
        assert self.squares is not None
        self.previous = self.squares.sqrt() / scale
        if self.waits:
            self.factor = self.memory.clip_factor(self.previous, self.world_size)


@dataclass
class BucketCorrection:
    """One bucket's velocities in one step.

    Attributes:
        memory: The rule.
        velocity: Access to the velocities of the bucket's parameters.
        clip: The rank's clipping, None without.
        present: Which parameters take part.
        spans: Where they lie in the bucket.
    """

    memory: MomentumCorrection
    velocity: StoreView
    clip: LocalClip | None
    present: Sequence[bool]
    spans: list[Span] = field(repr=False)

    def begin(self, buffer: Tensor, scale: float | Tensor) -> Tensor:
        """What is encoded instead of the gradients: large tensors' velocity steps, small tensors' gradients.

        A velocity whose gradient is not finite stays as it was.
        """
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

    def mask(self, sent: Tensor, status_written: Tensor) -> None:
        """Sets the velocity to zero where ``sent`` (this rank's own decoded payload) is not zero."""
        if self.memory.factor_masking:
            for span in self._corrected():
                velocity = self.velocity.written(span.index)
                self.velocity.set(span.index, velocity.masked_fill(span.of(sent) != 0, 0.0))
        self.velocity.mark_written(status_written)

    def release(self, values: Tensor, accumulated: StoreView, scale: float | Tensor) -> None:
        """Dense steps: everything accumulated is sent along, so nothing is left."""
        for span in self._corrected():
            part = span.of(values)
            old = accumulated.get(span.index)
            part += scale * old
            accumulated.set(span.index, torch.where(torch.isfinite(part).all(), torch.zeros_like(old), old))

    def _corrected(self) -> list[Span]:
        return [span for span in self.spans if self.present[span.index] and not span.dense]

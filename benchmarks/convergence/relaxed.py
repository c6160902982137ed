"""Another amplitude for any code: an experiment of the tables, not a part of the package."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor


class Relaxed(Compressor):
    """Sends a compressor's codes and takes them for ``factor`` times their values; error feedback remembers the difference.

    Above 1 is over-relaxation. ``CenteredTopK`` sends twice its threshold by itself: a factor of 0.75 is 1.5 times.

    Args:
        inner: The compressor; it needs error feedback.
        factor: Greater than 0.
    """

    def __init__(self, inner: Compressor, factor: float) -> None:
        self.inner = inner
        self.factor = factor

    @property
    def name(self) -> str:  # type: ignore[override]
        """The inner compressor's."""
        return self.inner.name

    @property
    def block_size(self) -> int | None:  # type: ignore[override]
        """The inner compressor's."""
        return self.inner.block_size

    @property
    def selects(self) -> bool:  # type: ignore[override]
        """The inner compressor's."""
        return self.inner.selects

    @property
    def keeps_zero(self) -> bool:  # type: ignore[override]
        """The inner compressor's."""
        return self.inner.keeps_zero

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return self.inner.payload_nbytes(numel, row)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return self.inner.encode(p, blocks)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return self.factor * self.inner.decode(payload, blocks)

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor | None:
        return self.inner.statistic(p, row)

"""Which tensors are too small or too delicate for the compressor, and the mild code they travel in."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_compress.checks import is_whole
from lightning_compress.compressors.base import PIECE, Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.quantize import Quantize


@dataclass(frozen=True)
class DenseRule:
    """Names the tensors that travel under a mild code in the same payload: norms, biases and other small tensors.

    Args:
        code: "auto", "bf16", "fp16", "fp32", "quantize_8" or "quantize_3". "auto" is bf16 beside codes of two bits and more
            per element, and fewer bits with error feedback beside sparser ones, where 16 bits would weigh more than the
            large tensors: 8 down to a sixteenth of a bit per element, 3 beside what is sparser still.
        max_numel: Tensors of at most this many elements are dense. 1-D tensors and scalars always are.
        patterns: Shell-style name patterns of further dense tensors, such as ``("*embedding*",)``.
    """

    code: str = "auto"
    max_numel: int = 1024
    patterns: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.code, str) or self.code not in ("auto", *_CODES):
            raise ValueError(
                f"dense={self.code!r} is unknown: use 'auto', {', '.join(map(repr, _CODES))} or a DenseRule"
            )
        if not is_whole(self.max_numel) or self.max_numel < 0:
            raise ValueError(f"max_numel is a number of elements, 0 or more, got {self.max_numel!r}")
        if isinstance(self.patterns, str):
            raise ValueError(
                f"patterns is a list of name patterns, got the string {self.patterns!r}: write [{self.patterns!r}]"
            )
        if not isinstance(self.patterns, Sequence) or not all(isinstance(p, str) for p in self.patterns):
            raise ValueError(f"patterns is a list of name patterns such as ['*embedding*'], got {self.patterns!r}")

    def matches(self, name: str, shape: Sequence[int], numel: int) -> bool:
        """Whether a parameter is dense."""
        return len(shape) <= 1 or numel <= self.max_numel or any(fnmatch.fnmatch(name, p) for p in self.patterns)

    def compressor(self, beside: Compressor, error_feedback: bool) -> Compressor:
        """The mild code beside a compressor; 16-bit and dense compressors take small tensors too."""
        if self.code != "auto":
            return _CODES[self.code]
        if isinstance(beside, (Cast, NoCompression)):
            return beside
        block = beside.block_size or PIECE
        bits = beside.payload_nbytes(block) * 8 / block
        if bits >= 2 or not error_feedback:
            return _CODES["bf16"]
        return _CODES["quantize_8" if bits >= 1 / 16 else "quantize_3"]


_CODES: dict[str, Compressor] = {
    "bf16": Cast("bf16"),
    "fp16": Cast("fp16"),
    "fp32": Cast("fp32"),
    "quantize_8": Quantize(8),
    "quantize_3": Quantize(3),
}


def dense_rule(dense: str | int | DenseRule) -> DenseRule:
    """Reads a ``dense`` argument: a code, a rule, or a size in bytes below which float32 tensors are dense."""
    if isinstance(dense, DenseRule):
        return dense
    if is_whole(dense) and dense >= 0:
        return DenseRule(max_numel=max(0, dense - 1) // 4)
    if isinstance(dense, str):
        return DenseRule(dense)
    raise ValueError(f"dense must be a code such as 'auto' or 'bf16', a number of bytes, or a DenseRule, got {dense!r}")

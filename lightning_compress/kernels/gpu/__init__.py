"""Triton kernels: one launch codes all blocks of a table, a program for each block, nothing waits for the host.

``frame`` is what all compressors share, ``launch`` is the way in, and every other file holds one compressor's coder: a
function from a tile of numbers to code bytes and back. A coder agrees with the reference kernel of the same name.

Triton may be missing (torch's CPU builds do not bring it): nothing here is imported before a compressor is asked for
its kernels, and this file does not need it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LARGEST = 4096
"""Elements of the longest block that a program takes: its whole block lives in registers."""


class GPUKernels(NamedTuple):
    """One compressor's coders, and the constants they are compiled for."""

    encode: Any
    """``encode(p, i, n, line, code, peak, statistic, salt, BITS, RATIO, VARIANT, SLOTS)``.

    Args:
        p: float32 or float64 [SIZE]: the block, zeros beyond it.
        i: int32 [SIZE]: 0, 1, 2, ...
        n: int32: elements of the block.
        line: The block's line of the table.
        code: Where its code begins; zeros on entry.
        peak: Its largest magnitude, of the type of ``p``; finite.
        statistic: float32: what stands for the whole tensor, or None: the block takes its own.
        salt: uint32: counter of the random numbers.
        BITS, RATIO, VARIANT: As below.
        SLOTS: A power of two that no block keeps more elements than.

    Returns:
        float32 [SIZE]: what the code decodes to.
    """
    decode: Any
    """``decode(i, n, line, code, salt, BITS, RATIO, VARIANT, SLOTS)``: float32 [SIZE], of any bytes; as above."""
    bits: int = 0
    """Bits per element."""
    ratio: float = 0.0
    """Share of the elements that are kept."""
    variant: int = 0
    """Number of a variant; what it means is the coder's business."""

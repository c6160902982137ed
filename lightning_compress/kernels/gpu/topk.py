"""GPU form of ``kernels.reference.topk``. VARIANT: the values' format, a number of ``cast.FORMATS``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import get_words, put_words
from lightning_compress.kernels.gpu.cast import FP32, number_bits, number_of
from lightning_compress.kernels.gpu.selection import (
    get_indices,
    index_bits,
    indices_of,
    kept,
    largest,
    put_indices,
    slots_of,
)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot = kept(n, RATIO), tl.arange(0, SLOTS)
    least, chosen = largest(p, i, n, k)  # noqa: RUF059
    indices, count = indices_of(chosen, slot)
    words = number_bits(p, VARIANT)
    width = index_bits(n)
    put_indices(code, indices, k, width, SLOTS)
    put_words(
        code + (k * width + 7) // 8, slot, tl.gather(words, indices, 0), slot < count, 4 if VARIANT == FP32 else 2
    )
    return tl.where(chosen, number_of(words, VARIANT), 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot, width = kept(n, RATIO), tl.arange(0, SLOTS), index_bits(n)
    found, named = slots_of(get_indices(code, slot, k, width), k, slot, i, n)
    return number_of(get_words(code + (k * width + 7) // 8, found, named, 4 if VARIANT == FP32 else 2), VARIANT)

"""GPU form of ``kernels.reference.topk``. VARIANT: the values' format, a number of ``cast.FORMATS``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import get_words, put_words
from lightning_compress.kernels.gpu.cast import FP32, number_bits, number_of
from lightning_compress.kernels.gpu.selection import indices_of, kept, largest, slots_of


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot = kept(n, RATIO), tl.arange(0, SLOTS)
    least, chosen = largest(p, i, n, k)  # noqa: RUF059
    indices, count = indices_of(chosen, slot)
    words = number_bits(p, VARIANT)
    put_words(code, slot, indices.to(tl.uint32), slot < count, 2)
    put_words(code + 2 * k, slot, tl.gather(words, indices, 0), slot < count, 4 if VARIANT == FP32 else 2)
    return tl.where(chosen, number_of(words, VARIANT), 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot = kept(n, RATIO), tl.arange(0, SLOTS)
    indices = get_words(code, slot, slot < k, 2).to(tl.int32)
    found, named = slots_of(indices, k, slot, i, n)
    return number_of(get_words(code + 2 * k, found, named, 4 if VARIANT == FP32 else 2), VARIANT)

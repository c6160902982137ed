"""GPU form of ``kernels.reference.randomk``. VARIANT: 1 multiplies each value by the length of its stratum."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import get_words, put_words, to_float32
from lightning_compress.kernels.gpu.hashing import element_hash
from lightning_compress.kernels.gpu.selection import kept


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    stratum, length, drawn = draw(i, n, line, salt, RATIO)
    value = to_float32(p * length.to(p.dtype) if VARIANT else p)
    put_words(code, stratum, value.to(tl.uint32, bitcast=True), drawn, 4)
    return tl.where(drawn, value, 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    stratum, length, drawn = draw(i, n, line, salt, RATIO)  # noqa: RUF059
    return get_words(code, stratum, drawn, 4).to(tl.float32, bitcast=True)


@triton.jit
def draw(i, n, line, salt, RATIO: tl.constexpr):
    """Each element's stratum, the length of that, and whether the element is the one that is drawn."""
    k = kept(n, RATIO)
    stratum = ((i + 1) * k - 1) // n
    first = stratum * n // k
    length = (stratum + 1) * n // k - first
    drawn = first + (element_hash(line, stratum, salt) % length.to(tl.uint32)).to(tl.int32)
    return stratum, length, (i == drawn) & (i < n)

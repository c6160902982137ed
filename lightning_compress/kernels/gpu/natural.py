"""GPU form of ``kernels.reference.natural``. VARIANT as in ``dithering``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import TINY, get_float32, pack, put_float32, to_float32, unpack
from lightning_compress.kernels.gpu.dithering import norm_of
from lightning_compress.kernels.gpu.hashing import uniform

BIAS, MANTISSA = tl.constexpr(127), tl.constexpr((1 << 23) - 1)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    norm = norm_of(p, peak, statistic, VARIANT)
    sent = norm >= TINY
    inverse = tl.where(sent, tl.div_rn(1.0, tl.maximum(norm, TINY)), 0.0)
    share = to_float32(tl.minimum(tl.abs(p) * inverse.to(p.dtype), 1.0))
    word = share.to(tl.int32, bitcast=True)
    index = tl.maximum((word >> 23) - (BIAS - TOP), 0)
    way = tl.where(index > 0, (word & MANTISSA).to(tl.float32) * (2.0**-23), share * (2.0 ** (TOP - 1)))
    index += (uniform(line, i, salt) < way).to(tl.int32)
    codes = tl.where((p < 0) & (index > 0), index | (1 << (BITS - 1)), index)
    norm = tl.where(sent, norm, 0.0)
    put_float32(code, norm)
    pack(code + 4, i, n, codes, BITS)
    return value_of(codes, norm, BITS)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    return value_of(unpack(code + 4, i, n, BITS), get_float32(code), BITS)


@triton.jit
def value_of(codes, norm, BITS: tl.constexpr):
    """float32 numbers of codes."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    index = codes & TOP
    level = (index + (BIAS - TOP) << 23).to(tl.float32, bitcast=True)
    value = tl.where(index > 0, level, 0.0) * norm
    return tl.where(codes > TOP, -value, value)

"""GPU form of ``kernels.reference.quantize``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import TINY, get_float32, pack, put_float32, scale_of, unpack
from lightning_compress.kernels.reference import quantize as reference

PEAK_MAX = tl.constexpr(reference.PEAK_MAX)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1.0
    top = tl.minimum(scale_of(peak, statistic), PEAK_MAX)
    sent = top >= TINY
    step = tl.where(sent, tl.div_rn(top, LEVELS), 0.0)
    inverse = tl.where(sent, tl.div_rn(LEVELS, tl.maximum(top, TINY)), 0.0)
    q = round_to_even(tl.minimum(tl.maximum(p * inverse.to(p.dtype), -LEVELS), LEVELS))
    put_float32(code, step)
    pack(code + 4, i, n, q.to(tl.int32), BITS)
    return q.to(tl.float32) * step


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    SIGN: tl.constexpr = 1 << (BITS - 1)
    return ((unpack(code + 4, i, n, BITS) ^ SIGN) - SIGN).to(tl.float32) * get_float32(code)


@triton.jit
def round_to_even(x):
    """Nearest integers of small numbers: adding 1.5 / eps leaves no place for a fraction."""
    SHIFT: tl.constexpr = 1.5 * (2.0**52 if x.dtype == tl.float64 else 2.0**23)
    return x + SHIFT - SHIFT

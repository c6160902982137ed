"""GPU form of ``kernels.reference.dithering``. VARIANT: 1 for the l2 norm, 0 for the largest magnitude."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import TINY, pack, put_float32, scale_of, to_float32
from lightning_compress.kernels.gpu.hashing import uniform
from lightning_compress.kernels.gpu.quantize import PEAK_MAX


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1.0
    norm = tl.minimum(norm_of(p, peak, statistic, VARIANT), PEAK_MAX)
    sent = norm >= TINY
    step = tl.where(sent, tl.div_rn(norm, LEVELS), 0.0)
    inverse = tl.where(sent, tl.div_rn(1.0, tl.maximum(norm, TINY)) * LEVELS, 0.0)
    scaled = tl.minimum(tl.abs(p) * inverse.to(p.dtype), LEVELS)
    q = tl.floor(scaled)
    q += (uniform(line, i, salt) < scaled - q).to(p.dtype)
    q = tl.where(p < 0, -q, q)
    put_float32(code, step)
    pack(code + 4, i, n, q.to(tl.int32), BITS)
    return q.to(tl.float32) * step


@triton.jit
def norm_of(p, peak, statistic, L2: tl.constexpr):
    """float32: the block's norm, or the whole tensor's."""
    if L2 and statistic is None:
        wide = p.to(tl.float64)
        return to_float32(tl.sqrt(tl.sum(wide * wide, axis=0)))
    else:  # noqa: RET505  # decided when it is compiled: only one of the two may return
        return scale_of(peak, statistic)

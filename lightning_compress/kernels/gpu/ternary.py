"""GPU form of ``kernels.reference.ternary``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import TINY, get_float32, put_float32, scale_of
from lightning_compress.kernels.reference import ternary as reference

TRITS = tl.constexpr(reference.TRITS)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = p.shape[0]
    top = scale_of(peak, statistic)
    sent = top >= TINY
    half = tl.where(sent, top * 0.5, float("inf")).to(p.dtype)
    digits = (p > half).to(tl.int32) + 2 * (p < -half).to(tl.int32)
    count = (n + TRITS - 1) // TRITS
    byte, packed, weight = tl.arange(0, SIZE // 4), tl.zeros([SIZE // 4], tl.int32), 1
    for place in tl.static_range(TRITS):
        element = byte + place * count
        digit = tl.gather(digits, tl.minimum(element, SIZE - 1), 0)
        packed += tl.where(element < n, digit, 0) * weight
        weight *= 3
    put_float32(code, tl.where(sent, top, 0.0))
    tl.store(code + 4 + byte, packed.to(tl.uint8), mask=byte < count)
    return signs(digits) * tl.where(sent, top, 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    count = (n + TRITS - 1) // TRITS
    place = i // count
    packed = tl.load(code + 4 + i % count, mask=i < n, other=0).to(tl.int32)
    weight = tl.where(place == 0, 1, tl.where(place == 1, 3, tl.where(place == 2, 9, tl.where(place == 3, 27, 81))))
    return signs(packed // weight % 3) * get_float32(code)


@triton.jit
def signs(digits):
    """+1 for digit 1, -1 for digit 2, else 0."""
    return (digits == 1).to(tl.float32) - (digits == 2).to(tl.float32)

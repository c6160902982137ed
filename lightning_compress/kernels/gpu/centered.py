"""GPU form of ``kernels.reference.centered``."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import FLOAT32_MAX, TINY, pack, to_float32, unpack
from lightning_compress.kernels.gpu.selection import (
    get_indices,
    index_bits,
    indices_of,
    kept,
    largest,
    put_indices,
    slots_of,
)
from lightning_compress.kernels.reference import centered as reference

FLOOR, CAP = tl.constexpr(reference.FLOOR), tl.constexpr(reference.CAP)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot, sent = kept(n, RATIO), tl.arange(0, SLOTS), peak >= TINY
    least, chosen = largest(p, i, n, k)
    threshold = tl.maximum(least, peak * FLOOR)
    chosen = chosen & (tl.abs(p) >= tl.where(sent, threshold, float("inf")))
    indices, count = indices_of(chosen, slot)
    amplitude = tl.minimum(tl.minimum(2 * to_float32(threshold), to_float32(peak) * CAP), FLOAT32_MAX)
    half = tl.where(sent, amplitude, 0.0).to(tl.uint32, bitcast=True) >> 16  # its value in bf16, cut
    byte = tl.arange(0, 2)
    tl.store(code + byte, (half >> (8 * byte).to(tl.uint32)).to(tl.uint8))
    width = index_bits(n)
    put_indices(code + 2, indices, k, width, SLOTS)
    negative = (tl.gather(p, indices, 0) < 0) & (slot < count)
    pack(code + 2 + (k * width + 7) // 8, slot, k, negative.to(tl.int32), 1)
    amplitude = (half << 16).to(tl.float32, bitcast=True)
    return tl.where(chosen, tl.where(p < 0, -amplitude, amplitude), 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    k, slot, width = kept(n, RATIO), tl.arange(0, SLOTS), index_bits(n)
    found, named = slots_of(get_indices(code + 2, slot, k, width), k, slot, i, n)
    half = tl.load(code).to(tl.uint32) | tl.load(code + 1).to(tl.uint32) << 8
    amplitude = (half << 16).to(tl.float32, bitcast=True)
    negative = unpack(code + 2 + (k * width + 7) // 8, found, k, 1)
    return tl.where(named, tl.where(negative == 1, -amplitude, amplitude), 0.0)

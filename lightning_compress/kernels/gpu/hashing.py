"""GPU form of ``kernels.reference.hashing``."""

import triton
import triton.language as tl

from lightning_compress.kernels import table as col

KEY, START = tl.constexpr(col.KEY), tl.constexpr(col.START)


@triton.jit
def mix(word):
    word = (word ^ (word >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    word = (word ^ (word >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def element_hash(line, i, salt):
    """32-bit hashes of the elements ``i`` of the block of this ``line``."""
    base = mix(tl.load(line + KEY).to(tl.uint32) ^ salt.to(tl.uint32))
    element = tl.load(line + START).to(tl.uint32) + i.to(tl.uint32)
    return mix(base ^ element * tl.full([], 0x9E3779B1, tl.uint32))


@triton.jit
def uniform(line, i, salt):
    """Uniform float32 numbers in [0, 1) with 24 random bits."""
    return (element_hash(line, i, salt) >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)

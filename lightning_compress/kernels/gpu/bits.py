"""Numbers as bytes at any offset, codes of a few bits as bytes: GPU form of ``kernels.reference.bits``."""

import triton
import triton.language as tl

from lightning_compress.kernels.reference import bits as reference

TINY = tl.constexpr(reference.TINY)
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


@triton.jit
def to_float32(value):
    """Rounds to float32; finite values beyond its range saturate."""
    return tl.minimum(tl.maximum(value, -FLOAT32_MAX), FLOAT32_MAX).to(tl.float32)


@triton.jit
def scale_of(own, statistic):
    """float32: the whole tensor's statistic where there is one, else the block's own."""
    if statistic is None:
        return to_float32(own)
    else:  # noqa: RET505  # decided when it is compiled: only one of the two may return
        return statistic


@triton.jit
def put_words(at, slot, words, wanted, NBYTES: tl.constexpr):
    """Stores unsigned ``words`` [m] of NBYTES bytes each, little-endian, at their ``slot`` where they are ``wanted``."""
    byte = tl.arange(0, NBYTES)
    value = words[:, None] >> (8 * byte)[None, :].to(words.dtype)
    tl.store(at + slot[:, None] * NBYTES + byte[None, :], value.to(tl.uint8), mask=wanted[:, None])


@triton.jit
def get_words(at, slot, wanted, NBYTES: tl.constexpr):
    """The inverse of :func:`put_words`: uint32, zeros where not ``wanted``."""
    word = tl.load(at + slot * NBYTES, mask=wanted, other=0).to(tl.uint32)
    for byte in tl.static_range(1, NBYTES):
        word |= tl.load(at + slot * NBYTES + byte, mask=wanted, other=0).to(tl.uint32) << (8 * byte)
    return word


@triton.jit
def put_float32(at, value):
    """Stores one float32."""
    byte = tl.arange(0, 4)
    tl.store(at + byte, (value.to(tl.uint32, bitcast=True) >> (8 * byte).to(tl.uint32)).to(tl.uint8))


@triton.jit
def get_float32(at):
    """Loads one float32."""
    word = tl.load(at).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        word |= tl.load(at + byte).to(tl.uint32) << (8 * byte)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def pack(at, i, n, codes, BITS: tl.constexpr):
    """Stores the lowest BITS (1 to 8) bits of n ``codes`` (int32 [SIZE], zeros beyond n) as ceil(n * BITS / 8) bytes."""
    if BITS == 8:
        tl.store(at + i, codes.to(tl.uint8), mask=i < n)
    else:
        # eight codes are BITS whole bytes
        GROUPS: tl.constexpr = codes.shape[0] // 8
        word: tl.constexpr = tl.uint64 if BITS > 4 else tl.uint32
        NBYTES: tl.constexpr = 8 if BITS > 4 else 4 if BITS > 2 else BITS
        lane, byte = tl.arange(0, 8), tl.arange(0, NBYTES)
        eight = tl.reshape((codes & ((1 << BITS) - 1)).to(word), [GROUPS, 8])
        words = tl.sum(eight << (lane * BITS)[None, :].to(word), axis=1)
        offset = tl.arange(0, GROUPS)[:, None] * BITS + byte[None, :]
        wanted = (byte < BITS)[None, :] & (offset < (n * BITS + 7) // 8)
        tl.store(at + offset, (words[:, None] >> (8 * byte)[None, :].to(word)).to(tl.uint8), mask=wanted)


@triton.jit
def unpack(at, i, n, BITS: tl.constexpr):
    """The inverse of :func:`pack`: int32 [SIZE], zeros beyond n."""
    first, shift = i * BITS // 8, i * BITS % 8
    word = tl.load(at + first, mask=i < n, other=0).to(tl.int32)
    if 8 % BITS != 0:
        word |= tl.load(at + first + 1, mask=(i < n) & (shift + BITS > 8), other=0).to(tl.int32) << 8
    return word >> shift & ((1 << BITS) - 1)


@triton.jit
def magnitude_bits(p):
    """|p| as signed integers of the same width: ordered like the numbers, inf and NaN on top."""
    integer: tl.constexpr = tl.int64 if p.dtype == tl.float64 else tl.int32
    return tl.abs(p).to(integer, bitcast=True)

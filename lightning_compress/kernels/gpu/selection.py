"""GPU form of ``kernels.reference.selection``: elements and slots find each other by search in a sorted row."""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import magnitude_bits


@triton.jit
def kept(n, RATIO: tl.constexpr):
    """``compressors.base.kept``: int32."""
    return tl.maximum((tl.full([], RATIO, tl.float64) * n.to(tl.float64) + 0.5).to(tl.int32), 1)


@triton.jit
def largest(p, i, n, k):
    """The k-th largest magnitude, and which elements are among the k largest: ties by lower index, zeros never.

    The k-th largest is built from its highest bit down: a bit is set if k magnitudes reach what it gives.
    """
    bits = tl.where(i < n, magnitude_bits(p), -1)
    TOP: tl.constexpr = 62 if p.dtype == tl.float64 else 30
    bound, one = tl.full([], 0, bits.dtype), tl.full([], 1, bits.dtype)
    for place in range(TOP + 1):
        trial = bound | one << (TOP - place)
        bound = tl.where(tl.sum((bits >= trial).to(tl.int32), axis=0) >= k, trial, bound)
    above = bits > bound
    level = (bits == bound) & (bits > 0)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
    return bound.to(p.dtype, bitcast=True), chosen


@triton.jit
def indices_of(chosen, slot):
    """int32 [SLOTS]: indices of the chosen elements, ascending, then zeros; and how many are chosen."""
    upto = tl.cumsum(chosen.to(tl.int32), axis=0)
    count = tl.max(upto, axis=0)
    return tl.where(slot < count, first_reaching(upto, slot + 1), 0), count


@triton.jit
def slots_of(indices, k, slot, i, n):
    """Which slot [SLOTS] names each element, and whether one does, by the rules of ``reference.selection``.

    Behind a slot with the index i, none with the index i or less counts: the first place where the running maximum of
    the indices reaches i is the only slot that can name i.
    """
    reached = tl.associative_scan(tl.where(slot < k, indices, 1 << 30), 0, larger)
    found = tl.minimum(first_reaching(reached, i), slot.shape[0] - 1)
    return found, (tl.gather(reached, found, 0) == i) & (i < n)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def first_reaching(ascending, wanted):
    """First place in ``ascending`` (a power of two of numbers) that holds ``wanted`` or more; its length if none does."""
    place, step = tl.zeros_like(wanted), ascending.shape[0] // 2
    while step > 0:
        place += tl.where(tl.gather(ascending, place + (step - 1), 0) < wanted, step, 0)
        step = step // 2
    return place + (tl.gather(ascending, place, 0) < wanted).to(tl.int32)


@triton.jit
def index_bits(n):
    """Bits of one index into a block of n elements: 1 to 16."""
    power = tl.arange(0, 16)
    return tl.maximum(tl.sum(((n - 1) >> power > 0).to(tl.int32), axis=0), 1)


@triton.jit
def put_indices(at, indices, k, width, SLOTS: tl.constexpr):
    """Stores the lowest ``width`` (1 to 16) bits of k indices, zeros beyond, bit by bit of each byte."""
    NBYTES: tl.constexpr = 2 * SLOTS
    place, lane, byte = tl.arange(0, 8 * NBYTES), tl.arange(0, 8), tl.arange(0, NBYTES)
    slot = place // width
    bit = tl.gather(indices, tl.minimum(slot, SLOTS - 1), 0) >> (place % width) & 1
    bits = tl.reshape(tl.where(slot < k, bit, 0), [NBYTES, 8])
    tl.store(at + byte, tl.sum(bits << lane[None, :], axis=1).to(tl.uint8), mask=byte < (k * width + 7) // 8)


@triton.jit
def get_indices(at, slot, k, width):
    """The inverse of :func:`put_indices`: int32 [SLOTS]."""
    place = slot * width
    word, nbytes = tl.zeros_like(slot), (k * width + 7) // 8
    for byte in tl.static_range(3):
        offset = place // 8 + byte
        word |= tl.load(at + offset, mask=offset < nbytes, other=0).to(tl.int32) << (8 * byte)
    return word >> (place % 8) & ((1 << width) - 1)

"""Compiled form of ``kernels.reference.selection``.

Magnitudes are compared as integers (see ``formats.magnitude``), so counting those that reach a bound is vector code. A
bound that k elements reach, and few more, is mostly the one that fitted the block before. Otherwise it is found by bisection
over the largest magnitudes of groups of elements: at least k elements reach what k groups reach. Only the elements that reach
it are looked at one by one. Whatever the bound, the same elements are chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.job import Array

LANES, GROUP = 16, 4
"""A group is one lane of GROUP rows of LANES elements, so that the maxima of LANES groups need no shuffling."""
ENOUGH = 16
"""Groups are made of at least so many elements for each one to choose: then few of these share a group."""
RUN = 64
"""Elements whose comparisons make one word of bits."""


class Selection(NamedTuple):
    """Scratch of :func:`largest`, and its result."""

    chosen: Array
    """int32 [longest]: their indices, ascending."""
    word: Array
    """Signed integers of the block's width, [longest]: their magnitudes."""
    maxima: Array
    """The same, [longest / GROUP]: the largest magnitude of each group."""
    others: Array
    """As ``maxima``: those of groups of groups."""
    guess: Array
    """The same, [1]: a bound that somewhat more than k elements of the next block may reach."""


@njit()
def kept(n, ratio):
    """``compressors.base.kept``."""
    return max(1, int(ratio * n + 0.5))


@njit()
def selection_scratch(job):
    """Its arrays, one behind the other in ``job.scratch``."""
    longest = job.bits.shape[0]
    words, groups = longest + LANES, longest // GROUP
    integers = job.scratch.view(job.bits.dtype)
    guess, integers = integers[:1], integers[1:]
    guess[0] = job.mask  # nothing reaches it
    return Selection(
        integers[words + 2 * groups :].view(np.int32)[:longest],
        integers[:words],
        integers[words : words + groups],
        integers[words + groups : words + 2 * groups],
        guess,
    )


@njit()
def largest(job, n, k, low, top, selection):
    """Chooses the k largest of the n magnitudes in ``job.bits``, ties by lower index.

    Args:
        job: The encode job.
        n: Elements of the block.
        k: Elements to choose; fewer are chosen if fewer reach ``low``.
        low: Smallest magnitude, as an integer, that may be chosen; 1 or more, so zeros never are.
        top: The largest magnitude, as an integer.
        selection: Scratch; ``chosen`` and ``word`` get the result.

    Returns:
        How many were chosen.
    """
    bits, mask, guess = job.bits, job.mask, selection.guess
    integer, margin = type(mask), octave(mask) >> 3
    bound = max(guess[0], integer(low))
    reach = reaching(bits, mask, n, bound)
    # too few, or so many that looking at them one by one takes longer than another search: this block is of another size
    if (reach < k and bound > low) or reach > 4 * k:
        bound = integer(searched(bits, mask, n, k, low, top, selection))
        guess[0] = bound - margin
    elif reach > 2 * k:
        guess[0] = bound + margin
    count = collect(bits, mask, n, bound, selection)
    return count if count <= k else cut(selection, count, k, bound, top)


@njit()
def searched(bits, mask, n, k, low, top, selection):
    """As :func:`reached_by`, for all elements of a block."""
    words, maxima, others, groups = bits, selection.maxima, selection.others, n
    while groups >= ENOUGH * max(k, GROUP):
        groups = group_maxima(words, mask, groups, maxima)
        words, maxima, others = maxima, others, maxima
    return reached_by(words, mask, groups, k, low, top)


@njit()
def sampled(job, n, k, ratio, top, selection):
    """``kernels.reference.selection.sampled``; as :func:`largest` otherwise."""
    bits, mask, word, p = job.bits, job.mask, selection.word, job.p
    stride = 1 if ratio > 0.5 else max(1, (n // max(n // 100, int(32 / ratio)) - 1) | 1)
    if stride == 1:
        return largest(job, n, k, 1, top, selection)
    samples = (n + stride - 1) // stride
    for i in range(samples):
        word[i] = bits[i * stride] & mask
    last = bits.shape[0] - 1
    bits[last] = of_rank(word, mask, samples, kept(samples, ratio), top)
    for _ in range(10):
        if 5 * reaching(bits, mask, n, bits[last]) >= 4 * k:
            break
        p[last] *= p.dtype.type(0.8)
    bound = max(1, bits[last])
    count = collect(bits, mask, n, type(mask)(bound), selection)
    return count if count <= k else cut(selection, count, k, bound, top)


@njit()
def of_rank(words, mask, n, k, top):
    """The k-th largest of n magnitudes, none of which is above ``top``: the largest bound that k of them reach."""
    low, high = np.int64(0), np.int64(top) + 1
    while high - low > 1:
        middle = low + (high - low >> 1)
        if reaching(words, mask, n, type(mask)(middle)) < k:
            high = middle
        else:
            low = middle
    return type(mask)(low)


@njit()
def reaching(words, mask, n, bound):
    """How many of the n magnitudes reach ``bound``."""
    count = np.int32(0)
    for i in range(n):
        count += np.int32((words[i] & mask) >= bound)
    return count


@njit()
def group_maxima(words, mask, n, maxima):
    """Lists the largest magnitude of each group; returns how many. What does not fill GROUP rows is in no group."""
    integer = type(mask)
    tiles = n // (GROUP * LANES)
    for tile in range(tiles):
        for lane in range(LANES):
            most = integer(0)
            for row in range(GROUP):
                most = max(most, integer(words[(tile * GROUP + row) * LANES + lane] & mask))
            maxima[tile * LANES + lane] = most
    return tiles * LANES


@njit()
def octave(mask):
    """What one power of two is in magnitudes as integers."""
    return (mask >> 8) + 1 if mask >> 40 == 0 else (mask >> 11) + 1


@njit()
def reached_by(words, mask, n, k, low, top):
    """A bound, ``low`` or more, that at least k of the n magnitudes reach, and not many more than k if possible.

    Fewer than k reach the bound only if fewer reach ``low``.
    """
    integer = type(mask)
    enough = k + (k >> 2)
    high = top + 1
    step = octave(mask)
    while high - low > 1:
        # From the top down in doubling steps: the k-th magnitude is mostly a few powers of two below the largest.
        middle = max(high - step, low + (high - low >> 1))
        step = min(step + step, high >> 1)
        count = reaching(words, mask, n, integer(middle))
        if count < k:
            high = middle
        else:
            low = middle
            if count <= enough:
                break
    return low


@intrinsic
def run_reaching(typingctx, words, at, mask, bound):
    """Bit i of the word tells whether the magnitude of ``words[at + i]`` reaches ``bound``."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        vector = ir.VectorType(context.get_value_type(words.dtype), RUN)
        row = builder.load(builder.bitcast(builder.gep(array.data, [args[1]]), vector.as_pointer()), align=4)

        def all_lanes(value):
            lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), RUN), [0] * RUN))

        reach = builder.icmp_signed(">=", builder.and_(row, all_lanes(args[2])), all_lanes(args[3]))
        return builder.bitcast(reach, ir.IntType(RUN))

    return types.int64(words, at, words.dtype, words.dtype), codegen


@intrinsic
def lowest_bit(typingctx, word):
    """Number of the lowest bit of ``word`` that is set; ``word`` is not 0."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.int64), codegen


@njit()
def collect(bits, mask, n, bound, selection):
    """Lists the elements that reach ``bound``; returns how many."""
    index, word, count = selection.chosen, selection.word, 0
    whole = n // RUN * RUN
    for at in range(0, whole, RUN):
        run: int = run_reaching(bits, at, mask, bound)  # type: ignore[call-arg]
        while run:
            i = at + lowest_bit(run)
            index[count], word[count] = i, bits[i] & mask
            count += 1
            run &= run - 1
    for i in range(whole, n):
        if bits[i] & mask >= bound:
            index[count], word[count] = i, bits[i] & mask
            count += 1
    return count


@njit()
def cut(selection, count, k, low, top):
    """Keeps the k largest of ``count`` candidates, all of which reach ``low``."""
    index, word = selection.chosen, selection.word
    integer = type(word[0])
    rows = (count + LANES - 1) // LANES
    word[count : rows * LANES] = 0
    high = top + 1
    while high - low > 1:
        middle = low + (high - low >> 1)
        bound, reach = integer(middle), np.int32(0)
        for row in range(rows):
            for lane in range(LANES):
                reach += np.int32(word[row * LANES + lane] >= bound)
        if reach < k:
            high = middle
        else:
            low = middle
            if reach == k:
                break
    room = k  # left for elements at the bound itself
    for i in range(count):
        room -= word[i] > low
    chosen = 0
    for i in range(count):
        level = word[i] == low
        index[chosen], word[chosen] = index[i], word[i]  # stays if it is counted: cheaper than a branch
        chosen += (word[i] > low) | (level & (room > 0))
        room -= level
    return chosen


@njit()
def index_bits(n):
    """``reference.selection.index_bits``."""
    width = 1
    while 1 << width < n:
        width += 1
    return width


@njit()
def put_indices(index, count, width, payload, at):
    """Writes ``count`` indices of ``width`` bits each from ``payload[at]`` on, where there are zeros."""
    register, filled = np.int64(0), 0
    for slot in range(count):
        register |= np.int64(index[slot]) << filled
        filled += width
        while filled >= 8:
            payload[at] = register & 255
            at += 1
            register >>= 8
            filled -= 8
    if filled:
        payload[at] = register


@njit()
def next_index(payload, at, register, filled, width):
    """The next index, and where the one after it begins: the next byte to be read, and the bits that have been read."""
    while filled < width:
        register |= np.int64(payload[at]) << filled
        at += 1
        filled += 8
    return register & (1 << width) - 1, at, register >> width, filled - width

"""What every CPU kernel is given, and the first and last steps that all of them share.

A block is loaded into a scratch array that stays in the cache (gradient and residual are read once), coded there, and what
coding left out is written back to the memory: one pass over the large arrays whatever the compressor does in between.

While a block is coded the memory would idle, since the hardware does not foresee the next block. So its first lines are asked
for beforehand (``prefetch``): coding then runs beside the transfer instead of after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.formats import magnitude, narrow, widen
from lightning_compress.kernels.cpu.prefetch import prefetch_read, prefetch_write
from lightning_compress.kernels.table import ABSENT, LENGTH, NONFINITE, PARAMETER, PRESENT, SOURCE, STATE

Array = npt.NDArray[np.generic]
FLOAT32_MAX = float(np.finfo(np.float32).max)
AHEAD = 256
"""Elements of the next block that are asked for in one go: more would wait for one another."""
BEHIND = 4096
"""Elements of a block whose place is asked for before they are decoded: the nearest cache holds no more."""


class EncodeJob(NamedTuple):
    """Arguments of an encode kernel. T is float32 or float64, P the parameters of the bucket, n the blocks."""

    values: Array
    """T, or half precision beside T = float32 (see ``formats.widen``): gradients (or the owner's means), flat."""
    weight: np.floating
    """T: p = weight * (values + scale * state)."""
    scale: np.floating
    """T: the loss scale; the state holds unscaled values."""
    unscale: np.floating
    """T: 1 / (weight * scale)."""
    state: Array
    """T: the memory's flat store."""
    read: Array
    """int64 [P]: added to a block's state offset when it is read (which of two stores is current)."""
    write: Array
    """int64 [P]: the same when it is written."""
    compensate: bool
    """Whether p includes the state."""
    update: bool
    """Whether p - decode(encode(p)) is written to the state."""
    payload: Array
    """uint8, zeros on entry."""
    table: Array
    """int64 [n, COLUMNS]."""
    status: Array
    """uint8 [P]: only PRESENT parameters are coded."""
    marks: Array
    """uint8 [P]: NONFINITE is written for parameters that hold an inf or NaN."""
    salt: int
    """Counter of the random numbers."""
    shared: Array
    """float32 [n]: scale statistic of each block's whole tensor, or [0]: every block takes its own."""
    p: Array
    """T [longest + 1]: the block at hand; becomes p - decoded."""
    bits: Array
    """The same memory as signed integers of T's width."""
    mask: np.signedinteger
    """All bits of such an integer but the sign."""
    scratch: Array
    """uint64 [scratch_words(longest)]: what the kernel likes."""


class DecodeJob(NamedTuple):
    """Arguments of a decode kernel: out = weight * sum over ranks of the decoded blocks."""

    payload: Array
    """uint8: the payloads of all ranks, one every ``stride`` bytes."""
    stride: int
    ranks: int
    out: Array
    """T, or half precision beside T = float32: bucket or shard, flat."""
    weight: np.floating
    table: Array
    status: Array
    """uint8 [P]: ABSENT parameters are left alone, NONFINITE ones become NaN."""
    salt: int
    total: Array
    """T [longest]: scratch of the sum."""
    scratch: Array
    """uint64 [scratch_words(longest)]: what the kernel likes."""


def scratch_words(longest: int) -> int:
    """Length of a job's ``scratch`` for blocks of up to ``longest`` elements: a selection in float64 takes most."""
    return 2 * longest + 32


@njit(inline="always")
def load(job, b):
    """Puts the block's p into ``job.p``; returns its largest magnitude, or -1 if there is nothing to code."""
    row = job.table[b]
    parameter = row[PARAMETER]
    if job.status[parameter] != PRESENT:
        return job.weight * 0 - 1
    # locals and slices, here and below: only of such loops does LLVM make vector code
    n, p, weight, scale = row[LENGTH], job.p, job.weight, job.scale
    values = job.values[row[SOURCE] : row[SOURCE] + n]
    top = job.bits.dtype.type(0)  # as integers, magnitudes are ordered like the numbers, inf and NaN on top
    if job.compensate:
        at = row[STATE] + job.read[parameter]
        state = job.state[at : at + n]
        for i in range(n):
            x = weight * (widen(values[i]) + scale * state[i])
            p[i] = x
            top = max(top, magnitude(x))
    else:
        for i in range(n):
            x = weight * widen(values[i])
            p[i] = x
            top = max(top, magnitude(x))
    ahead(job, b, 0)
    last = job.bits.shape[0] - 1
    job.bits[last] = top
    peak = p[last]
    if not peak < np.inf:
        job.marks[parameter] = NONFINITE
        return job.weight * 0 - 1
    return peak


@njit()
def ahead(job, b, part):
    """Asks for elements ``part * AHEAD`` to ``(part + 1) * AHEAD`` of the block after b."""
    if b + 1 == job.table.shape[0]:
        return
    row = job.table[b + 1]
    first, end = part * AHEAD, min(row[LENGTH], (part + 1) * AHEAD)
    prefetch_read(job.values, row[SOURCE] + first, row[SOURCE] + end)
    if job.compensate:
        at = row[STATE] + job.read[row[PARAMETER]]
        prefetch_read(job.state, at + first, at + end)


@njit(inline="always")
def store(job, b):
    """Writes what ``job.p`` now holds (p - decoded) to the memory, in unscaled units."""
    ahead(job, b, 1)
    if job.update:
        row = job.table[b]
        n, p, unscale = row[LENGTH], job.p, job.unscale
        at = row[STATE] + job.write[row[PARAMETER]]
        state = job.state[at : at + n]
        for i in range(n):
            state[i] = p[i] * unscale


@njit(inline="always")
def wants(job, b):
    """Whether the block is to be decoded; if so, ``job.total`` is zeroed. A non-finite parameter is filled with NaN here."""
    row = job.table[b]
    status = job.status[row[PARAMETER]]
    if status == ABSENT:
        return False
    if status == NONFINITE:
        for i in range(row[SOURCE], row[SOURCE] + row[LENGTH]):
            job.out[i] = narrow(np.float32(np.nan), job.out)
        return False
    prefetch_write(job.out, row[SOURCE], row[SOURCE] + min(row[LENGTH], BEHIND))
    total = job.total
    for i in range(row[LENGTH]):
        total[i] = 0
    return True


@njit(inline="always")
def finish(job, b):
    """Writes weight * total to the block's place."""
    row = job.table[b]
    n, total, weight = row[LENGTH], job.total, job.weight
    out = job.out[row[SOURCE] : row[SOURCE] + n]
    for i in range(n):
        out[i] = narrow(weight * total[i], out)


@njit()
def put_float32(payload, offset, value):
    """Stores a float32 at any byte offset, little-endian."""
    word = np.float32(value).view(np.uint32)
    for k in range(4):
        payload[offset + k] = (word >> np.uint32(8 * k)) & np.uint32(255)


@njit()
def get_float32(payload, offset):
    """Reads a float32 from any byte offset, little-endian."""
    word = 0
    for k in range(4):
        word |= np.int64(payload[offset + k]) << (8 * k)
    return np.uint32(word).view(np.float32)


@njit()
def to_float32(value):
    """Rounds to float32; finite values beyond its range saturate."""
    return np.float32(min(max(value, -FLOAT32_MAX), FLOAT32_MAX))

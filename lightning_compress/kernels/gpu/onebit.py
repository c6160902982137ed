"""GPU form of ``kernels.reference.onebit``."""

import triton
import triton.language as tl

from lightning_compress.kernels import table as col
from lightning_compress.kernels.gpu.bits import TINY, get_float32, pack, put_float32, to_float32, unpack

START, ROW = tl.constexpr(col.START), tl.constexpr(col.ROW)


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, first = row_lengths(line, p.shape[0])
    upto = tl.cumsum((p != 0).to(tl.int32), axis=0)
    begin, end = tl.where(i > 0, first + (i - 1) * row, 0), tl.minimum(first + i * row, n)  # of row i
    filled = (begin < n) & (before(upto, end) > before(upto, tl.minimum(begin, n)))
    present = (tl.gather(filled.to(tl.int32), row_of(i, row, first), 0) > 0) & (i < n)
    if statistic is None:
        counted = tl.maximum(tl.sum(present.to(tl.int32), axis=0), 1)
        mean = to_float32(tl.sum(tl.abs(p.to(tl.float64)), axis=0) / counted.to(tl.float64))
    else:
        mean = statistic
    mean = tl.where(mean >= TINY, mean, 0.0)
    sent, rows = (mean > 0).to(tl.int32), row_bits(line, n)
    put_float32(code, mean)
    pack(code + 4, i, rows, filled.to(tl.int32) * sent, 1)
    pack(code + 4 + (rows + 7) // 8, i, n, (p < 0).to(tl.int32) * sent, 1)
    return tl.where(present, tl.where(p < 0, -mean, mean), 0.0)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, first = row_lengths(line, i.shape[0])
    rows, mean = row_bits(line, n), get_float32(code)
    present = unpack(code + 4, row_of(i, row, first), rows, 1)
    negative = unpack(code + 4 + (rows + 7) // 8, i, n, 1)
    return tl.where(present == 0, 0.0, tl.where(negative == 0, mean, -mean))


@triton.jit
def row_lengths(line, SIZE: tl.constexpr):
    """Elements of a row, and of the block's first row: int32, and no more than SIZE, beyond which it does not matter."""
    row = tl.load(line + ROW)
    first = row - tl.load(line + START) % row
    return tl.minimum(row, SIZE).to(tl.int32), tl.minimum(first, SIZE).to(tl.int32)


@triton.jit
def row_of(i, row, first):
    """Row of each element inside the block."""
    return tl.where(i < first, 0, 1 + (i - first) // row)


@triton.jit
def row_bits(line, n):
    """``reference.onebit.row_bits``: int32."""
    row = tl.load(line + ROW)
    return ((n + row - 2) // row + 1).to(tl.int32)


@triton.jit
def before(upto, place):
    """How many of the elements before ``place`` count, from the running number up to and with each."""
    return tl.where(place > 0, tl.gather(upto, tl.maximum(place - 1, 0), 0), 0)

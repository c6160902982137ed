"""The two kernels that are launched: what happens to a block before, after and around a compressor's coder."""

import triton
import triton.language as tl

from lightning_compress.kernels import table as col
from lightning_compress.kernels.gpu.bits import magnitude_bits
from lightning_compress.kernels.gpu.cast import narrow, widen

ABSENT, PRESENT, NONFINITE = tl.constexpr(col.ABSENT), tl.constexpr(col.PRESENT), tl.constexpr(col.NONFINITE)
COLUMNS, SOURCE, LENGTH, PAYLOAD, STATE, PARAMETER = (
    tl.constexpr(c) for c in (col.COLUMNS, col.SOURCE, col.LENGTH, col.PAYLOAD, col.STATE, col.PARAMETER)
)


@triton.jit(do_not_specialize=["salt"])
def encode_blocks(
    values,
    weight: tl.float64,
    scale: tl.float64,
    device_scale,
    state,
    read,
    write,
    payload,
    table,
    status,
    marks,
    shared,
    salt: tl.uint32,
    CODER: tl.constexpr,
    BITS: tl.constexpr,
    RATIO: tl.constexpr,
    VARIANT: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``EncodeJob`` for one block. Not compensated without ``read``, not remembered without ``write``."""
    block = tl.program_id(0)
    line = table + block.to(tl.int64) * COLUMNS
    parameter = tl.load(line + PARAMETER)
    if tl.load(status + parameter) == PRESENT:
        n, i = tl.load(line + LENGTH).to(tl.int32), tl.arange(0, SIZE)
        inside = i < n
        real: tl.constexpr = state.dtype.element_ty
        # scalars of a launch are Python numbers in the interpreter
        part = tl.full([], weight, tl.float64)
        factor = tl.full([], scale, tl.float64) if device_scale is None else tl.load(device_scale).to(tl.float64)
        p = widen(tl.load(values + tl.load(line + SOURCE) + i, mask=inside, other=0.0), real)
        if read is not None:
            old = tl.load(state + tl.load(line + STATE) + tl.load(read + parameter) + i, mask=inside, other=0.0)
            p = p + factor.to(real) * old
        p = part.to(real) * p
        peak = tl.max(magnitude_bits(p), axis=0).to(real, bitcast=True)
        if peak < float("inf"):
            statistic = None if shared is None else tl.load(shared + block)
            code = payload + tl.load(line + PAYLOAD)
            decoded = CODER(p, i, n, line, code, peak, statistic, salt, BITS, RATIO, VARIANT, SLOTS)
            if write is not None:
                left = (p - decoded.to(real)) * (1.0 / (part * factor)).to(real)
                tl.store(state + tl.load(line + STATE) + tl.load(write + parameter) + i, left, mask=inside)
        else:
            tl.store(marks + parameter, NONFINITE)


@triton.jit(do_not_specialize=["stride", "ranks", "salt"])
def decode_blocks(
    payload,
    stride: tl.int64,
    ranks: tl.int32,
    out,
    weight: tl.float64,
    table,
    status,
    salt: tl.uint32,
    CODER: tl.constexpr,
    BITS: tl.constexpr,
    RATIO: tl.constexpr,
    VARIANT: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``DecodeJob`` for one block: all ranks' codes are added up in registers, ``out`` is written once."""
    line = table + tl.program_id(0).to(tl.int64) * COLUMNS
    seen = tl.load(status + tl.load(line + PARAMETER))
    if seen != ABSENT:
        n, i = tl.load(line + LENGTH).to(tl.int32), tl.arange(0, SIZE)
        real: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
        total = tl.zeros([SIZE], real)
        if seen == NONFINITE:
            total += float("nan")
        else:
            code = payload + tl.load(line + PAYLOAD)
            for rank in range(ranks):
                decoded = CODER(i, n, line, code + rank * stride, salt, BITS, RATIO, VARIANT, SLOTS)
                total += decoded.to(real)
            total = tl.full([], weight, real) * total
        tl.store(out + tl.load(line + SOURCE) + i, narrow(total, out.dtype.element_ty), mask=i < n)

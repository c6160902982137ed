"""GPU form of ``kernels.reference.cast``.

bf16 and fp8 by bit arithmetic, as in ``kernels.cpu.cast``, where it is explained: GPUs before sm_89 have no
float8_e4m3fn, and Triton's interpreter does not round bf16 to nearest even.
"""

import triton
import triton.language as tl

from lightning_compress.kernels.gpu.bits import (
    FLOAT32_MAX,
    TINY,
    get_float32,
    get_words,
    put_float32,
    put_words,
    scale_of,
)
from lightning_compress.kernels.reference import cast as reference

FP16_MAX = tl.constexpr(65504.0)
BF16_MAX = tl.constexpr((2.0 - 2.0**-7) * 2.0**127)
FP8_MAX = tl.constexpr(reference.FP8_MAX)
FP32, BF16, FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2}
"""What VARIANT stands for."""


@triton.jit
def encode(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    words = number_bits(p, VARIANT)
    put_words(code, i, words, i < n, 4 if VARIANT == FP32 else 2)
    return number_of(words, VARIANT)


@triton.jit
def decode(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    return number_of(get_words(code, i, i < n, 4 if VARIANT == FP32 else 2), VARIANT)


@triton.jit
def encode_fp8(
    p, i, n, line, code, peak, statistic, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    top = scale_of(peak, statistic)
    sent = top >= TINY
    scale = tl.where(sent, tl.div_rn(top, FP8_MAX), 0.0)
    inverse = tl.where(sent, tl.div_rn(FP8_MAX, tl.maximum(top, TINY)), 0.0)
    scaled = tl.minimum(tl.maximum(p * inverse.to(p.dtype), -FP8_MAX), FP8_MAX)
    codes = tl.where(sent, fp8_bits(scaled.to(tl.float32)), 0)
    put_float32(code, scale)
    tl.store(code + 4 + i, codes.to(tl.uint8), mask=i < n)
    return fp8_number(codes) * scale


@triton.jit
def decode_fp8(
    i, n, line, code, salt,
    BITS: tl.constexpr, RATIO: tl.constexpr, VARIANT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    return fp8_number(tl.load(code + 4 + i, mask=i < n, other=0).to(tl.uint32)) * get_float32(code)


@triton.jit
def number_bits(p, FORMAT: tl.constexpr):
    """uint32: the bits of p in the format; finite numbers beyond its range saturate."""
    LIMIT: tl.constexpr = FLOAT32_MAX if FORMAT == FP32 else BF16_MAX if FORMAT == BF16 else FP16_MAX
    value = tl.minimum(tl.maximum(p, -LIMIT), LIMIT).to(tl.float32)
    if FORMAT == FP32:
        words = value.to(tl.uint32, bitcast=True)
    elif FORMAT == BF16:
        words = bf16_bits(value)
    else:
        words = value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return words


@triton.jit
def number_of(words, FORMAT: tl.constexpr):
    """float32 numbers of bits in the format."""
    if FORMAT == FP32:
        value = words.to(tl.float32, bitcast=True)
    elif FORMAT == BF16:
        value = (words << 16).to(tl.float32, bitcast=True)
    else:
        value = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def bf16_bits(value):
    """uint32: float32 numbers rounded to bf16; NaN stays NaN."""
    word = value.to(tl.uint32, bitcast=True)
    rounded = word + (word >> 16 & 1) + 0x7FFF >> 16
    return tl.where(value != value, 0x7FC0, rounded)  # noqa: PLR0124  # only NaN is not itself


@triton.jit
def widen(numbers, real: tl.constexpr):
    """Numbers of any format in ``real``, float32 or float64."""
    if numbers.dtype == tl.bfloat16:
        return number_of(numbers.to(tl.uint16, bitcast=True).to(tl.uint32), BF16)
    else:  # noqa: RET505  # decided when it is compiled: only one of the two may return
        return numbers.to(real)


@triton.jit
def narrow(numbers, dtype: tl.constexpr):
    """Numbers rounded to any format; what is beyond its range becomes inf."""
    if dtype == tl.bfloat16:
        return bf16_bits(numbers).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505  # as above
        return numbers.to(dtype)


@triton.jit
def fp8_bits(value):
    """uint32: float8_e4m3fn bits of float32 numbers within its range."""
    word = value.to(tl.uint32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    normal = magnitude + (magnitude >> 20 & 1) - ((120 << 23) - 0x7FFFF) >> 20
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    return word >> 24 & 0x80 | tl.where(magnitude >= 121 << 23, normal, small)


@triton.jit
def fp8_number(codes):
    """float32 of float8_e4m3fn bits (uint32)."""
    magnitude = codes & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = magnitude.to(tl.int32).to(tl.float32) * (2.0**-9)
    value = tl.where(magnitude >= 8, normal, small)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(codes >= 0x80, -value, value)

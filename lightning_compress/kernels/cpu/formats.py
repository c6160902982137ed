"""Narrow number formats by bit arithmetic, since the CPU has no such numbers.

All rounding starts from a float32 no larger than the format's maximum, so no carry can reach inf. Above the format's
smallest normal number, dropping low mantissa bits with the usual carry rounds to nearest even, and the exponent's bias
is one subtraction. Below it, adding a power of two whose last mantissa bit weighs as much as the format's smallest
step lets the float adder round; the code is the difference of the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from lightning_compress.kernels.cpu.compiling import njit

FP16_MAX = 65504.0
BF16_MAX = float(np.uint32(0x7F7F0000).view(np.float32))

SIGN = np.uint32(0x80000000)
REST = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000)


# Below, every np.uint32(...) keeps numba from widening to 64 bits, which would halve the vectors.


@njit()
def fp16_code(value):
    """float16 bits of a float32."""
    word = np.float32(value).view(np.uint32)
    magnitude = np.uint32(word & REST)
    odd = np.uint32(magnitude >> np.uint32(13) & np.uint32(1))
    normal = np.uint32(magnitude + odd - np.uint32((112 << 23) - 0xFFF)) >> np.uint32(13)
    small = np.uint32(np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(126 << 23))
    return np.uint16((word & SIGN) >> np.uint32(16) | (normal if magnitude >= np.uint32(113 << 23) else small))


@njit()
def fp16_value(code):
    """float32 of float16 bits."""
    magnitude = np.uint32(code & np.uint32(0x7FFF))
    normal = np.uint32((magnitude << np.uint32(13)) + np.uint32(112 << 23))
    if magnitude >= np.uint32(0x7C00):
        normal = np.uint32(normal | INFINITE)
    # through an integer: as float32 bits these are subnormal, and a process may have told the CPU to flush those
    small = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    value = normal if magnitude >= np.uint32(0x400) else small
    return np.uint32(value | np.uint32(code & np.uint32(0x8000)) << np.uint32(16)).view(np.float32)


@njit()
def bf16_code(value):
    """bfloat16 bits of a float32."""
    word = np.float32(value).view(np.uint32)
    odd = np.uint32(word >> np.uint32(16) & np.uint32(1))
    return np.uint16(np.uint32(word + odd + np.uint32(0x7FFF)) >> np.uint32(16))


@njit()
def bf16_value(code):
    """float32 of bfloat16 bits."""
    return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)


@njit()
def fp8_code(value):
    """float8_e4m3fn bits of a float32."""
    word = np.float32(value).view(np.uint32)
    magnitude = np.uint32(word & REST)
    odd = np.uint32(magnitude >> np.uint32(20) & np.uint32(1))
    normal = np.uint32(magnitude + odd - np.uint32((120 << 23) - 0x7FFFF)) >> np.uint32(20)
    small = np.uint32(np.float32(magnitude.view(np.float32) + np.float32(16384)).view(np.uint32) - np.uint32(141 << 23))
    return np.uint8((word & SIGN) >> np.uint32(24) | (normal if magnitude >= np.uint32(121 << 23) else small))


@njit()
def fp8_value(code):
    """float32 of float8_e4m3fn bits."""
    magnitude = np.uint32(code & np.uint32(0x7F))
    normal = np.uint32((magnitude << np.uint32(20)) + np.uint32(120 << 23))
    if magnitude == np.uint32(0x7F):
        normal = NAN
    small = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-9)).view(np.uint32)
    value = normal if magnitude >= np.uint32(8) else small
    return np.uint32(value | np.uint32(code & np.uint32(0x80)) << np.uint32(24)).view(np.float32)


def widen(number: Any) -> Any:
    """The value of an array's element: uint16 holds the bits of a bfloat16, int16 those of a float16. In kernels only."""
    raise NotImplementedError


def narrow(value: Any, array: Any) -> Any:
    """What stands for ``value`` in such an array; beyond the format's range, inf. In kernels only."""
    raise NotImplementedError


def magnitude(value: Any) -> Any:
    """|value| as a signed integer of its width: ordered like the numbers, inf and NaN on top. In kernels only."""
    raise NotImplementedError


@overload(magnitude)
def _magnitude(value):
    if value == types.float64:
        return lambda value: np.int64(np.float64(value).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF))
    return lambda value: np.int32(np.float32(value).view(np.int32) & np.int32(0x7FFFFFFF))


# numba knows no bfloat16, and on the CPU no float16: the integer type of the same width says which one it is
@overload(widen)
def _widen(number):
    if number == types.uint16:
        return lambda number: bf16_value(number)  # noqa: PLW0108  # numba wants the names of the arguments
    if number == types.int16:
        return lambda number: fp16_value(np.uint16(number))
    return lambda number: number


@overload(narrow)
def _narrow(value, array):
    if array.dtype == types.uint16:
        return lambda value, array: rounded_bf16(value)
    if array.dtype == types.int16:
        return lambda value, array: rounded_fp16(value)
    return lambda value, array: value


@njit()
def rounded_bf16(value):
    """bfloat16 bits of any float32; the carry of rounding leads to inf by itself."""
    return np.uint16(0x7FC0) if np.isnan(value) else bf16_code(value)


@njit()
def rounded_fp16(value):
    """float16 bits of any float32; 65536 is the power of two whose bits are those of inf."""
    limit = np.float32(65536.0)
    return np.uint16(0x7E00) if np.isnan(value) else fp16_code(min(max(value, -limit), limit))

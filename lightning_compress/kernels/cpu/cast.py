"""Compiled form of ``kernels.reference.cast``: the narrow formats by bit arithmetic, since the CPU has no such numbers.

All rounding starts from float32. Above a format's smallest normal number, dropping low mantissa bits with the usual carry
rounds to nearest even, and the exponent's bias is one subtraction. Below it, adding a power of two whose last mantissa bit
has the weight of the format's smallest step lets the float adder round, and the code is the difference of the bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_compress.kernels.cpu.job import FLOAT32_MAX, finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.cast import FP8_MAX
from lightning_compress.kernels.table import LENGTH, PAYLOAD

FP16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38

SIGN = np.uint32(0x80000000)
REST = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
QUIET_NAN = np.uint32(0x7FC00000)


@njit(nogil=True, cache=True)
def narrow(p, single, n, inverse, limit):
    """single = float32 of p * inverse, saturated at ``limit``."""
    real = p.dtype.type
    inverse, low, high = real(inverse), real(-limit), real(limit)
    for i in range(n):
        single[i] = np.float32(min(max(p[i] * inverse, low), high))


@njit(nogil=True, cache=True)
def copy_bytes(source, target, at, n):
    out = target[at : at + n]
    for i in range(n):
        out[i] = source[i]


@njit(nogil=True, cache=True)
def fp16_bits(word):
    """float16 code of a float32 of at most 65504, both as integers."""
    magnitude = np.uint32(word & REST)
    odd = np.uint32(magnitude >> np.uint32(13) & np.uint32(1))
    normal = np.uint32(magnitude + odd - np.uint32((112 << 23) - 0xFFF)) >> np.uint32(13)
    small = np.uint32(np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(126 << 23))
    return np.uint16((word & SIGN) >> np.uint32(16) | (normal if magnitude >= np.uint32(113 << 23) else small))


@njit(nogil=True, cache=True)
def fp16_value(code):
    """The float32 of a float16 code."""
    word = np.uint32(code)
    magnitude = np.uint32(word & np.uint32(0x7FFF))
    normal = np.uint32((magnitude << np.uint32(13)) + np.uint32(112 << 23))
    if magnitude >= np.uint32(0x7C00):
        normal = np.uint32(normal | INFINITE)
    # by way of an integer, since shifted into place these would be subnormal float32, which some programs flush to zero
    small = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    value = normal if magnitude >= np.uint32(0x400) else small
    return np.uint32(value | (word & np.uint32(0x8000)) << np.uint32(16)).view(np.float32)

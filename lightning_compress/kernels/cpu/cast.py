"""Compiled form of ``kernels.reference.cast``: the narrow formats by bit arithmetic, since the CPU has no such numbers.

All rounding starts from a float32 no larger than the format's maximum, so no carry can reach inf. Above the format's
smallest normal number, dropping low mantissa bits with the usual carry rounds to nearest even, and the exponent's bias
is one subtraction. Below it, adding a power of two whose last mantissa bit weighs as much as the format's smallest
step lets the float adder round; the code is the difference of the bits.
"""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.job import (
    FLOAT32_MAX,
    finish,
    get_float32,
    load,
    put_float32,
    store,
    to_float32,
    wants,
)
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.cast import FP8_MAX
from lightning_compress.kernels.table import LENGTH, PAYLOAD

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


@njit()
def copy_bytes(source, source_at, target, target_at, n):
    """Copies n bytes; a block's code may lie at any offset, so wider numbers cross through a scratch of their own."""
    a, b = source[source_at : source_at + n], target[target_at : target_at + n]
    for i in range(n):
        b[i] = a[i]


@njit()
def encode_fp16(job):
    codes = np.empty(job.p.shape[0], np.uint16)
    code_bytes, p, limit = codes.view(np.uint8), job.p, job.p.dtype.type(FP16_MAX)
    for b in range(job.table.shape[0]):
        if load(job, b) < 0:
            continue
        n = job.table[b, LENGTH]
        for i in range(n):
            codes[i] = fp16_code(min(max(p[i], -limit), limit))
            p[i] -= fp16_value(codes[i])
        copy_bytes(code_bytes, 0, job.payload, job.table[b, PAYLOAD], 2 * n)
        store(job, b)


@njit()
def decode_fp16(job):
    codes = np.empty(job.total.shape[0], np.uint16)
    code_bytes, total = codes.view(np.uint8), job.total
    for b in range(job.table.shape[0]):
        if not wants(job, b):
            continue
        n = job.table[b, LENGTH]
        for rank in range(job.ranks):
            copy_bytes(job.payload, rank * job.stride + job.table[b, PAYLOAD], code_bytes, 0, 2 * n)
            for i in range(n):
                total[i] += fp16_value(codes[i])
        finish(job, b)


@njit()
def encode_bf16(job):
    codes = np.empty(job.p.shape[0], np.uint16)
    code_bytes, p, limit = codes.view(np.uint8), job.p, job.p.dtype.type(BF16_MAX)
    for b in range(job.table.shape[0]):
        if load(job, b) < 0:
            continue
        n = job.table[b, LENGTH]
        for i in range(n):
            codes[i] = bf16_code(min(max(p[i], -limit), limit))
            p[i] -= bf16_value(codes[i])
        copy_bytes(code_bytes, 0, job.payload, job.table[b, PAYLOAD], 2 * n)
        store(job, b)


@njit()
def decode_bf16(job):
    codes = np.empty(job.total.shape[0], np.uint16)
    code_bytes, total = codes.view(np.uint8), job.total
    for b in range(job.table.shape[0]):
        if not wants(job, b):
            continue
        n = job.table[b, LENGTH]
        for rank in range(job.ranks):
            copy_bytes(job.payload, rank * job.stride + job.table[b, PAYLOAD], code_bytes, 0, 2 * n)
            for i in range(n):
                total[i] += bf16_value(codes[i])
        finish(job, b)


@njit()
def encode_fp32(job):
    codes = np.empty(job.p.shape[0], np.float32)
    code_bytes, p, limit = codes.view(np.uint8), job.p, job.p.dtype.type(FLOAT32_MAX)
    for b in range(job.table.shape[0]):
        if load(job, b) < 0:
            continue
        n = job.table[b, LENGTH]
        for i in range(n):
            codes[i] = np.float32(min(max(p[i], -limit), limit))
            p[i] -= codes[i]
        copy_bytes(code_bytes, 0, job.payload, job.table[b, PAYLOAD], 4 * n)
        store(job, b)


@njit()
def decode_fp32(job):
    codes = np.empty(job.total.shape[0], np.float32)
    code_bytes, total = codes.view(np.uint8), job.total
    for b in range(job.table.shape[0]):
        if not wants(job, b):
            continue
        n = job.table[b, LENGTH]
        for rank in range(job.ranks):
            copy_bytes(job.payload, rank * job.stride + job.table[b, PAYLOAD], code_bytes, 0, 4 * n)
            for i in range(n):
                total[i] += codes[i]
        finish(job, b)


@njit()
def encode_fp8(job):
    codes = np.empty(job.p.shape[0], np.uint8)
    p, limit = job.p, job.p.dtype.type(FP8_MAX)
    for b in range(job.table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = job.table[b, LENGTH], job.table[b, PAYLOAD]
        top = job.shared[b] if job.shared.shape[0] else to_float32(peak)
        if top >= TINY:
            scale = np.float32(top / np.float32(FP8_MAX))
            inverse = p.dtype.type(np.float32(np.float32(FP8_MAX) / top))
            put_float32(job.payload, at, scale)
            for i in range(n):
                codes[i] = fp8_code(min(max(p[i] * inverse, -limit), limit))
                p[i] -= np.float32(fp8_value(codes[i]) * scale)
            copy_bytes(codes, 0, job.payload, at + 4, n)
        store(job, b)


@njit()
def decode_fp8(job):
    total = job.total
    for b in range(job.table.shape[0]):
        if not wants(job, b):
            continue
        n = job.table[b, LENGTH]
        for rank in range(job.ranks):
            at = rank * job.stride + job.table[b, PAYLOAD]
            scale, codes = get_float32(job.payload, at), job.payload[at + 4 : at + 4 + n]
            for i in range(n):
                total[i] += np.float32(fp8_value(codes[i]) * scale)
        finish(job, b)


KERNELS = {
    "fp16": (encode_fp16, decode_fp16),
    "bf16": (encode_bf16, decode_bf16),
    "fp32": (encode_fp32, decode_fp32),
    "fp8": (encode_fp8, decode_fp8),
}

"""Compiled form of ``kernels.reference.cast``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.formats import (
    BF16_MAX,
    FP16_MAX,
    bf16_code,
    bf16_value,
    fp8_code,
    fp8_value,
    fp16_code,
    fp16_value,
)
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


@njit()
def copy_bytes(source, source_at, target, target_at, n):
    """Copies n bytes; a block's code may lie at any offset, so wider numbers cross through a scratch of their own."""
    a, b = source[source_at : source_at + n], target[target_at : target_at + n]
    for i in range(n):
        b[i] = a[i]


@njit()
def encode_fp16(job):
    codes = job.scratch.view(np.uint16)
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
    codes = job.scratch.view(np.uint16)
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
    codes = job.scratch.view(np.uint16)
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
    codes = job.scratch.view(np.uint16)
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
    codes = job.scratch.view(np.float32)
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
    codes = job.scratch.view(np.float32)
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
    codes = job.scratch.view(np.uint8)
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

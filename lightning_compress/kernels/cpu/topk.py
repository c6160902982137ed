"""Compiled form of ``kernels.reference.topk``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.formats import BF16_MAX, FP16_MAX, bf16_code, bf16_value, fp16_code, fp16_value
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.cpu.selection import (
    index_bits,
    kept,
    largest,
    next_index,
    put_indices,
    sampled,
    selection_scratch,
)
from lightning_compress.kernels.table import LENGTH, PAYLOAD

FP32, BF16, FP16 = 0, 1, 2


@njit()
def encode(job, ratio, value_format, by_sample):
    table, payload, p, bits = job.table, job.payload, job.p, job.bits
    selection = selection_scratch(job)
    index = selection.chosen
    last = bits.shape[0] - 1
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = table[b, LENGTH], table[b, PAYLOAD]
        k = kept(n, ratio)
        p[last] = peak
        top = bits[last]
        count = sampled(job, n, k, ratio, top, selection) if by_sample else largest(job, n, k, 1, top, selection)
        width = index_bits(n)
        put_indices(index, count, width, payload, at)
        put_values(p, index, count, value_format, payload, at + (k * width + 7) // 8)
        store(job, b)


@njit()
def put_values(p, index, count, value_format, payload, at):
    """Writes the chosen values; leaves p - decoded in ``p``."""
    if value_format == FP32:
        for slot in range(count):
            value = to_float32(p[index[slot]])
            put_float32(payload, at + 4 * slot, value)
            p[index[slot]] -= value
        return
    limit = p.dtype.type(BF16_MAX if value_format == BF16 else FP16_MAX)
    for slot in range(count):
        i = index[slot]
        value = min(max(p[i], -limit), limit)
        code = bf16_code(value) if value_format == BF16 else fp16_code(value)
        payload[at + 2 * slot] = code & 255
        payload[at + 2 * slot + 1] = code >> 8
        p[i] -= bf16_value(code) if value_format == BF16 else fp16_value(code)


@njit()
def decode(job, ratio, value_format, by_sample):
    table, payload, total = job.table, job.payload, job.total
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n = table[b, LENGTH]
        k, width = kept(n, ratio), index_bits(n)
        for rank in range(job.ranks):
            at = rank * job.stride + table[b, PAYLOAD]
            value_at = at + (k * width + 7) // 8
            register, filled, before = 0, 0, -1
            for slot in range(k):
                i, at, register, filled = next_index(payload, at, register, filled, width)
                if before < i < n:
                    total[i] += get_value(payload, value_at, slot, value_format)
                before = max(before, i)
        finish(job, b)


@njit()
def get_value(payload, at, slot, value_format):
    if value_format == FP32:
        return get_float32(payload, at + 4 * slot)
    code = np.uint16(payload[at + 2 * slot] | np.uint16(payload[at + 2 * slot + 1]) << 8)
    return bf16_value(code) if value_format == BF16 else fp16_value(code)

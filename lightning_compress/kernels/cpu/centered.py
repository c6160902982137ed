"""Compiled form of ``kernels.reference.centered``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.formats import bf16_value
from lightning_compress.kernels.cpu.job import finish, load, store, to_float32, wants
from lightning_compress.kernels.cpu.selection import (
    index_bits,
    kept,
    largest,
    next_index,
    put_indices,
    selection_scratch,
)
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.centered import CAP, FLOOR
from lightning_compress.kernels.table import LENGTH, PAYLOAD


@njit()
def encode(job, ratio):
    table, p, bits = job.table, job.p, job.bits
    selection = selection_scratch(job)
    last = bits.shape[0] - 1
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        if peak >= TINY:
            n = table[b, LENGTH]
            k = kept(n, ratio)
            p[last] = peak
            top = bits[last]
            p[last] = peak * FLOOR
            count = largest(job, n, k, bits[last], top, selection)
            if count == k:
                bits[last] = smallest(selection.word, k)
            amplitude = min(np.float32(2) * to_float32(p[last]), np.float32(CAP) * to_float32(peak))
            put_block(p, selection.chosen, count, n, k, to_float32(amplitude), job.payload, table[b, PAYLOAD])
        store(job, b)


@njit()
def smallest(word, count):
    least = word[0]
    for slot in range(1, count):
        least = min(least, word[slot])
    return least


@njit()
def put_block(p, index, count, n, k, amplitude, payload, at):
    """Writes the code of a block whose chosen elements are sent as +-``amplitude``; leaves p - decoded in ``p``."""
    code = np.uint16(np.float32(amplitude).view(np.uint32) >> np.uint32(16))
    amplitude = bf16_value(code)
    payload[at] = code & 255
    payload[at + 1] = code >> 8
    at += 2
    width = index_bits(n)
    sign_at = at + (k * width + 7) // 8
    put_indices(index, count, width, payload, at)
    for slot in range(count):
        i = index[slot]
        negative = p[i] < 0
        payload[sign_at + slot // 8] |= negative << slot % 8
        p[i] -= -amplitude if negative else amplitude


@njit()
def decode(job, ratio):
    table, payload, total = job.table, job.payload, job.total
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n = table[b, LENGTH]
        k, width = kept(n, ratio), index_bits(n)
        for rank in range(job.ranks):
            at = rank * job.stride + table[b, PAYLOAD]
            amplitude = bf16_value(np.uint16(payload[at] | np.uint16(payload[at + 1]) << 8))
            at += 2
            sign_at = at + (k * width + 7) // 8
            register, filled, before = 0, 0, -1
            for slot in range(k):
                i, at, register, filled = next_index(payload, at, register, filled, width)
                if before < i < n:
                    total[i] += -amplitude if payload[sign_at + slot // 8] >> slot % 8 & 1 else amplitude
                before = max(before, i)
        finish(job, b)

"""Compiled form of ``kernels.reference.ternary``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.ternary import TRITS
from lightning_compress.kernels.table import LENGTH, PAYLOAD


@njit()
def encode(job):
    table, shared, payload, p = job.table, job.shared, job.payload, job.p
    digits = job.scratch.view(np.uint8)
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = table[b, LENGTH], table[b, PAYLOAD]
        top = shared[b] if shared.shape[0] else to_float32(peak)
        if top >= TINY:
            put_float32(payload, at, top)
            take_digits(p, digits, n, top)
            pack(digits, n, payload, at + 4)
        store(job, b)


@njit()
def take_digits(p, digits, n, top):
    """Digits of a block; leaves p - decoded in ``p``."""
    high = p.dtype.type(np.float32(top * np.float32(0.5)))
    low, zero = -high, np.float32(0)
    for i in range(n):
        x = p[i]
        digits[i] = np.uint8(1) if x > high else np.uint8(2) if x < low else np.uint8(0)
        p[i] = x - (top if x > high else -top if x < low else zero)


@njit()
def planes(digits, m):
    """The digits of the m bytes by place: five slices."""
    d = digits
    return d[:m], d[m : 2 * m], d[2 * m : 3 * m], d[3 * m : 4 * m], d[4 * m : 5 * m]


@njit()
def pack(digits, n, payload, at):
    m = (n + TRITS - 1) // TRITS
    for i in range(n, m * TRITS):
        digits[i] = 0
    out = payload[at : at + m]
    d0, d1, d2, d3, d4 = planes(digits, m)
    for i in range(m):
        out[i] = np.uint8(d0[i] + 3 * d1[i] + 9 * d2[i] + 27 * d3[i] + 81 * d4[i])


@njit()
def unpack(payload, at, n, digits):
    m = (n + TRITS - 1) // TRITS
    packed = payload[at : at + m]
    d0, d1, d2, d3, d4 = planes(digits, m)
    three = np.uint32(3)
    for i in range(m):
        v0 = np.uint32(packed[i])
        v1 = np.uint32(v0 // three)
        v2 = np.uint32(v1 // three)
        v3 = np.uint32(v2 // three)
        v4 = np.uint32(v3 // three)
        d0[i], d1[i], d2[i], d3[i], d4[i] = v0 - 3 * v1, v1 - 3 * v2, v2 - 3 * v3, v3 - 3 * v4, v4


@njit()
def add_block(total, digits, n, top):
    for i in range(n):  # the lower bit says plus, the upper one minus
        total[i] += (np.float32(np.uint8(digits[i] & 1)) - np.float32(np.uint8(digits[i] >> 1))) * top


@njit()
def decode(job):
    table, payload, total = job.table, job.payload, job.total
    digits = job.scratch.view(np.uint8)
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n = table[b, LENGTH]
        for rank in range(job.ranks):
            at = rank * job.stride + table[b, PAYLOAD]
            unpack(payload, at + 4, n, digits)
            add_block(total, digits, n, get_float32(payload, at))
        finish(job, b)

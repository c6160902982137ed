"""Compiled form of ``kernels.reference.quantize``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.bits import code_scratch, pack_block, unpack_block
from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.quantize import PEAK_MAX
from lightning_compress.kernels.table import LENGTH, PAYLOAD


@njit()
def encode(job, bits):
    table, shared, payload, p = job.table, job.shared, job.payload, job.p
    levels = np.float32((1 << (bits - 1)) - 1)
    codes = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = table[b, LENGTH], table[b, PAYLOAD]
        top = min(shared[b] if shared.shape[0] else to_float32(peak), np.float32(PEAK_MAX))
        if top >= TINY:
            step = np.float32(top / levels)
            put_float32(payload, at, step)
            round_block(p, codes.byte, n, step, np.float32(levels / top), levels)
            pack_block(codes, n, bits, payload, at + 4)
        store(job, b)


@njit()
def round_block(p, codes, n, step, inverse, levels):
    """Codes of a block; leaves p - decoded in ``p``."""
    real = p.dtype.type
    inverse, low, high = real(inverse), real(-levels), real(levels)
    shift = real(1.5) / real(np.finfo(p.dtype).eps)  # adding it leaves no place for a fraction: rounds to nearest even
    for i in range(n):
        q = min(max(p[i] * inverse, low), high) + shift - shift
        codes[i] = np.uint8(np.int32(q))
        p[i] -= np.float32(q) * step


@njit()
def decode(job, bits):
    table, payload, total = job.table, job.payload, job.total
    codes = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n = table[b, LENGTH]
        for rank in range(job.ranks):
            at = rank * job.stride + table[b, PAYLOAD]
            unpack_block(payload, at + 4, n, bits, codes)
            add_block(total, codes.byte, n, bits, get_float32(payload, at))
        finish(job, b)


@njit()
def add_block(total, codes, n, bits, step):
    """Adds code * step; the codes are two's complement of ``bits`` bits."""
    sign = np.uint8(1 << (bits - 1))
    offset = np.float32(sign)
    for i in range(n):  # the sign is extended by a subtraction of floats: exact, and no wide integers in the loop
        total[i] += (np.float32(np.uint8(codes[i] ^ sign)) - offset) * step

"""Compiled form of ``kernels.reference.natural``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.bits import code_scratch, pack_block, unpack_block
from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.dithering import block_norm, uniform
from lightning_compress.kernels.cpu.hashing import block_base
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.table import KEY, LENGTH, PAYLOAD, START

MANTISSA = np.int32((1 << 23) - 1)
BIAS = 127


@njit()
def encode(job, bits, l2):
    table, payload, p = job.table, job.payload, job.p
    codes = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = table[b, LENGTH], table[b, PAYLOAD]
        norm = block_norm(job, b, peak, l2)
        if norm >= TINY:
            put_float32(payload, at, norm)
            round_block(p, codes.byte, n, block_base(job.salt, table[b, KEY]), table[b, START], norm, bits)
            pack_block(codes, n, bits, payload, at + 4)
        store(job, b)


@njit()
def round_block(p, codes, n, base, start, norm, bits):
    """Codes of a block; leaves p - decoded in ``p``."""
    real = p.dtype.type
    inverse, one, zero = real(np.float32(np.float32(1) / norm)), real(1), real(0)
    top = (1 << (bits - 1)) - 1
    offset, sign, smallest = np.int32(BIAS - top), np.int32(1 << (bits - 1)), np.float32(2.0 ** (top - 1))
    for i in range(n):
        share = np.float32(min(abs(p[i]) * inverse, one))
        word = share.view(np.int32)
        index = max(np.int32((word >> 23) - offset), np.int32(0))
        way = np.float32(np.int32(word & MANTISSA)) * np.float32(2.0**-23) if index > 0 else share * smallest
        index = np.int32(index + np.int32(uniform(base, start + i) < way))
        negative = p[i] < zero and index > 0
        codes[i] = np.uint8(index | sign if negative else index)
        value = level(index, offset) * norm
        p[i] -= -value if negative else value


@njit()
def level(index, offset):
    """2**(index - L), or 0 for index 0."""
    return np.int32(np.int32(index + offset) << np.int32(23) if index > 0 else np.int32(0)).view(np.float32)


@njit()
def decode(job, bits, l2):
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
def add_block(total, codes, n, bits, norm):
    top = np.int32((1 << (bits - 1)) - 1)
    offset = np.int32(BIAS - top)
    for i in range(n):
        code = np.int32(codes[i])
        value = level(np.int32(code & top), offset) * norm
        total[i] += -value if code > top else value

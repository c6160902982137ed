"""Compiled form of ``kernels.reference.quantize``."""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_compress.kernels.cpu.bits import code_scratch, pack_block, unpack_block
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.table import LENGTH, PAYLOAD


@njit(nogil=True, cache=True)
def encode(job, bits):
    levels = np.float32((1 << (bits - 1)) - 1)
    codes = code_scratch(job.p.shape[0])
    for b in range(job.table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = job.table[b, LENGTH], job.table[b, PAYLOAD]
        top = job.shared[b] if job.shared.shape[0] else to_float32(peak)
        if top >= TINY:
            step = np.float32(top / levels)
            put_float32(job.payload, at, step)
            round_block(job.p, codes.byte, n, step, np.float32(levels / top), levels)
            pack_block(codes, n, bits, job.payload, at + 4)
        store(job, b)


@njit(nogil=True, cache=True)
def round_block(p, codes, n, step, inverse, levels):
    """Codes of a block; leaves p - decoded in ``p``."""
    real = p.dtype.type
    inverse, low, high = real(inverse), real(-levels), real(levels)
    shift = real(1.5) / real(np.finfo(p.dtype).eps)  # adding it leaves no place for a fraction: rounds to nearest even
    for i in range(n):
        q = min(max(p[i] * inverse, low), high) + shift - shift
        codes[i] = np.uint8(np.int32(q))
        p[i] -= np.float32(q) * step


@njit(nogil=True, cache=True)
def decode(job, bits):
    codes = code_scratch(job.total.shape[0])
    for b in range(job.table.shape[0]):
        if not wants(job, b):
            continue
        n = job.table[b, LENGTH]
        for rank in range(job.ranks):
            at = rank * job.stride + job.table[b, PAYLOAD]
            unpack_block(job.payload, at + 4, n, bits, codes)
            add_block(job.total, codes.byte, n, bits, get_float32(job.payload, at))
        finish(job, b)


@njit(nogil=True, cache=True)
def add_block(total, codes, n, bits, step):
    """Adds code * step; the codes are two's complement of ``bits`` bits."""
    sign = np.int32(1 << (bits - 1))
    for i in range(n):
        total[i] += np.float32(np.int32((np.int32(codes[i]) ^ sign) - sign)) * step

"""Compiled form of ``kernels.reference.dithering``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.bits import code_scratch, pack_block
from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.hashing import block_base, element_hash
from lightning_compress.kernels.cpu.job import load, put_float32, store, to_float32
from lightning_compress.kernels.cpu.quantize import decode as decode_quantized
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.reference.quantize import PEAK_MAX
from lightning_compress.kernels.table import KEY, LENGTH, PAYLOAD, START


@njit()
def encode(job, bits, l2):
    table, payload, p = job.table, job.payload, job.p
    levels = np.float32((1 << (bits - 1)) - 1)
    codes = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        peak = load(job, b)
        if peak < 0:
            continue
        n, at = table[b, LENGTH], table[b, PAYLOAD]
        norm = min(block_norm(job, b, peak, l2), np.float32(PEAK_MAX))
        if norm >= TINY:
            step, inverse = np.float32(norm / levels), np.float32(np.float32(np.float32(1) / norm) * levels)
            put_float32(payload, at, step)
            base = block_base(job.salt, table[b, KEY])
            dither_block(p, codes.byte, n, base, table[b, START], step, inverse, levels)
            pack_block(codes, n, bits, payload, at + 4)
        store(job, b)


@njit()
def decode(job, bits, l2):
    decode_quantized(job, bits)  # the same codes


@njit()
def block_norm(job, b, peak, l2):
    """float32 norm of the block in ``job.p``, or the whole tensor's."""
    if job.shared.shape[0]:
        return job.shared[b]
    return to_float32(np.sqrt(sum_of_squares(job.p, job.table[b, LENGTH]))) if l2 else to_float32(peak)


@njit(fastmath={"reassoc"})  # lets the sum run in vector lanes
def sum_of_squares(p, n):
    total = 0.0
    for i in range(n):
        total += np.float64(p[i]) * np.float64(p[i])
    return total


@njit()
def uniform(base, element):
    """``reference.hashing.uniform`` for one element."""
    return np.float32(np.int32(element_hash(base, element) >> np.uint32(8))) * np.float32(2.0**-24)


@njit()
def dither_block(p, codes, n, base, start, step, inverse, levels):
    """Codes of a block; leaves p - decoded in ``p``."""
    real = p.dtype.type
    inverse, high, zero, one = real(inverse), real(levels), real(0), real(1)
    for i in range(n):
        scaled = min(abs(p[i]) * inverse, high)
        q = np.floor(scaled)
        q += one if uniform(base, start + i) < scaled - q else zero
        q = -q if p[i] < zero else q
        codes[i] = np.uint8(np.int32(q))
        p[i] -= np.float32(q) * step

"""Compiled form of ``kernels.reference.randomk``."""

from __future__ import annotations

from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.hashing import block_base, element_hash
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.cpu.selection import kept
from lightning_compress.kernels.table import KEY, LENGTH, PAYLOAD, START


@njit()
def encode(job, ratio, unbiased):
    table, payload, p = job.table, job.payload, job.p
    real = p.dtype.type
    for b in range(table.shape[0]):
        if load(job, b) < 0:
            continue
        n, at, start = table[b, LENGTH], table[b, PAYLOAD], table[b, START]
        k, base = kept(n, ratio), block_base(job.salt, table[b, KEY])
        for j in range(k):
            first, length = stratum(j, n, k)
            i = first + element_hash(base, start + j) % length
            value = to_float32(p[i] * real(length) if unbiased else p[i])
            put_float32(payload, at + 4 * j, value)
            p[i] -= value
        store(job, b)


@njit()
def decode(job, ratio, unbiased):
    table, payload, total = job.table, job.payload, job.total
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n, start = table[b, LENGTH], table[b, START]
        k, base = kept(n, ratio), block_base(job.salt, table[b, KEY])
        for j in range(k):
            first, length = stratum(j, n, k)
            i = first + element_hash(base, start + j) % length
            for rank in range(job.ranks):
                total[i] += get_float32(payload, rank * job.stride + table[b, PAYLOAD] + 4 * j)
        finish(job, b)


@njit()
def stratum(j, n, k):
    """First element and length of stratum j of k."""
    first = j * n // k
    return first, (j + 1) * n // k - first

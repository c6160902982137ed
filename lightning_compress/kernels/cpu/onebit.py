"""Compiled form of ``kernels.reference.onebit``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.bits import code_scratch, pack_block, unpack_block
from lightning_compress.kernels.cpu.compiling import njit
from lightning_compress.kernels.cpu.job import finish, get_float32, load, put_float32, store, to_float32, wants
from lightning_compress.kernels.reference.bits import TINY
from lightning_compress.kernels.table import LENGTH, PAYLOAD, ROW, START


@njit()
def encode(job):
    table, shared, payload, p = job.table, job.shared, job.payload, job.p
    signs = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        if load(job, b) < 0:
            continue
        n, row, at = table[b, LENGTH], table[b, ROW], table[b, PAYLOAD]
        phase = table[b, START] % row
        counted = mark_rows(p, n, row, phase, payload, at + 4)
        mean = shared[b] if shared.shape[0] else to_float32(sum_magnitudes(p, n) / max(counted, 1))
        if mean >= TINY:
            put_float32(payload, at, mean)
            take_signs(p, signs.byte, n, mean)
            pack_block(signs, n, 1, payload, signs_offset(at, n, row))
            if counted < n:
                clear_rows(p, n, row, phase, payload, at + 4)
        else:
            for i in range(at + 4, signs_offset(at, n, row)):
                payload[i] = 0
        store(job, b)


@njit()
def signs_offset(at, n, row):
    """Where the sign bits of the code at ``at`` begin: behind as many row bits as a block of n elements may need."""
    return at + 4 + ((n + row - 2) // row + 8) // 8


@njit()
def mark_rows(p, n, row, phase, payload, at):
    """Sets the bits of the rows that have values; returns how many elements lie in such rows."""
    counted, begin, r = 0, 0, 0
    while begin < n:
        end = min(n, (r + 1) * row - phase)
        for i in range(begin, end):  # as a rule, the first element decides
            if p[i] != 0:
                payload[at + r // 8] |= np.uint8(1 << (r % 8))
                counted += end - begin
                break
        begin = end
        r += 1
    return counted


@njit()
def clear_rows(p, n, row, phase, payload, at):
    """Nothing was sent for the rows without values, and nothing is left of them."""
    begin, r = 0, 0
    while begin < n:
        end = min(n, (r + 1) * row - phase)
        if not payload[at + r // 8] >> (r % 8) & 1:
            for i in range(begin, end):
                p[i] = 0
        begin = end
        r += 1


@njit(fastmath={"reassoc"})
def sum_magnitudes(p, n):
    """Sum of |p| in float64; the order is left to the compiler, so that the loop is vector code."""
    total = 0.0
    for i in range(n):
        total += abs(np.float64(p[i]))
    return total


@njit()
def take_signs(p, signs, n, mean):
    """Sign bits of a block; leaves p - decoded in ``p``."""
    for i in range(n):
        x = p[i]
        signs[i] = np.uint8(x < 0)
        p[i] = x + mean if x < 0 else x - mean


@njit()
def decode(job):
    table, payload, total = job.table, job.payload, job.total
    signs = code_scratch(job.scratch)
    for b in range(table.shape[0]):
        if not wants(job, b):
            continue
        n, row = table[b, LENGTH], table[b, ROW]
        phase = table[b, START] % row
        for rank in range(job.ranks):
            at = rank * job.stride + table[b, PAYLOAD]
            unpack_block(payload, signs_offset(at, n, row), n, 1, signs)
            add_rows(total, signs.byte, n, row, phase, payload, at + 4, get_float32(payload, at))
        finish(job, b)


@njit()
def add_rows(total, signs, n, row, phase, payload, at, mean):
    """Adds +mean or -mean in the rows whose bit is set, neighbouring ones in one go."""
    begin, end, r = 0, 0, 0
    while end < n:
        present = payload[at + r // 8] >> (r % 8) & 1
        r += 1
        stop = min(n, r * row - phase)
        if not present:
            add_signs(total[begin:end], signs[begin:end], mean)
            begin = stop
        end = stop
    add_signs(total[begin:end], signs[begin:end], mean)


@njit()
def add_signs(total, signs, mean):
    for i in range(total.shape[0]):
        total[i] += -mean if signs[i] else mean

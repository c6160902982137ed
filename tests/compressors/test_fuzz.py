"""Corrupt payloads: whatever bytes arrive, no decode kernel reads or writes outside what belongs to its block.

Kernels are compiled without bounds checks, so they are called here with every array inside a larger one, whose margins
must not change; what the kernels read besides their own code would show in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_compress.compressors.base import Compressor, CPUKernels
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.cpu.job import DecodeJob, scratch_words
from tests.compressors.test_conformance import FAMILIES

MARGIN = 1 << 16
"""Elements on each side: an index of 16 bits in any unit stays inside."""
CANARY = 7.25
RANKS = 2


class Guarded:
    """An array in the middle of a larger one that holds canaries."""

    def __init__(self, size: int, dtype: Any) -> None:
        self.canary = np.dtype(dtype).type(CANARY)
        self.whole = np.full(size + 2 * MARGIN, self.canary)
        self.inner = self.whole[MARGIN : MARGIN + size]

    def intact(self) -> bool:
        size = len(self.inner)
        return bool((self.whole[:MARGIN] == self.canary).all() and (self.whole[MARGIN + size :] == self.canary).all())


def one_block(compressor: Compressor, length: int, row: int) -> tuple[torch.Tensor, int]:
    """A table of one block of a later part of its parameter, and the bytes of its code."""
    line = torch.zeros(1, col.COLUMNS, dtype=torch.int64)
    line[0, col.LENGTH], line[0, col.ROW], line[0, col.START], line[0, col.KEY] = length, row, 3 * length, 12345
    return line, compressor.payload_nbytes(length, row)


def corrupt_bytes(count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Noise of several densities: fields that are all zeros, all ones, or mixed."""
    yield np.full(count, 255, np.uint8)
    for _ in range(4):
        yield rng.integers(0, 256, count, np.uint8)
    for share in (0.02, 0.3, 0.98):
        yield np.packbits(rng.random(8 * count) < share)


def decode(kernels: CPUKernels, table: torch.Tensor, payload: np.ndarray, stride: int, dtype: Any) -> np.ndarray:
    """Runs a decode kernel in guarded memory; returns what it decodes."""
    length = int(table[0, col.LENGTH])
    out, total, code = Guarded(length, dtype), Guarded(length, dtype), Guarded(len(payload), np.uint8)
    scratch = Guarded(scratch_words(length), np.uint64)
    code.whole[:] = np.random.default_rng(1).integers(0, 256, len(code.whole))  # a neighbour's code
    code.inner[:] = payload
    before = code.whole.copy()
    status = np.full(1, col.PRESENT, np.uint8)
    job = DecodeJob(
        code.inner, stride, RANKS, out.inner, dtype(0.5), table.numpy(), status, 99, total.inner, scratch.inner
    )
    kernels.decode(job, *kernels.arguments)
    assert out.intact(), "decode writes outside the bucket"
    assert total.intact(), "decode writes outside its scratch memory"
    assert scratch.intact(), "decode writes outside its scratch memory"
    assert np.array_equal(code.whole, before), "decode writes to the payload"
    assert status[0] == col.PRESENT
    return out.inner.copy()


def fuzz(compressor: Compressor, kernels: CPUKernels) -> None:
    rng = np.random.default_rng(0)
    longest = compressor.block_size or 70_001  # more than 16 bits of index, where a block may be a whole tensor
    for length, row in ((1, 1), (7, 3), (min(longest, 255), 16), (longest, longest), (longest, 13)):
        table, nbytes = one_block(compressor, length, row)
        for payload in corrupt_bytes(RANKS * nbytes, rng):
            for dtype, real in ((np.float32, torch.float32), (np.float64, torch.float64)):
                found = decode(kernels, table, payload, nbytes, dtype)
                expected = torch.zeros(length, dtype=real)
                reference, status = BlockCodec(compressor, table, use_reference=True), torch.ones(1, dtype=torch.uint8)
                reference.decode(
                    torch.from_numpy(payload), expected, status, stride=nbytes, ranks=RANKS, weight=0.5, salt=99
                )
                same = np.array_equal(found, expected.numpy(), equal_nan=True)
                assert same, f"kernel and torch decode noise of a block of {length} differently"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("compressor", FAMILIES, ids=repr)
def test_any_bytes_decode_inside_their_block(compressor: Compressor) -> None:
    kernels = compressor.cpu_kernels()
    assert kernels is not None
    fuzz(compressor, kernels)


def trusting(job: DecodeJob, *_: Any) -> None:
    """A kernel that writes where its payload says."""
    at = int(job.payload[0])
    total = np.lib.stride_tricks.as_strided(
        job.total, (at + 1,), job.total.strides
    )  # numpy checks bounds, numba does not
    total[at] = 1.0


def test_the_fuzz_finds_a_kernel_that_trusts_its_payload() -> None:
    with pytest.raises(AssertionError, match="outside its scratch memory"):
        fuzz(FAMILIES[0], CPUKernels(None, trusting))  # type: ignore[arg-type]

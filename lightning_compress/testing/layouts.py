"""Inputs of the conformance suite: block tables of many shapes, gradients and memories of many magnitudes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.compressors.base import PIECE, Compressor
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView
from lightning_compress.kernels.reference import hashing

GAP = 3
"""Elements between parameters and bytes between codes, which nothing may touch; odd, so that no code is aligned."""


@dataclass
class Layout:
    """A block table of some parameters, with a gap around every parameter and every code.

    Attributes:
        table: Block table, int64 [n, COLUMNS].
        sizes: Bytes of every block's code.
        numel: Elements of the value buffer and of the memory.
        nbytes: Bytes of the payload.
    """

    table: Tensor
    sizes: list[int]
    numel: int
    nbytes: int

    @classmethod
    def of(cls, compressor: Compressor, shapes: list[tuple[int, int]], block_size: int) -> Layout:
        """The layout of parameters given as (number of rows, elements of a row)."""
        rows, sizes, source, payload = [], [], GAP, GAP
        for parameter, (count, row) in enumerate(shapes):
            numel, key = count * row, hashing.name_key(f"layer{parameter}.weight")
            for start in range(0, numel, block_size):
                length = min(block_size, numel - start)
                line = [0] * col.COLUMNS
                line[col.SOURCE] = line[col.STATE] = source + start
                line[col.LENGTH], line[col.PAYLOAD], line[col.PARAMETER] = length, payload, parameter
                line[col.START], line[col.ROW], line[col.KEY] = start, row, key
                rows.append(line)
                sizes.append(compressor.payload_nbytes(length, row))
                payload += sizes[-1] + GAP
            source += numel + GAP
        return cls(torch.tensor(rows), sizes, source, payload)

    def lengths(self) -> list[int]:
        """The lengths that occur."""
        return sorted(set(self.table[:, col.LENGTH].tolist()))

    def payload(self, ranks: int) -> Tensor:
        """Zeros: uint8 [ranks, nbytes]."""
        return torch.zeros(ranks, self.nbytes, dtype=torch.uint8)

    def status(self) -> Tensor:
        """All parameters are present: uint8 [parameters]."""
        return torch.full((int(self.table[-1, col.PARAMETER]) + 1,), col.PRESENT, dtype=torch.uint8)

    def offsets(self, value: int) -> Tensor:
        """The same offset for all parameters: int64 [parameters]."""
        return torch.full((len(self.status()),), value)

    def memory(self, state: Tensor) -> MemoryView:
        """Error feedback in ``state``, read and written in place."""
        return MemoryView(state, self.offsets(0), self.offsets(0), True, True)

    def parameter(self, index: int) -> Tensor:
        """Which elements of the value buffer belong to a parameter."""
        return self._mask(self.numel, col.SOURCE, self.table[:, col.LENGTH].tolist(), index)

    def elements(self) -> Tensor:
        """Which elements of the value buffer belong to any block."""
        return self._mask(self.numel, col.SOURCE, self.table[:, col.LENGTH].tolist())

    def code_bytes(self, parameter: int | None = None) -> Tensor:
        """Which bytes of the payload belong to a code."""
        return self._mask(self.nbytes, col.PAYLOAD, self.sizes, parameter)

    def _mask(self, size: int, column: int, lengths: list[int], parameter: int | None = None) -> Tensor:
        mask = torch.zeros(size, dtype=torch.bool)
        for line, length in zip(self.table.tolist(), lengths, strict=True):
            if parameter in (None, line[col.PARAMETER]):
                mask[line[column] : line[column] + length] = True
        return mask

    def silent_rows(self) -> Tensor:
        """Which elements lie in rows 0, 1, 4, 5, 8, 9, ... of their parameter."""
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for line in self.table.tolist():
            row = torch.arange(line[col.START], line[col.START] + line[col.LENGTH]) // line[col.ROW]
            mask[line[col.SOURCE] : line[col.SOURCE] + line[col.LENGTH]] = row % 4 < 2
        return mask

    def groups(self, compressor: Compressor) -> list[tuple[int, int]]:
        """Source and length of every run of elements that shares a scale or a selection."""
        if compressor.block_size is None:
            whole = [self.parameter(i).nonzero().flatten() for i in range(len(self.status()))]
            return [(int(index[0]), len(index)) for index in whole]
        return [(line[col.SOURCE], line[col.LENGTH]) for line in self.table.tolist()]

    def inputs(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients, and a memory of two halves: ordinary, with rows of zeros, tied, tiny, mixed and huge numbers."""
        huge = 1e30 if dtype == torch.float32 else 1e200
        scales = (1.0, 1.0) if self.numel > PIECE // 2 else (1.0, 1.0, 1.0, 2.0**-100, 1.0, huge)
        for case, scale in enumerate(scales):
            g = normal(1, self.numel, case)[0].to(dtype) * scale
            state = torch.cat([normal(1, self.numel, case + 10)[0].to(dtype) * scale / 4, g])
            if case == 1:
                silent = self.silent_rows()
                g[silent] = 0
                state[: self.numel][silent] = 0
            elif case == 2:
                g, state = g.sign(), torch.zeros_like(state)
            elif case == 4:
                g *= 10.0 ** (torch.arange(self.numel) % 60 - 30)
            yield g, state


def layouts(compressor: Compressor) -> Iterator[Layout]:
    """Parameters of many shapes under the compressor's blocks, whole and last ones."""
    size = longest_block(compressor)
    shapes = [(1, 1), (5, 1), (12, 37), (1, size), (7, size // 3 + 2), (3, 2 * size // 3 + 1)]
    yield Layout.of(compressor, shapes, size)
    if compressor.block_size is None:  # pieces of one tensor, or one selection from more than 16-bit indices can tell
        count = PIECE // 700 + 2
        yield Layout.of(compressor, [(3, 5), (count, 700), (2, 9)], count * 700 if compressor.selects else PIECE)


def longest_block(compressor: Compressor) -> int:
    """The block size, or enough elements for a whole tensor."""
    return compressor.block_size or 3000


def generator(seed: int) -> torch.Generator:
    """A generator that begins with ``seed``."""
    return torch.Generator().manual_seed(seed)


def normal(rows: int, numel: int, seed: int = 0) -> Tensor:
    """Normal float32 numbers [rows, numel]."""
    return torch.randn(rows, numel, generator=generator(seed))

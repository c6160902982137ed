"""Codes all blocks of a table at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from lightning_compress.compressors.base import Compressor
from lightning_compress.exchange.backends import choose
from lightning_compress.exchange.threads import ALONE, Threads
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import DecodeBatch, EncodeBatch, MemoryView, real
from lightning_compress.kernels.reference.bits import to_float32


class BlockCodec:
    """One compressor applied to one block table.

    Args:
        compressor: What a block's code is.
        table: Block table, int64 [n, COLUMNS] (see ``kernels.table``), on the device of the values.
        per_tensor: The table holds whole tensors, and a compressor without a block size takes one scale for each of
            them.
        use_reference: Forces the torch functions.
        threads: Who works on the CPU.
    """

    def __init__(
        self,
        compressor: Compressor,
        table: Tensor,
        per_tensor: bool = False,
        use_reference: bool = False,
        threads: Threads = ALONE,
    ) -> None:
        self.compressor = compressor
        self.table = table
        self.backend = choose(compressor, table, threads, use_reference) if len(table) else None
        scaled = type(compressor).statistic is not Compressor.statistic
        self._tensors = list(_whole_tensors(table)) if per_tensor and scaled and compressor.block_size is None else []

    def __len__(self) -> int:
        return len(self.table)

    def encode(
        self,
        values: Tensor,
        memory: MemoryView,
        payload: Tensor,
        status: Tensor,
        *,
        weight: float = 1.0,
        scale: float | Tensor = 1.0,
        salt: int = 0,
    ) -> None:
        """Encodes ``values`` and what ``memory`` holds into ``payload``; arguments as in ``EncodeBatch``."""
        if self.backend is not None:
            shared = self._statistics(values, memory, status, weight, scale)
            self.backend.encode(EncodeBatch(values, memory, payload, self.table, status, shared, weight, scale, salt))

    def decode(
        self,
        payload: Tensor,
        out: Tensor,
        status: Tensor,
        *,
        stride: int = 0,
        ranks: int = 1,
        weight: float = 1.0,
        salt: int = 0,
    ) -> None:
        """Adds up the ranks' decoded blocks in ``out``; arguments as in ``DecodeBatch``."""
        if self.backend is not None:
            self.backend.decode(DecodeBatch(payload, stride, ranks, out, self.table, status, weight, salt))

    def _statistics(
        self, values: Tensor, memory: MemoryView, status: Tensor, weight: float, scale: float | Tensor
    ) -> Tensor | None:
        """One scale per tensor, float32 per block: the papers' granularity costs a pass of its own."""
        statistics = None
        for source, state, parameter, row, numel in self._tensors:
            p = values[source : source + numel].to(real(values))
            if memory.compensate:
                p = p + scale * memory.get(parameter, state, numel)
            one = self.compressor.statistic(weight * p, row)
            if one is not None:
                statistics = values.new_zeros(len(status), dtype=torch.float32) if statistics is None else statistics
                statistics[parameter] = to_float32(one)
                # its finite pieces cannot be coded either: their memory must not take up the infinite scale
                unusable = (status[parameter] == col.PRESENT) & ~torch.isfinite(one)
                status[parameter] = torch.where(unusable, col.NONFINITE, status[parameter])
        return None if statistics is None else statistics[self.table[:, col.PARAMETER]]


def compile_kernels(compressors: Iterable[Compressor], dtypes: Iterable[torch.dtype]) -> None:
    """Runs every CPU kernel once on one element, as the exchange will run it."""
    row = torch.zeros(1, col.COLUMNS, dtype=torch.int64)
    row[0, col.LENGTH] = row[0, col.ROW] = 1
    zero, status = torch.zeros(1, dtype=torch.int64), torch.full((1,), col.PRESENT, dtype=torch.uint8)
    for compressor, dtype in product(compressors, dtypes):
        codec = BlockCodec(compressor, row)
        values = torch.ones(1, dtype=dtype)
        state = torch.zeros(1, dtype=real(values))
        payload = torch.zeros(compressor.payload_nbytes(1, 1), dtype=torch.uint8)
        codec.encode(values, MemoryView(state, zero, zero, True, True), payload, status)
        codec.decode(payload, values, status)


def _whole_tensors(table: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Source, state, parameter, row and number of elements of every parameter in the table."""
    for index in torch.unique(table[:, col.PARAMETER]).tolist():
        blocks = table[table[:, col.PARAMETER] == index]
        first = blocks[0].tolist()
        yield first[col.SOURCE], first[col.STATE], index, first[col.ROW], int(blocks[:, col.LENGTH].sum())

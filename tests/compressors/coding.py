"""One parameter, coded as an exchange codes it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.compressors.base import Blocks, Compressor
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView


def blocks_of(numel: int, count: int, row: int | None = None, start: int = 0) -> Blocks:
    """``count`` blocks of different parameters that begin at the same place."""
    return Blocks(numel, row or numel, torch.full((count,), start), torch.arange(count))


def round_trip(compressor: Compressor, p: Tensor, row: int | None = None, start: int = 0) -> Tensor:
    """What the blocks ``p`` [m, n] decode to, by the torch functions."""
    blocks = blocks_of(p.shape[1], p.shape[0], row, start)
    return compressor.decode(compressor.encode(p, blocks), blocks)


def block_table(compressor: Compressor, numel: int, row: int, block_size: int) -> tuple[Tensor, int]:
    """The block table of one parameter whose codes begin at an odd byte, and the payload's length."""
    lines, payload = [], 1
    for start in range(0, numel, block_size):
        length = min(block_size, numel - start)
        line = [0] * col.COLUMNS
        line[col.SOURCE] = line[col.STATE] = line[col.START] = start
        line[col.LENGTH], line[col.PAYLOAD], line[col.ROW], line[col.KEY] = length, payload, row, 12345
        lines.append(line)
        payload += compressor.payload_nbytes(length, row)
    return torch.tensor(lines), payload


def code_parameter(
    compressor: Compressor,
    gradient: Tensor,
    state: Tensor,
    row: int,
    reference: bool,
    weight: float = 1.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of error feedback on one parameter: payload, new state, decoded values."""
    table, nbytes = block_table(compressor, len(gradient), row, compressor.block_size or len(gradient))
    codec = BlockCodec(compressor, table, per_tensor=True, use_reference=reference)
    state, payload = state.clone(), torch.zeros(nbytes, dtype=torch.uint8)
    status, nothing = torch.tensor([col.PRESENT], dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    codec.encode(
        gradient, MemoryView(state, nothing, nothing, True, True), payload, status, weight=weight, scale=scale, salt=9
    )
    out = torch.zeros_like(gradient)
    codec.decode(payload, out, status, salt=9)
    return payload, state, out

"""One sign per element, one scale per block, and one bit per row that tells zeros from small numbers.

Code: [scale: float32][row bits][sign bits]. A row is the part of a first-dimension slice of the parameter inside the
block; row r of a block holds its elements i with (start % row + i) // row = r. A row bit of 1 says that the row has
values: its elements decode to +scale (sign bit 0) or -scale (sign bit 1). A row of zeros decodes to zeros. How many
rows a block has depends on where it starts; the number of row bits is the largest possible, so that the size depends
on lengths alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import (
    TINY,
    from_bytes,
    pack,
    packed_nbytes,
    to_bytes,
    to_float32,
    unpack,
)


def row_bits(numel: int, row: int) -> int:
    """Rows that a block of ``numel`` elements may touch: its first element can be the last one of its row."""
    return (numel + row - 2) // row + 1


def scale(p: Tensor, row_of: Tensor, rows: int) -> Tensor:
    """Mean |p| over the rows that have values, summed in float64: float32 [m]. Arguments as in :func:`encode`."""
    counted = rows_with_values(p, row_of, rows).gather(1, row_of).sum(1)
    return to_float32(p.abs().sum(1, dtype=torch.float64) / counted.clamp_min(1))


def tensor_scale(p: Tensor, row: int) -> Tensor:
    """The same for a whole tensor, flat ``p``: a 0-dim tensor, not finite where ``p`` is not."""
    counted = (p.view(-1, row) != 0).any(1).sum() * row
    mean = p.abs().sum(dtype=torch.float64) / counted.clamp_min(1)
    return torch.where(torch.isfinite(mean), to_float32(mean), mean.float())  # an inf must not saturate


def rows_with_values(p: Tensor, row_of: Tensor, rows: int) -> Tensor:
    """Which rows hold a number that is not zero: bool [m, rows]."""
    found = torch.zeros(p.shape[0], rows, dtype=torch.uint8, device=p.device)
    return found.scatter_reduce_(1, row_of, (p != 0).to(torch.uint8), "amax").bool()


def encode(p: Tensor, row_of: Tensor, rows: int, scale: Tensor) -> Tensor:
    """Codes of ``p``.

    Args:
        p: [m, n].
        row_of: Row of each element inside its block, int64 [m, n].
        rows: From :func:`row_bits`.
        scale: What an element decodes to, float32 [m].
    """
    sent = (scale >= TINY).unsqueeze(1)
    parts = [
        to_bytes(torch.where(sent, scale.unsqueeze(1), 0.0)),
        pack(rows_with_values(p, row_of, rows) & sent, 1),
        pack((p < 0) & sent, 1),
    ]
    return torch.cat(parts, dim=1)


def decode(payload: Tensor, row_of: Tensor, rows: int) -> Tensor:
    """float32 values [m, n] of the codes in ``payload``."""
    scale = from_bytes(payload[:, :4], torch.float32)
    signs_at = 4 + packed_nbytes(rows, 1)
    present = unpack(payload[:, 4:signs_at], rows, 1).gather(1, row_of)
    negative = unpack(payload[:, signs_at:], row_of.shape[1], 1)
    return torch.where(present == 0, 0.0, torch.where(negative == 0, scale, -scale))

"""The k largest magnitudes of a block with their values.

Code: [k indices: 16 bits each, 32 in blocks of more than 65536 elements][k values: fp16, bf16 or fp32].
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import from_bytes, to_bytes, to_float32
from lightning_compress.kernels.reference.cast import saturating_cast
from lightning_compress.kernels.reference.selection import indices_of, scatter


def index_nbytes(numel: int) -> int:
    """Bytes of one index into a block of ``numel`` elements."""
    return 2 if numel <= 65536 else 4


def encode(p: Tensor, chosen: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Codes of the ``chosen`` elements of ``p``, both [m, n]: uint8 [m, k * (index_nbytes(n) + dtype.itemsize)]."""
    rows, numel = p.shape
    indices = indices_of(chosen, k)
    used = torch.arange(k, device=p.device) < chosen.sum(dim=1, keepdim=True)
    values = torch.where(used, p.gather(1, indices), 0.0)
    index_bytes = to_bytes(indices).reshape(rows, k, 8)[:, :, : index_nbytes(numel)].reshape(rows, -1)
    return torch.cat([index_bytes, to_bytes(saturating_cast(to_float32(values), dtype))], dim=1)


def decode(payload: Tensor, numel: int, k: int, dtype: torch.dtype) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    width = index_nbytes(numel)
    index_bytes = payload[:, : k * width].reshape(-1, k, width)
    indices = from_bytes(torch.nn.functional.pad(index_bytes, (0, 8 - width)), torch.int64).squeeze(-1)
    values = from_bytes(payload[:, k * width :], dtype).to(torch.float32)
    return scatter(indices, values, numel)

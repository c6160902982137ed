"""The k largest magnitudes of a block with their values.

Code: [k indices of ceil(log2(n)) bits][k values: fp16, bf16 or fp32]. Slots as in ``selection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import from_bytes, pack, packed_nbytes, to_bytes, to_float32, unpack
from lightning_compress.kernels.reference.cast import saturating_cast
from lightning_compress.kernels.reference.selection import index_bits, indices_of, scatter


def encode(p: Tensor, chosen: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Codes of the ``chosen`` elements of ``p``, both [m, n]: uint8 [m, ceil(k * index_bits(n) / 8) + k * dtype.itemsize]."""
    indices = indices_of(chosen, k)
    used = torch.arange(k, device=p.device) < chosen.sum(dim=1, keepdim=True)
    values = torch.where(used, p.gather(1, indices), 0.0)
    return torch.cat(
        [pack(indices, index_bits(p.shape[1])), to_bytes(saturating_cast(to_float32(values), dtype))], dim=1
    )


def decode(payload: Tensor, numel: int, k: int, dtype: torch.dtype) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    width = index_bits(numel)
    at = packed_nbytes(k, width)
    indices = unpack(payload[:, :at], k, width)
    values = from_bytes(payload[:, at:], dtype).to(torch.float32)
    return scatter(indices, values, numel)

"""One random element of each stratum of a block, the same on all ranks: no index travels.

Code: [k values: float32]. Stratum j of k is [j * n // k, (j + 1) * n // k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import from_bytes, to_bytes
from lightning_compress.kernels.reference.hashing import element_hash


def strata(numel: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First element and length of each stratum, int64 [k]."""
    edges = torch.arange(k + 1, device=device) * numel // k
    return edges[:-1], edges[1:] - edges[:-1]


def draw(numel: int, k: int, salt: int, key: Tensor, start: Tensor) -> Tensor:
    """The elements that are sent, int64 [m, k], for blocks of name ``key`` [m] at offset ``start`` [m]."""
    first, length = strata(numel, k, start.device)
    counter = start.unsqueeze(1) + torch.arange(k, device=start.device)
    return first + element_hash(salt, key, counter) % length


def encode(p: Tensor, drawn: Tensor, unbiased: bool) -> Tensor:
    """Codes of ``p`` [m, n]: uint8 [m, 4 k]; ``unbiased`` multiplies each value by the length of its stratum."""
    values = p.gather(1, drawn)
    if unbiased:
        values = values * strata(p.shape[1], drawn.shape[1], p.device)[1].to(p.dtype)
    limit = torch.finfo(torch.float32).max
    return to_bytes(values.clamp(-limit, limit).to(torch.float32))


def decode(payload: Tensor, numel: int, drawn: Tensor) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    values = from_bytes(payload, torch.float32)
    out = torch.zeros(len(payload), numel, dtype=torch.float32, device=payload.device)
    return out.scatter_(1, drawn, values)

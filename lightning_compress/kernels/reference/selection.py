"""Which elements of a block are sent, and how their indices travel.

Indices stand in ascending order, and a slot counts only if its index is larger than those of all slots before it and
lies inside the block. So a slot that is not needed is void by holding index 0, zero bytes mean nothing, no element is
named twice, and arbitrary bytes do no harm.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(magnitude: Tensor, k: int) -> Tensor:
    """Marks the k largest entries of each row of ``magnitude`` [m, n], ties by lower index; zeros are never marked."""
    threshold = magnitude.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = magnitude > threshold
    level = (magnitude == threshold) & (magnitude > 0)
    room = k - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= room))


def indices_of(chosen: Tensor, k: int) -> Tensor:
    """Indices of the marked entries (k or fewer in each row), ascending, then zeros: int64 [m, k]."""
    rows, numel = chosen.shape
    slot = torch.where(chosen, chosen.cumsum(dim=1) - 1, k)
    index = torch.arange(numel, device=chosen.device).expand(rows, numel)
    return torch.zeros(rows, k + 1, dtype=torch.int64, device=chosen.device).scatter_(1, slot, index)[:, :k]


def scatter(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The blocks [m, numel] in which the valid slots [m, k] put their values; zero elsewhere."""
    valid = indices < numel
    valid[:, 1:] &= indices[:, 1:] > indices.cummax(dim=1).values[:, :-1]
    place = torch.where(valid, indices, numel)  # void slots share one place behind the block
    out = torch.zeros(len(indices), numel + 1, dtype=values.dtype, device=values.device)
    return out.scatter_(1, place, values)[:, :numel]

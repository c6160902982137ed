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


def sampled(magnitude: Tensor, k: int, ratio: float) -> Tensor:
    """Marks at most k entries of each row, the largest: those that reach a threshold estimated from a sample.

    Deep Gradient Compression's selection (Lin et al. 2017, section 5 of its appendix and its code): the threshold is that of
    the sample's own selection; while fewer than 0.8 k entries reach it, it is lowered by a fifth, ten times at most. Of more
    than k that reach it the largest are taken, so nothing depends on the order of the elements.

    Args:
        magnitude: [m, n].
        k: Entries to choose.
        ratio: k / n, the share to take of the sample.
    """
    stride = sample_stride(magnitude.shape[1], ratio)
    if stride == 1:
        return largest(magnitude, k)
    sample = magnitude[:, ::stride]
    share = max(1, int(ratio * sample.shape[1] + 0.5))
    threshold = sample.topk(share, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    for _ in range(10):
        too_few = 5 * (magnitude >= threshold).sum(dim=1, keepdim=True) < 4 * k
        threshold = torch.where(too_few, threshold * 0.8, threshold)
    return largest(magnitude.where(magnitude >= threshold, 0.0), k)


def sample_stride(numel: int, ratio: float) -> int:
    """Every how many elements one is sampled: 1 % of them, more where that would leave fewer than 32 to select.

    Odd, so that a sample does not follow the rows of a matrix whose length is a power of two. 1 where most is to be sent.
    """
    if ratio > 0.5:
        return 1
    samples = max(numel // 100, int(32 / ratio))
    return max(1, (numel // samples - 1) | 1)


def indices_of(chosen: Tensor, k: int) -> Tensor:
    """Indices of the marked entries (k or fewer in each row), ascending, then zeros: int64 [m, k]."""
    rows, numel = chosen.shape
    slot = torch.where(chosen, chosen.cumsum(dim=1) - 1, k)
    index = torch.arange(numel, device=chosen.device).expand(rows, numel)
    return torch.zeros(rows, k + 1, dtype=torch.int64, device=chosen.device).scatter_(1, slot, index)[:, :k]


def index_bits(numel: int) -> int:
    """Bits of one index into a block of ``numel`` elements."""
    return max(1, (numel - 1).bit_length())


def scatter(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The blocks [m, numel] in which the valid slots [m, k] put their values; zero elsewhere."""
    valid = indices < numel
    valid[:, 1:] &= indices[:, 1:] > indices.cummax(dim=1).values[:, :-1]
    place = torch.where(valid, indices, numel)  # void slots share one place behind the block
    out = torch.zeros(len(indices), numel + 1, dtype=values.dtype, device=values.device)
    return out.scatter_(1, place, values)[:, :numel]

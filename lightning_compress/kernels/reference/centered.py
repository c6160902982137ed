"""The k largest magnitudes of a block, each sent as its sign times twice the smallest of them.

Code: [amplitude: bf16][k indices of ceil(log2(n)) bits][k signs of one bit, 1 for minus]. Slots as in ``selection``.
The amplitude is cut to bf16, not rounded: it must not exceed twice the smallest (see ``CenteredTopK.contraction``).
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
from lightning_compress.kernels.reference.selection import index_bits, indices_of, largest, scatter

FLOOR = 0.25
"""The threshold is at least this share of the block's peak."""
CAP = 1.75
"""The amplitude is at most this multiple of the block's peak."""


def encode(p: Tensor, k: int) -> Tensor:
    """Codes of ``p`` [m, n]: uint8 [m, 2 + ceil(k * index_bits(n) / 8) + ceil(k / 8)]."""
    magnitude = p.abs()
    largest_k = magnitude.topk(k, dim=1, sorted=False).values
    peak = magnitude.amax(dim=1, keepdim=True)
    threshold = torch.maximum(largest_k.amin(dim=1, keepdim=True), FLOOR * peak)
    chosen = largest(magnitude, k) & (magnitude >= threshold) & (peak >= TINY)
    indices = indices_of(chosen, k)
    used = torch.arange(k, device=p.device) < chosen.sum(dim=1, keepdim=True)
    signs = (p.gather(1, indices) < 0) & used
    amplitude = torch.minimum(2 * to_float32(threshold), CAP * to_float32(peak))
    amplitude = torch.where(peak >= TINY, amplitude.clamp_max(torch.finfo(torch.float32).max), 0.0)
    high_half = to_bytes(amplitude)[:, 2:]  # of a float32: its value in bf16, cut
    return torch.cat([high_half, pack(indices, index_bits(p.shape[1])), pack(signs, 1)], dim=1)


def decode(payload: Tensor, numel: int, k: int) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    width = index_bits(numel)
    at = 2 + packed_nbytes(k, width)
    amplitude = from_bytes(payload[:, :2], torch.bfloat16).to(torch.float32)
    indices = unpack(payload[:, 2:at], k, width)
    signs = unpack(payload[:, at:], k, 1)
    return scatter(indices, torch.where(signs == 1, -amplitude, amplitude), numel)

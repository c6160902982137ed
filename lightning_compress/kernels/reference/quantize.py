"""Uniform quantisation to nearest with one scale per block.

Code: [step: float32][codes: n x bits, two's complement]. step = max|p| / L with L = 2**(bits-1) - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import TINY, divide, from_bytes, pack, to_bytes, to_float32, unpack

PEAK_MAX = 2.0**128 - 2.0**105
"""The largest float32 but one: a step that is rounded up must not carry L steps to inf."""


def encode(p: Tensor, bits: int, peak: Tensor) -> Tensor:
    """Codes of ``p`` [m, n] under the largest magnitudes ``peak`` [m]: uint8 [m, 4 + ceil(n * bits / 8)]."""
    levels = 2 ** (bits - 1) - 1
    peak = to_float32(peak).clamp_max(PEAK_MAX)
    sent = peak >= TINY
    step = torch.where(sent, divide(peak, levels), 0.0)
    inverse = torch.where(sent, divide(levels, peak.clamp_min(TINY)), 0.0)
    codes = torch.round(p * inverse.to(p.dtype).unsqueeze(1)).clamp_(-levels, levels)
    return torch.cat([to_bytes(step.unsqueeze(1)), pack(codes.to(torch.int64) & (2**bits - 1), bits)], dim=1)


def decode(payload: Tensor, numel: int, bits: int) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    step = from_bytes(payload[:, :4], torch.float32)
    sign = 1 << (bits - 1)
    codes = (unpack(payload[:, 4:], numel, bits) ^ sign) - sign
    return codes.to(torch.float32) * step

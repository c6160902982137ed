"""Uniform quantisation that rounds at random, so that the mean of what is decoded is what was encoded.

Code: [step: float32][codes: n x bits, two's complement]. step = norm / s with s = 2**(bits-1) - 1.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import TINY, divide, from_bytes, pack, to_bytes, to_float32, unpack
from lightning_compress.kernels.reference.quantize import PEAK_MAX

Norm = Literal["max", "l2"]
NORMS = get_args(Norm)


def norm_of(p: Tensor, norm: Norm) -> Tensor:
    """float32 norm over the last dimension; the squares of the l2 norm are summed in float64."""
    if norm == "max":
        return to_float32(p.abs().amax(dim=-1))
    return to_float32(p.double().square().sum(dim=-1).sqrt())


def encode(p: Tensor, bits: int, norm: Tensor, uniform: Tensor) -> Tensor:
    """Codes of ``p`` [m, n] under its norms [m] and random numbers [m, n]: uint8 [m, 4 + ceil(n * bits / 8)]."""
    levels = 2 ** (bits - 1) - 1
    norm = norm.clamp_max(PEAK_MAX)
    sent = norm >= TINY
    step = torch.where(sent, divide(norm, levels), 0.0)
    # two roundings, spelled out: torch takes a number divided by a tensor for the same
    inverse = torch.where(sent, norm.clamp_min(TINY).reciprocal() * levels, 0.0)
    scaled = (p.abs() * inverse.to(p.dtype).unsqueeze(1)).clamp_max(levels)
    lower = scaled.floor()
    # Comparing with the fraction, not adding u before floor(): the sum would be rounded up, now and then past s.
    codes = (lower + (uniform < scaled - lower)).to(torch.int64)
    codes = torch.where(p < 0, -codes, codes)
    return torch.cat([to_bytes(step.unsqueeze(1)), pack(codes & (2**bits - 1), bits)], dim=1)


def decode(payload: Tensor, numel: int, bits: int) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    step = from_bytes(payload[:, :4], torch.float32)
    sign = 1 << (bits - 1)
    codes = (unpack(payload[:, 4:], numel, bits) ^ sign) - sign
    return codes.to(torch.float32) * step

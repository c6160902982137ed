"""Casts to narrower floating-point formats. Finite values saturate; inf and NaN stay what they are."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import TINY, divide, from_bytes, to_bytes, to_float32

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""


def saturating_cast(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds ``p`` to ``dtype`` by way of float32; finite values beyond its range become the largest finite one."""
    limit = torch.finfo(dtype).max
    return torch.where(torch.isfinite(p), p.clamp(-limit, limit), p).to(torch.float32).to(dtype)


def encode(p: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of ``p`` [m, n] in ``dtype``: uint8 [m, n * itemsize]."""
    return to_bytes(saturating_cast(p, dtype))


def decode(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values [m, n] of bytes in ``dtype``."""
    return from_bytes(payload, dtype).to(torch.float32)


def encode_fp8(p: Tensor, peak: Tensor) -> Tensor:
    """Block-scaled float8_e4m3fn: [scale: float32][n bytes]; ``peak`` [m] maps to 448, the format's largest value."""
    peak = to_float32(peak)
    sent = peak >= TINY
    scale = torch.where(sent, divide(peak, FP8_MAX), 0.0)
    inverse = torch.where(sent, divide(FP8_MAX, peak.clamp_min(TINY)), 0.0)
    codes = to_bytes(saturating_cast(p * inverse.to(p.dtype).unsqueeze(1), torch.float8_e4m3fn))
    codes = torch.where(sent.unsqueeze(1), codes, 0)  # a negative number times 0 would be sent as -0
    return torch.cat([to_bytes(scale.unsqueeze(1)), codes], dim=1)


def decode_fp8(payload: Tensor) -> Tensor:
    """float32 values [m, n] of block-scaled float8_e4m3fn."""
    scale = from_bytes(payload[:, :4], torch.float32)
    return from_bytes(payload[:, 4:], torch.float8_e4m3fn).to(torch.float32) * scale

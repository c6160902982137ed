"""Powers of two times a norm, rounded at random to one of the two neighbours: an exponent and a sign per element.

Code: [norm: float32][codes: n x bits, (sign << (bits-1)) | index]. With L = 2**(bits-1) - 1, index 0 means 0 and index
i means 2**(i - L) * norm, so L means the norm itself. Exponents are read from and put into the bits of float32 numbers:
logarithms would not agree between devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import TINY, from_bytes, pack, to_bytes, to_float32, unpack

_MANTISSA = (1 << 23) - 1
_BIAS = 127


def encode(p: Tensor, bits: int, norm: Tensor, uniform: Tensor) -> Tensor:
    """Codes of ``p`` [m, n] under its norms [m] and random numbers [m, n]: uint8 [m, 4 + ceil(n * bits / 8)]."""
    top = 2 ** (bits - 1) - 1
    sent = norm >= TINY
    inverse = torch.where(sent, norm.clamp_min(TINY).reciprocal(), 0.0)
    share = to_float32((p.abs() * inverse.to(p.dtype).unsqueeze(1)).clamp_max(1.0))
    word = share.view(torch.int32)
    index = ((word >> 23) - (_BIAS - top)).clamp_min(0)
    # Between two powers of two the mantissa is the way to the upper one. Below the smallest level the way is the share
    # itself; with 8 bits that is where subnormal numbers begin, which the product reads exactly.
    way = torch.where(index > 0, (word & _MANTISSA).to(torch.float32) * 2.0**-23, share * 2.0 ** (top - 1))
    index = index + (uniform < way)
    code = torch.where((p < 0) & (index > 0), index | 1 << (bits - 1), index)
    norm = torch.where(sent, norm, 0.0)
    return torch.cat([to_bytes(norm.unsqueeze(1)), pack(code, bits)], dim=1)


def decode(payload: Tensor, numel: int, bits: int) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    top = 2 ** (bits - 1) - 1
    norm = from_bytes(payload[:, :4], torch.float32)
    code = unpack(payload[:, 4:], numel, bits)
    index = code & top
    level = (index + (_BIAS - top) << 23).to(torch.int32).view(torch.float32)
    value = torch.where(index > 0, level, 0.0) * norm
    return torch.where(code > top, -value, value)

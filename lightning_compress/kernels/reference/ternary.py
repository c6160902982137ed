"""Three levels, {-max, 0, +max}, with one scale per block.

Code: [max|p|: float32][m = ceil(n / 5) bytes]. Byte j holds the digits of the elements j, j + m, ..., j + 4 m in base
3, lowest first; digit 0 is zero, 1 is +max, 2 is -max. Taking elements that lie m apart, rather than neighbours, makes
packing and unpacking a few operations on whole vectors. Bytes above 242, which no encoder writes, have a top digit 3:
zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.kernels.reference.bits import TINY, from_bytes, to_bytes, to_float32

TRITS = 5
"""Base-3 digits in a byte: 3**5 = 243."""


def encode(p: Tensor, peak: Tensor) -> Tensor:
    """Codes of ``p`` [m, n] under the largest magnitudes ``peak`` [m]: uint8 [m, 4 + ceil(n / 5)].

    Strictly more than half of ``peak`` is sent: an element of exactly half stays zero, either error being the same.
    """
    peak = to_float32(peak)
    sent = peak >= TINY
    half = torch.where(sent, peak * 0.5, torch.inf).to(p.dtype).unsqueeze(1)
    digits = (p > half).to(torch.uint8) + (p < -half).to(torch.uint8) * 2
    rows, count = p.shape
    planes = torch.nn.functional.pad(digits, (0, -count % TRITS)).reshape(rows, TRITS, -1)
    weights = torch.tensor([3**k for k in range(TRITS)], dtype=torch.uint8, device=p.device)
    packed = (planes * weights.unsqueeze(1)).sum(1, dtype=torch.uint8)
    return torch.cat([to_bytes(torch.where(sent, peak, 0.0).unsqueeze(1)), packed], dim=1)


def decode(payload: Tensor, numel: int) -> Tensor:
    """float32 values [m, numel] of the codes in ``payload``."""
    scale = from_bytes(payload[:, :4], torch.float32)
    rest, planes = payload[:, 4:], []
    for _ in range(TRITS - 1):
        planes.append(rest % 3)
        rest = rest // 3
    digits = torch.cat([*planes, rest], dim=1)[:, :numel].to(torch.float32)
    sign = (digits == 1).to(torch.float32) - (digits == 2).to(torch.float32)
    return sign * scale

"""Packing of small unsigned integers into bytes, lowest bits first, and fixed-width numbers as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 2.0**-100
"""Blocks whose largest magnitude is below this are sent as zeros: the reciprocal of their scale would overflow."""


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits fill, the last byte padded with zero bits."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs the rows of ``codes``.

    Args:
        codes: Integers in [0, 2**bits), shape [m, n].
        bits: Width of one code, 1 to 32.

    Returns:
        uint8 of shape [m, packed_nbytes(n, bits)]: code i fills the bits [i * bits, (i + 1) * bits) of its row.
    """
    rows, count = codes.shape
    if bits == 8:
        return codes.to(torch.uint8)
    weights = torch.arange(bits, device=codes.device)
    stream = (codes.to(torch.int64).unsqueeze(-1) >> weights).bitwise_and_(1).reshape(rows, count * bits)
    nbytes = packed_nbytes(count, bits)
    stream = torch.nn.functional.pad(stream, (0, nbytes * 8 - count * bits)).reshape(rows, nbytes, 8)
    return (stream << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of :func:`pack`: int64 of shape [m, count]."""
    rows = packed.shape[0]
    if bits == 8:
        return packed[:, :count].to(torch.int64)
    eight = torch.arange(8, device=packed.device)
    stream = (packed.to(torch.int64).unsqueeze(-1) >> eight).bitwise_and_(1).reshape(rows, packed.shape[1] * 8)
    codes = stream[:, : count * bits].reshape(rows, count, bits)
    return (codes << torch.arange(bits, device=packed.device)).sum(-1)


def to_bytes(values: Tensor) -> Tensor:
    """The little-endian bytes of ``values`` [m, n]: uint8 of shape [m, n * itemsize]."""
    return values.contiguous().view(torch.uint8)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`to_bytes`."""
    aligned = payload.clone(memory_format=torch.contiguous_format)
    return aligned.view(dtype)


def to_float32(values: Tensor) -> Tensor:
    """Rounds to float32; finite float64 values beyond its range saturate."""
    limit = torch.finfo(torch.float32).max
    return values.clamp(-limit, limit).to(torch.float32) if values.dtype == torch.float64 else values.to(torch.float32)


def divide(dividend: Tensor | float, divisor: Tensor | float) -> Tensor:
    """The correctly rounded quotient of a tensor and a number, in either order.

    Left alone, torch multiplies by a reciprocal (of the tensor everywhere, of the number on CUDA), which rounds twice: devices
    and kernels would disagree in the last bit.
    """
    if not isinstance(dividend, Tensor):
        assert isinstance(divisor, Tensor)
        return torch.full_like(divisor, dividend) / divisor
    assert not isinstance(divisor, Tensor)
    return dividend / torch.full_like(dividend, divisor)

"""Packing of small unsigned integers into bytes, lowest bits first, and fixed-width numbers as bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    per_group, group_nbytes = _group(bits)
    groups = -(-count // per_group)
    codes = torch.nn.functional.pad(codes, (0, groups * per_group - count)).reshape(rows, groups, per_group)
    packed = torch.zeros(rows, groups, group_nbytes, dtype=torch.uint8, device=codes.device)
    for code, byte, shift in _shifts(bits):
        packed[..., byte] |= _shifted(codes[..., code].to(torch.int64), shift).to(torch.uint8)
    return packed.reshape(rows, groups * group_nbytes)[:, : packed_nbytes(count, bits)].contiguous()


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of :func:`pack`: int64 of shape [m, count]."""
    rows = packed.shape[0]
    if bits == 8:
        return packed[:, :count].to(torch.int64)
    per_group, group_nbytes = _group(bits)
    groups = -(-count // per_group)
    packed = packed[:, : packed_nbytes(count, bits)]
    packed = torch.nn.functional.pad(packed, (0, groups * group_nbytes - packed.shape[1]))
    packed = packed.reshape(rows, groups, group_nbytes)
    codes = torch.zeros(rows, groups, per_group, dtype=torch.int64, device=packed.device)
    for code, byte, shift in _shifts(bits):
        codes[..., code] |= _shifted(packed[..., byte].to(torch.int64), -shift)
    return codes.bitwise_and_((1 << bits) - 1).reshape(rows, groups * per_group)[:, :count]


def _group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _shifts(bits: int) -> Iterator[tuple[int, int, int]]:
    """Which code of a group meets which byte, and by how many bits to the left it is moved there.

    A loop over these pairs needs temporaries of the size of the codes; one element per bit would need as many bytes as a
    code has bits, times eight.
    """
    for code in range(_group(bits)[0]):
        first = code * bits
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield code, byte, first - 8 * byte


def _shifted(values: Tensor, left: int) -> Tensor:
    return values << left if left >= 0 else values >> -left


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

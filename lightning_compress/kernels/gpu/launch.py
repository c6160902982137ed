"""Launches the kernels of ``frame`` for a whole block table, on the current stream."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.gpu.frame import decode_blocks, encode_blocks

SMALLEST = 16
"""Elements of the smallest tile."""
SHARE = 512
"""Elements of a tile for each warp: 16 for each of its threads."""


def encode(
    kernels: GPUKernels,
    longest: int,
    *,
    values: Tensor,
    weight: float,
    scale: float | Tensor,
    state: Tensor,
    read: Tensor | None,
    write: Tensor | None,
    payload: Tensor,
    table: Tensor,
    status: Tensor,
    shared: Tensor | None,
    salt: int,
) -> None:
    """Encodes all blocks in one launch.

    Args:
        kernels: The compressor's coders.
        longest: Elements of the longest block, at most LARGEST.
        values: Gradients of any floating dtype, flat.
        weight: p = weight * (values + scale * state).
        scale: The loss scale; a tensor of one element is read on the device.
        state: float64 beside float64 values, float32 beside all others: the memory's flat store.
        read: int64 per parameter: added to a block's state offset when it is read; None: no state is added.
        write: The same when it is written; None: what encoding leaves out is dropped.
        payload: uint8, zeros.
        table: Block table.
        status: uint8 per parameter: only PRESENT ones are coded; those that turn out non-finite are set to NONFINITE.
        shared: float32 per block: scale statistic of its whole tensor, or None.
        salt: Counter of the random numbers.
    """
    on_device = isinstance(scale, Tensor)
    marks = status.clone()  # a block must not see that another one of its parameter was not finite
    with torch.cuda.device_of(values):
        encode_blocks[(len(table),)](
            values=values,
            weight=weight,
            scale=1.0 if on_device else scale,
            device_scale=scale if on_device else None,
            state=state,
            read=read,
            write=write,
            payload=payload,
            table=table,
            status=status,
            marks=marks,
            shared=shared,
            salt=salt,
            CODER=kernels.encode,
            **constants(kernels, longest),
        )
    status.copy_(marks)


def decode(
    kernels: GPUKernels,
    longest: int,
    *,
    payload: Tensor,
    stride: int,
    ranks: int,
    out: Tensor,
    weight: float,
    table: Tensor,
    status: Tensor,
    salt: int,
) -> None:
    """Writes weight * (sum of the ranks' decoded blocks) to ``out`` in one launch; arguments as in ``DecodeJob``."""
    with torch.cuda.device_of(out):
        decode_blocks[(len(table),)](
            payload=payload,
            stride=stride,
            ranks=ranks,
            out=out,
            weight=weight,
            table=table,
            status=status,
            salt=salt,
            CODER=kernels.decode,
            **constants(kernels, longest),
        )


def constants(kernels: GPUKernels, longest: int) -> dict[str, Any]:
    """What a kernel is compiled for, besides types."""
    size = max(SMALLEST, triton.next_power_of_2(longest))
    return {
        "BITS": kernels.bits,
        "RATIO": kernels.ratio,
        "VARIANT": kernels.variant,
        "SLOTS": max(SMALLEST, triton.next_power_of_2(int(kernels.ratio * longest + 0.5))),
        "SIZE": size,
        "num_warps": min(8, max(1, size // SHARE)),
        "enable_fp_fusion": False,  # a fused multiply-add rounds once where the reference rounds twice
    }

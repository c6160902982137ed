"""Launches the kernels of ``frame`` for a whole block table, on the current stream."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lightning_compress.kernels.batch import DecodeBatch, EncodeBatch
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.gpu.frame import decode_blocks, encode_blocks

SMALLEST = 16
"""Elements of the smallest tile."""
SHARE = 512
"""Elements of a tile for each warp: 16 for each of its threads."""


def encode(kernels: GPUKernels, longest: int, batch: EncodeBatch) -> None:
    """Encodes all blocks in one launch.

    Args:
        kernels: The compressor's coders.
        longest: Elements of the longest block, at most LARGEST.
        batch: The blocks.
    """
    memory, status = batch.memory, batch.status
    on_device = isinstance(batch.scale, Tensor)
    marks = status.clone()  # a block must not see that another one of its parameter was not finite
    with torch.cuda.device_of(batch.values):
        encode_blocks[(len(batch.table),)](
            values=batch.values,
            weight=batch.weight,
            scale=1.0 if on_device else batch.scale,
            device_scale=batch.scale if on_device else None,
            state=memory.state,
            read=memory.read if memory.compensate else None,
            write=memory.write if memory.update else None,
            payload=batch.payload,
            table=batch.table,
            status=status,
            marks=marks,
            shared=batch.shared,
            salt=batch.salt,
            CODER=kernels.encode,
            **constants(kernels, longest),
        )
    status.copy_(marks)


def decode(kernels: GPUKernels, longest: int, batch: DecodeBatch) -> None:
    """Decodes and adds up all blocks in one launch; arguments as in ``encode``."""
    with torch.cuda.device_of(batch.out):
        decode_blocks[(len(batch.table),)](
            payload=batch.payload,
            stride=batch.stride,
            ranks=batch.ranks,
            out=batch.out,
            weight=batch.weight,
            table=batch.table,
            status=batch.status,
            salt=batch.salt,
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

"""Narrower floating-point formats: the gentlest step away from dense."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_block_size
from lightning_compress.kernels.cpu import cast as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import cast as reference

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


class Cast(Compressor):
    """Sends each element in a narrower format; finite values saturate, inf and NaN stay.

    Args:
        dtype: "fp16", "bf16", "fp32" (for small tensors that must travel exactly), or "fp8": float8_e4m3fn with one
            float32 scale per block. fp16 and bf16 payloads can be summed by all-reduce, fp8 cannot.
        block_size: Elements that share fp8's scale; for the other formats only the unit of ownership.
    """

    def __init__(self, dtype: Literal["fp16", "bf16", "fp8", "fp32"] = "bf16", block_size: int | None = 1024) -> None:
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"Cast knows the formats {', '.join(_DTYPES)}; got dtype={dtype!r}")
        self.dtype = dtype
        self.block_size = check_block_size(block_size)

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        return self.dtype

    @property
    @override
    def linear(self) -> bool:  # type: ignore[override]
        return self.dtype != "fp8"

    @property
    @override
    def value_dtype(self) -> torch.dtype:  # type: ignore[override]
        return _DTYPES[self.dtype] if self.linear else torch.uint8

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 + numel if self.dtype == "fp8" else numel * _DTYPES[self.dtype].itemsize

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        if self.dtype != "fp8":
            return reference.encode(p, _DTYPES[self.dtype])
        return reference.encode_fp8(p, p.abs().amax(dim=1) if blocks.statistic is None else blocks.statistic)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        if self.dtype != "fp8":
            return reference.decode(payload, _DTYPES[self.dtype])
        return reference.decode_fp8(payload)

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor | None:
        return p.abs().amax() if self.dtype == "fp8" else None

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(*cpu.KERNELS[self.dtype])

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import cast as gpu

        if self.dtype == "fp8":
            return GPUKernels(gpu.encode_fp8, gpu.decode_fp8)
        return GPUKernels(gpu.encode, gpu.decode, variant=gpu.FORMATS[self.dtype])

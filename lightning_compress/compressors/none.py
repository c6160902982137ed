"""No compression: DDP's own all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels
from lightning_compress.kernels.cpu import cast as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import cast as reference


class NoCompression(Compressor):
    """Sends gradients as they are.

    With ``exchange="auto"`` this is DDP bit for bit: its own buffer, scaled by 1/N, one all-reduce, no blocks and no
    payload. Under an explicit other exchange the values travel as float32, equal to DDP up to rounding.
    """

    name = "none"
    unbiased = True
    linear = True
    value_dtype = torch.float32
    block_size = 1024

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 * numel

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.encode(p, torch.float32)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, torch.float32)

    @override
    def contraction(self, numel: int) -> float | None:
        return 1.0

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(*cpu.KERNELS["fp32"])

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import cast as gpu

        return GPUKernels(gpu.encode, gpu.decode, variant=gpu.FORMATS["fp32"])

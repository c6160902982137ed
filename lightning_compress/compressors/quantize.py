"""Uniform quantisation, rounding to nearest."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_bits, check_block_size
from lightning_compress.kernels.cpu import quantize as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import quantize as reference
from lightning_compress.kernels.reference.bits import packed_nbytes


class Quantize(Compressor):
    """Rounds each element to the nearest of 2**bits - 1 levels; one scale (the block's largest magnitude) per block.

    Biased, made for error feedback: what rounding leaves lies between plus and minus half a step, so no coordinate lags
    behind its gradient on average.

    Args:
        bits: 2, 3, 4 or 8 bits per element. 4 is near dense in all our pilots; go down for slower links.
        block_size: Elements that share a scale. Smaller blocks follow the gradient's range better and cost
            32 / block_size bits per element. None: one scale per tensor.
    """

    name = "quantize"

    def __init__(self, bits: int = 4, block_size: int | None = 1024) -> None:
        self.bits = check_bits(bits, (2, 3, 4, 8))
        self.block_size = check_block_size(block_size)

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 + packed_nbytes(numel, self.bits)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        peak = p.abs().amax(dim=1) if blocks.statistic is None else blocks.statistic
        return reference.encode(p, self.bits, peak)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel, self.bits)

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor | None:
        return p.abs().amax()

    @override
    def contraction(self, numel: int) -> float:
        """The largest element is exact, no other is off by more than half a step: 4 L^2 / (4 L^2 + numel - 1), L levels."""
        levels = (1 << (self.bits - 1)) - 1
        return 4 * levels**2 / (4 * levels**2 + numel - 1)

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode, (self.bits,))

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import quantize as gpu

        return GPUKernels(gpu.encode, gpu.decode, bits=self.bits)

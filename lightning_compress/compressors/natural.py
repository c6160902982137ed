"""Powers of two with random rounding."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, CPUKernels
from lightning_compress.compressors.dithering import Dithering
from lightning_compress.kernels.cpu import natural as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import natural as reference
from lightning_compress.kernels.reference.dithering import Norm


class NaturalDithering(Dithering):
    """Rounds each element at random to one of its two neighbours among norm x {1, 1/2, 1/4, ..., 2**(1-L), 0}.

    L = 2**(bits-1) - 1 levels and a sign. Unbiased, so it needs no memory; relative precision is the same from the
    largest to the smallest level: the natural dithering of Horvath et al. 2019 and of arXiv 2105.07829 (3 bits). Zeros
    stay zeros.

    Args:
        bits: 2 to 8 bits per element. 3 bits reach down to a quarter of the norm, 4 bits to 1/64; from there on more
            bits change little, since the spacing of the levels stays a factor of two.
        norm: What the largest level stands for: "max", the largest magnitude, or "l2" (see ``LinearDithering``).
        block_size: Elements that share a norm; None: one norm per tensor.
        seed: Seed of the random numbers.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "natural"

    def __init__(self, bits: int = 3, norm: Norm = "max", block_size: int | None = 1024, seed: int = 0) -> None:
        super().__init__(bits, norm, block_size, seed)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.encode(p, self.bits, self._norm(p, blocks), self._uniform(blocks))

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel, self.bits)

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode, (self.bits, self.norm == "l2"))

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import natural as gpu

        return GPUKernels(gpu.encode, gpu.decode, bits=self.bits, variant=int(self.norm == "l2"))

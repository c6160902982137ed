"""Uniform quantisation with random rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_bits, check_block_size, check_seed
from lightning_compress.kernels.cpu import dithering as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import dithering as reference
from lightning_compress.kernels.reference.bits import packed_nbytes
from lightning_compress.kernels.reference.hashing import uniform


class Dithering(Compressor):
    """What the two dithering quantisers share: [float32][n codes], a norm per block, a random number per element."""

    unbiased = True

    def __init__(self, bits: int, norm: reference.Norm, block_size: int | None, seed: int) -> None:
        if norm not in reference.NORMS:
            raise ValueError(f"norm must be one of {', '.join(reference.NORMS)}, got {norm!r}")
        self.bits = check_bits(bits, (2, 3, 4, 5, 6, 7, 8))
        self.norm = norm
        self.block_size = check_block_size(block_size)
        self.seed = check_seed(seed)

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 + packed_nbytes(numel, self.bits)

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor:
        finite = torch.isfinite(p).all()
        return torch.where(finite, reference.norm_of(p, self.norm), torch.inf)  # a float32 norm would have saturated

    def _norm(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.norm_of(p, self.norm) if blocks.statistic is None else blocks.statistic

    def _uniform(self, blocks: Blocks) -> Tensor:
        return uniform(blocks.salt, blocks.key, blocks.elements())


class LinearDithering(Dithering):
    """Rounds each element at random to one of its two neighbours among 2 s + 1 equidistant levels, s = 2**(bits-1) - 1.

    Unbiased, so it needs no memory: the linear dithering of arXiv 2105.07829 (QSGD's quantiser; Alistarh et al. 2017).
    Zeros stay zeros. The random numbers differ between ranks, so that their errors average out.

    Args:
        bits: 2 to 8 bits per element. The variance falls by 4 with each bit; the paper uses 5 for CNNs and 7 for BERT.
        norm: What the outermost level stands for. "max", the largest magnitude, leaves the smaller error; "l2" is
            QSGD's, whose levels mostly lie beyond the block's values: for long blocks it wants many bits.
        block_size: Elements that share a norm; smaller blocks leave a smaller error and cost 32 / block_size bits per
            element. None: one norm per tensor.
        seed: Seed of the random numbers.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "dithering"

    def __init__(
        self, bits: int = 5, norm: reference.Norm = "max", block_size: int | None = 1024, seed: int = 0
    ) -> None:
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
        from lightning_compress.kernels.gpu import dithering as gpu
        from lightning_compress.kernels.gpu.quantize import decode

        return GPUKernels(gpu.encode, decode, bits=self.bits, variant=int(self.norm == "l2"))

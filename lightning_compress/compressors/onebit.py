"""One bit per element."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_block_size
from lightning_compress.kernels.cpu import onebit as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import onebit as reference
from lightning_compress.kernels.reference.bits import packed_nbytes


class OneBit(Compressor):
    """Sends each element's sign, and the mean magnitude of the block: scaled sign compression with error feedback.

    About 31x less than float32: 1 bit per element, a float32 scale per block, and one bit per row (first-dimension
    slice of the parameter) that tells a row of zeros from a row of small numbers. Signs have no zero, so without it
    rows that never get a gradient (embeddings of unused tokens or positions) would drift; with it they decode to exact
    zeros, take no part in the mean, and nothing is remembered for them. The sign of a zero beside other values is
    plus.

    1-bit SGD (Seide et al. 2014) with the scale of EF-signSGD (Karimireddy et al. 2019), as in CLAN (arXiv 2105.07829).
    Biased: it needs error feedback.

    Args:
        block_size: Elements that share a scale. One magnitude stands for all of them: smaller blocks follow the
            gradient's range better and cost 32 / block_size bits per element, at 1024 three percent of the code. None:
            one scale per tensor, as in the paper.

    Raises:
        ValueError: ``block_size`` is neither None nor an integer in its range.
    """

    name = "onebit"
    keeps_zero = False

    def __init__(self, block_size: int | None = 1024) -> None:
        self.block_size = check_block_size(block_size)

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 + packed_nbytes(reference.row_bits(numel, row or numel), 1) + packed_nbytes(numel, 1)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        row_of, rows = _rows(blocks)
        scale = reference.scale(p, row_of, rows) if blocks.statistic is None else blocks.statistic
        return reference.encode(p, row_of, rows, scale)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, *_rows(blocks))

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor | None:
        return reference.tensor_scale(p, row)

    @override
    def contraction(self, numel: int) -> float:
        """||x||_1^2 / (n ||x||_2^2) (Karimireddy et al. 2019), which is at least 1 / n."""
        return 1 / numel

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode)

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import onebit as gpu

        return GPUKernels(gpu.encode, gpu.decode)


def _rows(blocks: Blocks) -> tuple[Tensor, int]:
    """Row of each element inside its block, int64 [m, numel], and the number of row bits."""
    row_of = (blocks.start % blocks.row).unsqueeze(1) + torch.arange(blocks.numel, device=blocks.start.device)
    return row_of // blocks.row, reference.row_bits(blocks.numel, blocks.row)

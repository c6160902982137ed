"""Three levels per element."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_block_size
from lightning_compress.kernels.cpu import ternary as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import ternary as reference


class Ternary(Compressor):
    """Rounds each element to the nearest of {-max, 0, +max}, max the block's largest magnitude: five elements a byte.

    1.6 bits per element and a float32 scale per block: 20x less than float32. An element is sent once it has passed
    half of the block's maximum, and then with the whole maximum, twice the threshold: what error feedback remembers
    swings around zero, so that no coordinate lags behind its gradient on average. Senders of three levels go back to
    TernGrad (Wen et al. 2017), which rounds at random to be unbiased; this one rounds to nearest and needs error
    feedback.

    Args:
        block_size: Elements that share a scale. Smaller blocks send more elements per step, since the maximum of few
            elements is smaller than that of many, and cost 32 / block_size bits per element. None: one scale per
            tensor.

    Raises:
        ValueError: ``block_size`` is neither None nor an integer in its range.
    """

    name = "ternary"

    def __init__(self, block_size: int | None = 1024) -> None:
        self.block_size = check_block_size(block_size)

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 + -(-numel // reference.TRITS)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.encode(p, p.abs().amax(dim=1) if blocks.statistic is None else blocks.statistic)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel)

    @override
    def statistic(self, p: Tensor, row: int) -> Tensor | None:
        return p.abs().amax()

    @override
    def contraction(self, numel: int) -> float:
        """The largest element is exact and no other is off by more than half of it: 4 / (numel + 3)."""
        return 4 / (numel + 3)

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode)

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import ternary as gpu

        return GPUKernels(gpu.encode, gpu.decode)

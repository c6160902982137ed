"""Random elements that all ranks choose alike."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.checks import check_switch
from lightning_compress.compressors.base import (
    Blocks,
    Compressor,
    CPUKernels,
    check_block_size,
    check_ratio,
    check_seed,
    kept,
)
from lightning_compress.kernels.cpu import randomk as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import randomk as reference


class RandomK(Compressor):
    """Sends one random element of each of k equal strata of a block; all ranks draw the same, so no index travels.

    The random-k of arXiv 2105.07829 (1/32 with error feedback), drawn without replacement: strata do not overlap. The
    payload is k float32 values, which all-reduce may add up. At 1/32: 1 bit per element (32x).

    Args:
        ratio: Share of the elements of a block to send, in (0, 1].
        seed: Seed of the draw; the same on all ranks.
        block_size: Elements of a block, at most 65536; no more than the unit of ownership. None: pieces of a tensor.
        unbiased: Multiplies each value by the length of its stratum: right on average and used without memory, but
            with a variance of about 1 / ratio. False: values as they are, for error feedback.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "randomk"
    linear = True
    per_rank = False
    value_dtype = torch.float32

    def __init__(
        self, ratio: float = 1 / 32, seed: int = 0, block_size: int | None = 1024, unbiased: bool = False
    ) -> None:
        self.ratio = check_ratio(ratio)
        self.seed = check_seed(seed)
        self.block_size = check_block_size(block_size)
        check_switch("unbiased", unbiased)
        self.unbiased = unbiased

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 * kept(numel, self.ratio)

    def _drawn(self, blocks: Blocks) -> Tensor:
        return reference.draw(blocks.numel, kept(blocks.numel, self.ratio), blocks.salt, blocks.key, blocks.start)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.encode(p, self._drawn(blocks), self.unbiased)

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel, self._drawn(blocks))

    @override
    def contraction(self, numel: int) -> float | None:
        """In expectation: an element is sent with one over the length of its stratum."""
        return None if self.unbiased else 1.0 / -(-numel // kept(numel, self.ratio))

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode, (self.ratio, self.unbiased))

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import randomk as gpu

        return GPUKernels(gpu.encode, gpu.decode, ratio=self.ratio, variant=int(self.unbiased))

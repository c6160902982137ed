"""A sign for each of the largest elements of a block, and one amplitude for all."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_block_size, check_ratio, kept
from lightning_compress.kernels.cpu import centered as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import centered as reference
from lightning_compress.kernels.reference.bits import packed_nbytes
from lightning_compress.kernels.reference.selection import index_bits


class CenteredTopK(Compressor):
    """Sends the signs of the k elements of largest magnitude; all get the amplitude 2 x the k-th largest magnitude.

    Made for error feedback. A top-k that sends what it has leaves between 0 and the threshold on the gradient's side:
    every coordinate lags. Twice the threshold is what a rounding quantiser sends: the residual swings around zero and
    so does the lag. At 6 % of blocks of 256: 16 + 15 x (8 + 1) bits, 0.6 bits per element (54x). A finding of this
    project, not of a paper; relatives are sparse ternary compression (Sattler et al. 2019) and sigma-delta modulation.

    Two limits make it a contraction, so that no residual grows without bound. The threshold is at least a quarter of
    the block's peak, smaller elements are not sent: else a block in which fewer than k elements carry a gradient would
    send an amplitude as small as its noise. And the amplitude is at most 1.75 x the peak: else k = 1 would flip a sign
    for ever. Ordinary blocks hardly ever meet either. Zeros are never sent.

    Args:
        ratio: Share of the elements of a block to send, in (0, 1]. 0.06 is level with dense training in our runs; at
            0.03 accuracy begins to fall, most of it in the owner's second encoding.
        block_size: Elements that share an amplitude, at most 65536. 256 makes an index one byte; larger blocks need
            more bits per index and smaller ones more amplitudes. None: a whole tensor in an all-gather, pieces of 65536
            elements in a two-way exchange.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "centered"
    selects = True

    def __init__(self, ratio: float = 0.06, block_size: int | None = 256) -> None:
        self.ratio = check_ratio(ratio)
        self.block_size = check_block_size(block_size)

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        k = kept(numel, self.ratio)
        return 2 + packed_nbytes(k, index_bits(numel)) + packed_nbytes(k, 1)

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        return reference.encode(p, kept(blocks.numel, self.ratio))

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel, kept(blocks.numel, self.ratio))

    @override
    def contraction(self, numel: int) -> float:
        """7 / (16 n), for blocks that are sent at all (peak of 2**-100 or more, in float32's range).

        With amplitude a, a sent element of magnitude x takes a (2x - a) off the squared norm. That is never negative,
        as a is at most twice the smallest x. For the peak it is at least 7/16 of its square, as a lies between 0.496
        and 1.75 times it; and the peak holds at least 1/n of the squared norm.
        """
        return 7 / 16 / numel

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode, (self.ratio,))

    @override
    def gpu_kernels(self) -> GPUKernels:
        from lightning_compress.kernels.gpu import centered as gpu

        return GPUKernels(gpu.encode, gpu.decode, ratio=self.ratio)

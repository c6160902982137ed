"""The largest elements of a block."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels, check_block_size, check_ratio, kept
from lightning_compress.kernels.cpu import topk as cpu
from lightning_compress.kernels.gpu import GPUKernels
from lightning_compress.kernels.reference import topk as reference
from lightning_compress.kernels.reference.bits import packed_nbytes
from lightning_compress.kernels.reference.selection import index_bits, largest, sample_stride, sampled

_FORMATS = {"fp16": (torch.float16, cpu.FP16), "bf16": (torch.bfloat16, cpu.BF16), "fp32": (torch.float32, cpu.FP32)}


class TopK(Compressor):
    """Sends the k elements of largest magnitude of each block: an index and a value each.

    The selection per block is exact, ties go to the lower index, and a block with fewer than k non-zero elements sends those
    it has. At 1 % of blocks of 4096: 41 x (12 + 16) bits, 0.28 bits per element (114x). ``block_size=None`` is the selection
    of Deep Gradient Compression (Lin et al. 2017): per tensor, by a threshold estimated from a sample; it takes the k
    largest or fewer, mostly 0.8 k and more, and what it leaves free is sent as void.

    Args:
        ratio: Share of the elements of a block to send, in (0, 1]. 0.01 and error feedback are near dense in most runs;
            below, warm up with a higher density.
        block_size: Elements among which the largest are chosen, at most 65536. Larger blocks choose more freely,
            smaller ones take fewer bits for an index and share out the traffic more evenly among the owners. None: by a
            sampled threshold, among a whole tensor in an all-gather, among pieces of 65536 elements in a two-way exchange.
        dtype: Format of the values. "bf16" has float32's range, so tiny gradients survive; its rounding error of
            up to 0.4 % stays in the memory like all that is not sent. "fp16" rounds 8 times finer, but magnitudes
            below 3e-8 become zero and above 65504 saturate: for gradients known to lie in between. "fp32" is exact and
            takes twice the bytes.

    Raises:
        ValueError: An argument is out of range.
    """

    name = "topk"
    selects = True

    def __init__(
        self, ratio: float = 0.01, block_size: int | None = 4096, dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    ) -> None:
        if dtype not in _FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(_FORMATS)}, got {dtype!r}")
        self.ratio = check_ratio(ratio)
        self.block_size = check_block_size(block_size)
        self.dtype = dtype

    @override
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        k = kept(numel, self.ratio)
        return packed_nbytes(k, index_bits(numel)) + k * _FORMATS[self.dtype][0].itemsize

    @override
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        k = kept(blocks.numel, self.ratio)
        chosen = sampled(p.abs(), k, self.ratio) if self.block_size is None else largest(p.abs(), k)
        return reference.encode(p, chosen, k, _FORMATS[self.dtype][0])

    @override
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return reference.decode(payload, blocks.numel, kept(blocks.numel, self.ratio), _FORMATS[self.dtype][0])

    @override
    def contraction(self, numel: int) -> float:
        """k/n, less the share of the sent energy that rounding of the values leaves: at most eps**2 / 4 of it.

        A sampled threshold may, at worst, let only the largest element pass. Holds while the sent values lie in the normal
        range of the format.
        """
        sent = 1 if self.block_size is None and sample_stride(numel, self.ratio) > 1 else kept(numel, self.ratio)
        rounding = torch.finfo(_FORMATS[self.dtype][0]).eps / 2
        return sent / numel * (1.0 - rounding**2)

    @override
    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(cpu.encode, cpu.decode, (self.ratio, _FORMATS[self.dtype][1], self.block_size is None))

    @override
    def gpu_kernels(self) -> GPUKernels | None:
        if self.block_size is None:  # a sampled threshold is for tensors that no program can hold
            return None
        from lightning_compress.kernels.gpu import topk as gpu
        from lightning_compress.kernels.gpu.cast import FORMATS

        return GPUKernels(gpu.encode, gpu.decode, ratio=self.ratio, variant=FORMATS[self.dtype])

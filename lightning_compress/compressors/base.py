"""The contract of a compressor: what a payload is, how large it is, how to make it and how to read it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_compress.checks import is_number, is_whole
from lightning_compress.kernels.gpu import GPUKernels

PIECE = 65536
"""With ``block_size=None`` a tensor is cut into pieces of at most this many elements: every rank owns its share."""


@dataclass(frozen=True)
class Blocks:
    """A batch of m equally long blocks: what a compressor may know besides the values.

    Attributes:
        numel: Elements of each block.
        row: Elements of one first-dimension slice of the parameter, at most ``numel`` matter.
        start: Offset of each block inside its parameter, int64 [m].
        key: 32-bit hash of each block's parameter name, int64 [m].
        salt: Hash of (seed, step[, rank]): the rest of the counter of the random numbers.
        statistic: What ``Compressor.statistic`` gave for the whole tensor, float32 [m], or None: take the block's own.
    """

    numel: int
    row: int
    start: Tensor
    key: Tensor
    salt: int = 0
    statistic: Tensor | None = None

    def elements(self) -> Tensor:
        """Element numbers inside the parameter, int64 [m, numel]."""
        return self.start.unsqueeze(1) + torch.arange(self.numel, device=self.start.device)


class CPUKernels(NamedTuple):
    """Compiled functions that do a whole block table; ``arguments`` follow the job (see ``kernels.cpu.job``)."""

    encode: Callable[..., None]
    decode: Callable[..., None]
    arguments: tuple[Any, ...] = ()


class Compressor(ABC):
    """Turns blocks of numbers into codes whose size depends on nothing but the blocks' length.

    A subclass gives ``payload_nbytes``, ``encode`` and ``decode`` in torch; that is all a third party needs (then run
    ``lightning_compress.testing.conformance`` on it). Built-in ones add compiled kernels of the same meaning.

    Three rules make the exchange work:

    - a code of zero bytes decodes to zeros (a parameter that takes no part sends them);
    - ``encode`` and ``decode`` are pure: randomness comes from ``Blocks`` alone;
    - values given to ``encode`` are finite (the exchange marks a parameter that is not, and sends zeros for it).

    Attributes:
        name: Registry name.
        unbiased: E[decode(encode(x))] = x; such a compressor needs no error feedback.
        linear: The payload is an array of ``value_dtype`` that all-reduce may add up.
        per_rank: Its random numbers must differ between ranks (dithering) or must not (shared-seed random-k).
        selects: It sends some elements and drops others: with ``block_size=None`` in an all-gather, a whole tensor is
            one block.
        keeps_zero: A zero element decodes to zero. Otherwise it carries one bit per row (see ``OneBit``).
        value_dtype: Type of the payload's numbers when ``linear``.
        block_size: Elements per block; None for one scale and one selection per tensor.
        seed: Seed of the random numbers, if it draws any.
    """

    name: ClassVar[str]
    unbiased: bool = False
    linear: ClassVar[bool] = False
    per_rank: ClassVar[bool] = True
    selects: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True
    value_dtype: torch.dtype = torch.uint8
    block_size: int | None
    seed: int = 0

    @abstractmethod
    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        """Bytes of the code of a block, known without compressing.

        Args:
            numel: Elements of the block, 1 or more.
            row: Elements of one first-dimension slice of its parameter; None: the block is one row.
        """

    @abstractmethod
    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        """Codes of ``p`` (float32 or float64, [m, blocks.numel]): uint8 [m, payload_nbytes]."""

    @abstractmethod
    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        """Values of the codes ``payload`` (uint8 [m, payload_nbytes], from any rank): float32 [m, blocks.numel]."""

    def statistic(self, p: Tensor, row: int) -> Tensor | None:  # noqa: ARG002
        """With ``block_size=None``: the whole tensor's scale from the flat ``p``, 0-dim; None if it has none."""
        return None

    def contraction(self, numel: int) -> float | None:  # noqa: ARG002
        """The factor delta of ||decode(encode(x)) - x||^2 <= (1 - delta) ||x||^2 for a block, or None if unknown."""
        return None

    def with_ratio(self, ratio: float) -> Compressor:
        """The same compressor at another density, for a schedule.

        Raises:
            ValueError: It has no density.
        """
        if not hasattr(self, "ratio"):
            raise ValueError(f"A density schedule needs a compressor with a ratio (such as TopK), {self!r} has none.")
        other = copy.copy(self)
        other.ratio = check_ratio(ratio)
        return other

    def cpu_kernels(self) -> CPUKernels | None:
        """Compiled kernels, or None: the torch functions above are used on the CPU too."""
        return None

    def gpu_kernels(self) -> GPUKernels | None:
        """Triton kernels, or None: the torch functions above are used on CUDA too. Only called where there is Triton."""
        return None

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def check_block_size(block_size: int | None, largest: int = PIECE) -> int | None:
    """Validates a ``block_size`` argument."""
    if block_size is None or (is_whole(block_size) and 1 <= block_size <= largest):
        return block_size
    raise ValueError(
        f"block_size must be None (one block per tensor) or an integer in [1, {largest}], got {block_size!r}"
    )


def check_ratio(ratio: float) -> float:
    """Validates a ``ratio`` argument: the share of elements that is kept."""
    if not is_number(ratio) or not 0.0 < ratio <= 1.0:
        raise ValueError(
            f"ratio is the share of elements to keep and must lie in (0, 1], got {ratio!r}; 1 % is ratio=0.01"
        )
    return float(ratio)


def check_bits(bits: int, allowed: tuple[int, ...]) -> int:
    """Validates a ``bits`` argument."""
    if not is_whole(bits) or bits not in allowed:
        raise ValueError(f"bits must be one of {', '.join(map(str, allowed))}, got {bits!r}")
    return bits


def check_seed(seed: int) -> int:
    """Validates a ``seed`` argument."""
    if not is_whole(seed):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return seed


def kept(numel: int, ratio: float) -> int:
    """Elements that a selection of ``ratio`` keeps of a block: max(1, round(ratio * numel)), halves rounded up."""
    return max(1, int(ratio * numel + 0.5))

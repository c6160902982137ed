"""Whether all ranks hold the same parameters: a checksum per parameter, compared every few steps (``verify_every``)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.exchange.collectives import AllGather
from lightning_compress.exchange.stats import ExchangeStats

_PIECE = 1 << 20
"""Words that are hashed at once: bounds the scratch memory to some tens of MB."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = (-49064778989728563, -4265267296055464877)  # MurmurHash3's finalizer (fmix64), as signed numbers


class Verification:
    """Compares the bits of all parameters of a model on all ranks, frozen ones included; buffers are not compared.

    DDP gives every rank rank 0's buffers at each forward, and between forwards they may differ.

    Args:
        module: The model.
        every: Exchanges from one comparison to the next.
        group: A process group of its own, used by nobody else.
        stats: Where the bytes are counted: 8 per parameter.
    """

    def __init__(self, module: torch.nn.Module, every: int, group: dist.ProcessGroup, stats: ExchangeStats) -> None:
        self._module, self._every, self._group, self._stats = module, every, group, stats

    @torch.no_grad()
    def check(self, step: int) -> None:
        """Called by all ranks before the first bucket of exchange ``step``; compares if it is its turn.

        Raises:
            RuntimeError: On all ranks at once: a parameter differs. Names the first one, the step and the ranks.
        """
        if step % self._every:
            return
        names, parameters = zip(*self._module.named_parameters(), strict=True)
        mine = torch.stack([checksum(parameter) for parameter in parameters])
        ranks = dist.get_world_size(self._group)
        gathered = mine.new_empty(ranks * len(mine))
        collective = AllGather(mine, gathered)
        self._stats.count_wire(collective, dist.get_rank(self._group), ranks)
        collective.start(self._group).wait()
        differs = (gathered.view(ranks, -1) != gathered[: len(mine)]).cpu()
        if differs.any():
            first = int(differs.any(0).nonzero()[0])
            others = differs[:, first].nonzero().flatten().tolist()
            raise RuntimeError(
                f"lightning-compress: verify_every={self._every} found at step {step} that the ranks do not hold the same "
                f"parameters any more: {names[first]!r} differs from rank 0's on rank {', '.join(map(str, others))} "
                f"({int(differs.any(0).sum())} of {len(names)} parameters differ). Something outside the exchange has "
                "changed them on some ranks only: an optimizer or callback that runs on one rank, weights loaded on one "
                "rank after the model was wrapped, or parameters that were frozen when it was wrapped."
            )


def checksum(tensor: Tensor) -> Tensor:
    """64 bits that tell whether two tensors have the same bits; any single differing element is always noticed.

    Every word is mixed with its place by a one-to-one function, and the results are summed modulo 2^64.

    Args:
        tensor: Any shape, strides, dtype.

    Returns:
        int64, 0-dim, on the tensor's device.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(width)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _PIECE):
        word = bits[start : start + _PIECE].to(torch.int64)
        word ^= torch.arange(start + 1, start + 1 + len(word), device=word.device) * _GOLDEN
        for factor in _MIX:
            word ^= (word >> 33) & 0x7FFFFFFF  # torch shifts the sign in
            word *= factor
        total += word.sum()
    return total

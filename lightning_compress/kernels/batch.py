"""What is coded in one go: a table of blocks with everything that belongs to them, the same for all backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryView:
    """One exchange's access to a memory's flat store.

    Attributes:
        state: The store, float32 or float64; empty without a memory.
        read: Added to a block's state offset when it is read, int64 [parameters of the bucket].
        write: The same when it is written.
        compensate: Whether the state is added to the gradient before encoding.
        update: Whether what encoding left out becomes the new state.
    """

    state: Tensor
    read: Tensor
    write: Tensor
    compensate: bool
    update: bool

    def get(self, parameter: int, offset: int, numel: int) -> Tensor:
        """What is read of a parameter of the bucket, whose part of the store begins at ``offset``: [numel]."""
        if not self.read.is_cuda:
            return self.state.narrow(0, offset + int(self.read[parameter]), numel)
        # which copy it is, only the device knows
        return self.state[torch.arange(offset, offset + numel, device=self.read.device) + self.read[parameter]]

    @classmethod
    def nothing(cls, values: Tensor) -> MemoryView:
        """Nothing is added to ``values`` and nothing is kept."""
        offsets = torch.empty(0, dtype=torch.int64, device=values.device)
        return cls(values.new_empty(0, dtype=real(values)), offsets, offsets, compensate=False, update=False)


@dataclass(frozen=True)
class EncodeBatch:
    """Blocks to encode, p = weight * (values + scale * state); state <- (p - decode(payload)) / (weight * scale).

    Attributes:
        values: Flat gradients, any floating dtype.
        memory: Where the residual is.
        payload: uint8, zeros on entry; the table says where each block goes.
        table: Block table, int64 [n, COLUMNS].
        status: uint8 per parameter; blocks of parameters that are not PRESENT are left out. A parameter whose p is not
            finite is set to NONFINITE here, and its non-finite blocks leave no trace in the memory.
        shared: float32 [n]: scale statistic of each block's whole tensor, or None: every block takes its own.
        weight: 1, or 1 / world size where the exchange adds up payloads.
        scale: The loss scale of ``values``; a tensor of one element stays on its device.
        salt: Counter of the random numbers.
    """

    values: Tensor
    memory: MemoryView
    payload: Tensor
    table: Tensor
    status: Tensor
    shared: Tensor | None
    weight: float
    scale: float | Tensor
    salt: int


@dataclass(frozen=True)
class DecodeBatch:
    """Blocks to decode: out = weight * sum of the ranks' decoded blocks.

    Attributes:
        payload: uint8: the payloads of all ranks, one every ``stride`` bytes.
        stride: In bytes; of no meaning for one rank.
        ranks: How many payloads.
        out: Bucket or shard, flat, any floating dtype.
        table: Block table, int64 [n, COLUMNS].
        status: uint8 per parameter: blocks of ABSENT ones leave ``out`` alone, those of NONFINITE ones become NaN.
        weight: A factor.
        salt: Counter of the random numbers.
    """

    payload: Tensor
    stride: int
    ranks: int
    out: Tensor
    table: Tensor
    status: Tensor
    weight: float
    salt: int


def real(values: Tensor) -> torch.dtype:
    """The type in which values are coded: half precision in float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32

"""The collectives of the exchanges as values: what travels, how to start it, and how many bytes that is on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

# renamed in torch 2.14, the old name warns there
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Level = Literal["world", "node", "nodes"]
"""Among whom a collective runs: all ranks, those of one node, or those with the same place in every node."""


class Work(Protocol):
    """What has been issued, such as a ``dist.Work``."""

    def wait(self) -> Any:
        """Returns when it is done; raises what went wrong."""


@dataclass(kw_only=True)
class Collective(ABC):
    """One collective of one rank; ``start`` issues it on a process group and returns the work to wait for."""

    level: Level = "world"

    @abstractmethod
    def start(self, group: dist.ProcessGroup) -> Work:
        """Issues the collective without waiting."""

    @abstractmethod
    def wire_bytes(self, rank: int, world_size: int) -> tuple[Fraction, Fraction]:
        """Bytes that this rank puts on and takes from the wire; its own part never travels."""


@dataclass
class AllReduce(Collective):
    """Sum over the ranks, in place; a ring moves 2 (N - 1) / N of the tensor. Sparse tensors are gathered instead."""

    tensor: Tensor

    @override
    def start(self, group: dist.ProcessGroup) -> Work:
        return dist.all_reduce(self.tensor, group=group, async_op=True)

    @override
    def wire_bytes(self, rank: int, world_size: int) -> tuple[Fraction, Fraction]:
        if self.tensor.is_sparse:
            parts = (self.tensor._indices(), self.tensor._values())
            sent = Fraction((world_size - 1) * sum(part.numel() * part.element_size() for part in parts))
        else:
            sent = Fraction(2 * (world_size - 1) * self.tensor.numel() * self.tensor.element_size(), world_size)
        return sent, sent


@dataclass
class AllGather(Collective):
    """Everybody's ``send`` [n], one after the other in ``receive`` [N * n]."""

    send: Tensor
    receive: Tensor

    @override
    def start(self, group: dist.ProcessGroup) -> Work:
        # among more ranks gloo's ring sends to one and receives from another: both directions are used at once
        if self.send.is_cpu and dist.get_world_size(group) == 2:
            return Messages([self.send] * 2, _rows(self.receive, 2), group)
        return _all_gather_single(self.receive, self.send, group=group, async_op=True)  # type: ignore[return-value]

    @override
    def wire_bytes(self, rank: int, world_size: int) -> tuple[Fraction, Fraction]:
        sent = Fraction((world_size - 1) * self.send.numel() * self.send.element_size())
        return sent, sent


@dataclass
class AllToAll(Collective):
    """Part r of ``send`` goes to rank r; ``receive`` gets one equally long part from every rank."""

    send: Tensor
    receive: Tensor
    splits: list[int]
    """Elements of ``send`` for every rank."""

    @override
    def start(self, group: dist.ProcessGroup) -> Work:
        ranks = len(self.splits)
        if self.send.is_cpu:
            return Messages(self.send.split(self.splits), _rows(self.receive, ranks), group)
        return dist.all_to_all_single(  # type: ignore[return-value]  # async_op gives a Work
            self.receive, self.send, [self.receive.numel() // ranks] * ranks, self.splits, group=group, async_op=True
        )

    @override
    def wire_bytes(self, rank: int, world_size: int) -> tuple[Fraction, Fraction]:
        size = self.send.element_size()
        received = self.receive.numel() * (world_size - 1) // world_size
        return Fraction((self.send.numel() - self.splits[rank]) * size), Fraction(received * size)


class Messages:
    """One message to and one from every other rank; what a rank sends to itself is copied.

    Gloo has one connection for both directions between two ranks, and tells over it what a rank is ready to receive. Its own
    all-to-all sends first: the readiness then waits behind the message, and the other direction until that has arrived, at
    half the speed of the link. Here receives come first.

    Args:
        sends: What each rank is sent.
        receives: Where what each rank sends is put.
        group: Whose ranks these are.
    """

    def __init__(self, sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), len(sends)
        others = [(rank + distance) % ranks for distance in range(1, ranks)]
        self._works = [group.recv([receives[peer]], peer, 0) for peer in reversed(others) if receives[peer].numel()]
        self._works += [group.send([sends[peer]], peer, 0) for peer in others if sends[peer].numel()]
        receives[rank].copy_(sends[rank])

    def wait(self) -> None:
        """Returns when all have arrived and have been sent."""
        while self._works:  # gloo counts: who waits twice for one message waits for another
            self._works.pop(0).wait()


def _rows(flat: Tensor, count: int) -> tuple[Tensor, ...]:
    return flat.view(count, flat.numel() // count).unbind()


def perform(collectives: list[Collective]) -> None:
    """Carries out one collective of N simulated ranks inside one process; item r belongs to rank r."""
    first = collectives[0]
    if isinstance(first, AllReduce):
        # summed in rank order, as one rank after the other adds its part
        tensors = [c.tensor for c in collectives if isinstance(c, AllReduce)]
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
    elif isinstance(first, AllGather):
        gathered = [c for c in collectives if isinstance(c, AllGather)]
        everything = torch.cat([c.send for c in gathered])
        for gather in gathered:
            gather.receive.copy_(everything)
    else:
        exchanged = [c for c in collectives if isinstance(c, AllToAll)]
        parts = [c.send.split(c.splits) for c in exchanged]
        for rank, c in enumerate(exchanged):
            c.receive.copy_(torch.cat([part[rank] for part in parts]))

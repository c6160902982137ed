"""Which ranks share a machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_compress.exchange.collectives import Level


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group of ranks; every node has equally many of them.

    Attributes:
        members: The ranks of every node, as numbers inside the group.
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def alone(cls, world_size: int) -> Nodes:
        """Every rank is a node of its own."""
        return cls(tuple((rank,) for rank in range(world_size)))

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Nodes:
        """From the name of every rank's node.

        Raises:
            ValueError: Some nodes have more ranks than others.
        """
        members: dict[Hashable, tuple[int, ...]] = {}
        for rank, name in enumerate(names):
            members[name] = (*members.get(name, ()), rank)
        sizes = [len(ranks) for ranks in members.values()]
        if len(set(sizes)) > 1:
            raise _unequal(sizes)
        return cls(tuple(members.values()))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @property
    def size(self) -> int:
        """Ranks per node."""
        return len(self.members[0])

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.count * self.size

    @property
    def nested(self) -> bool:
        """Whether there are several nodes with several ranks each."""
        return self.count > 1 and self.size > 1

    def peers(self, level: Level, rank: int) -> list[int]:
        """The ranks that take part in ``rank``'s collectives of a level, itself included, as process groups order them."""
        if level == "world":
            return list(range(self.world_size))
        node = next(ranks for ranks in self.members if rank in ranks)
        if level == "node":
            return list(node)
        return sorted(ranks[node.index(rank)] for ranks in self.members)

    def position(self, level: Level, rank: int) -> tuple[int, int]:
        """``rank``'s number among its peers of a level, and how many they are."""
        peers = self.peers(level, rank)
        return peers.index(rank), len(peers)


def find_nodes(group: dist.ProcessGroup, ranks_per_node: int | None = None) -> Nodes:
    """Asks all ranks of ``group`` where they are; called on all of them.

    Args:
        group: The model's process group.
        ranks_per_node: Where the launcher is known; None: torchrun's LOCAL_WORLD_SIZE, or else the name of the host.

    Raises:
        ValueError: Some nodes have more ranks than others.
    """
    told = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    mine = (told, dist.get_rank() // told if told else socket.gethostname())
    everyone: list[tuple[int, Hashable]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    sizes = [size for size, _ in everyone]
    if len(set(sizes)) > 1:
        raise _unequal(sizes)
    return Nodes.of([name for _, name in everyone])


def _unequal(sizes: Sequence[int]) -> ValueError:
    return ValueError(
        f"exchange='hierarchical' needs as many ranks on every node, these have {', '.join(map(str, sorted(set(sizes))))}: "
        "start equally many (torchrun --nproc-per-node, Trainer(devices=...)), or use exchange='two_way'."
    )

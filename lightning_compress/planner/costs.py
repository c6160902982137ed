"""What a method costs on this device: its own code, run over the model's buckets, with the network left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllGather, AllToAll, Collective, Level
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.topology import Steps
from lightning_compress.planner.methods import Method, MethodOnOneRank
from lightning_compress.planner.profile import Bucket, Profile
from lightning_compress.planner.sample import quantile

_REPEATS = 3


@dataclass(frozen=True)
class Message:
    """A collective of one bucket: what it is, the bytes that this rank puts on the wire, and among whom."""

    kind: type[Collective]
    sent: float
    level: Level = "world"


@dataclass(frozen=True)
class BucketCost:
    """One bucket under one method.

    Attributes:
        stages: Seconds of each stage in every repetition: encode, (owner,) decode.
        messages: What travels between two stages.
    """

    stages: tuple[tuple[float, ...], ...]
    messages: tuple[Message, ...]

    def at(self, share: float) -> tuple[float, ...]:
        """The quantile ``share`` of every stage."""
        return tuple(quantile(repetitions, share) for repetitions in self.stages)

    def mixed(self, other: BucketCost, share: float) -> BucketCost:
        """The cost if the part ``share`` of the bucket is treated as in ``other``, which has the same stages."""

        def between(mine: float, its: float) -> float:
            return mine + share * (its - mine)

        stages = tuple(tuple(map(between, mine, its)) for mine, its in zip(self.stages, other.stages, strict=True))
        messages = tuple(
            replace(mine, sent=between(mine.sent, its.sent))
            for mine, its in zip(self.messages, other.messages, strict=True)
        )
        return BucketCost(stages, messages)


def measure_costs(
    method: Method,
    module: torch.nn.Module,
    profile: Profile,
    rank: int,
    nodes: Nodes,
    advance: Callable[[str], None] = lambda _: None,
) -> list[BucketCost]:
    """Runs one rank's part of an exchange over random gradients of the model's buckets.

    All other ranks are taken to have sent what this one has: their bytes are decoded as in training.

    Args:
        method: The method.
        module: The model; takes memories of its size meanwhile.
        profile: Its buckets and device.
        rank: This rank.
        nodes: Where all ranks are; the others need not exist.
        advance: Told of each repetition.
    """
    exchange = MethodOnOneRank(method, module, rank, nodes)
    rounds = []
    for repeat in range(_REPEATS + 1):
        measured = [_measure(exchange, bucket, profile.device, rank, nodes) for bucket in profile.buckets]
        if repeat:  # the first one compiles, and fills the residual
            rounds.append(measured)
        advance(method.name)
    return [_collect(repetitions) for repetitions in zip(*rounds, strict=True)]


def _collect(repetitions: Sequence[BucketCost]) -> BucketCost:
    stages = zip(*(cost.stages for cost in repetitions), strict=True)
    return BucketCost(tuple(tuple(s for (s,) in stage) for stage in stages), repetitions[0].messages)


@torch.no_grad()
def _measure(exchange: MethodOnOneRank, bucket: Bucket, device: torch.device, rank: int, nodes: Nodes) -> BucketCost:
    generator = torch.Generator(device).manual_seed(0)  # a training's random numbers stay as they are
    buffer = torch.randn(bucket.numel, dtype=bucket.dtype, device=device, generator=generator).mul_(1e-3)
    steps: Steps = exchange.steps(bucket, buffer)
    stages: list[tuple[float]] = []
    messages: list[Message] = []
    while True:
        start = _now(device)
        collective = next(steps, None)
        stages.append((_now(device) - start,))
        if collective is None:
            return BucketCost(tuple(stages), tuple(messages))
        place, peers = nodes.position(collective.level, rank)
        messages.append(Message(type(collective), float(collective.wire_bytes(place, peers)[0]), collective.level))
        answer(collective, place, peers)


def answer(collective: Collective, place: int, peers: int) -> None:
    """What would have arrived if all peers had sent the same."""
    if isinstance(collective, AllGather):
        collective.receive.view(peers, -1).copy_(collective.send.expand(peers, -1))
    elif isinstance(collective, AllToAll):
        mine: Tensor = collective.send.split(collective.splits)[place]
        collective.receive.view(peers, -1).copy_(mine.expand(peers, -1))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

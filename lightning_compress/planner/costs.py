"""What a method costs on this device: its own code, run over the model's buckets, with the network left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllGather, AllToAll, Collective
from lightning_compress.exchange.topology import Steps
from lightning_compress.planner.methods import MethodOnOneRank
from lightning_compress.planner.profile import Bucket, Profile
from lightning_compress.planner.sample import quantile

_REPEATS = 3


@dataclass(frozen=True)
class Message:
    """A collective of one bucket: what it is, and the bytes that this rank puts on the wire."""

    kind: type[Collective]
    sent: float


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


def measure_costs(
    name: str,
    module: torch.nn.Module,
    profile: Profile,
    rank: int,
    world_size: int,
    advance: Callable[[str], None] = lambda _: None,
) -> list[BucketCost]:
    """Runs one rank's part of an exchange over random gradients of the model's buckets.

    All other ranks are taken to have sent what this one has: their bytes are decoded as in training.

    Args:
        name: The method.
        module: The model; takes memories of its size meanwhile.
        profile: Its buckets and device.
        rank: This rank.
        world_size: Of the exchange; the others need not exist.
        advance: Told of each repetition.
    """
    method = MethodOnOneRank(name, module, rank, world_size)
    rounds = []
    for repeat in range(_REPEATS + 1):
        measured = [_measure(method, bucket, profile.device, rank) for bucket in profile.buckets]
        if repeat:  # the first one compiles, and fills the residual
            rounds.append(measured)
        advance(name)
    return [_collect(repetitions) for repetitions in zip(*rounds, strict=True)]


def _collect(repetitions: Sequence[BucketCost]) -> BucketCost:
    stages = zip(*(cost.stages for cost in repetitions), strict=True)
    return BucketCost(tuple(tuple(s for (s,) in stage) for stage in stages), repetitions[0].messages)


@torch.no_grad()
def _measure(method: MethodOnOneRank, bucket: Bucket, device: torch.device, rank: int) -> BucketCost:
    generator = torch.Generator(device).manual_seed(0)  # a training's random numbers stay as they are
    buffer = torch.randn(bucket.numel, dtype=bucket.dtype, device=device, generator=generator).mul_(1e-3)
    steps: Steps = method.steps(bucket, buffer)
    stages: list[tuple[float]] = []
    messages: list[Message] = []
    while True:
        start = _now(device)
        collective = next(steps, None)
        stages.append((_now(device) - start,))
        if collective is None:
            return BucketCost(tuple(stages), tuple(messages))
        messages.append(Message(type(collective), float(collective.wire_bytes(rank, method.world_size)[0])))
        _answer(collective, rank, method.world_size)


def _answer(collective: Collective, rank: int, world_size: int) -> None:
    """What would have arrived if all ranks had sent the same."""
    if isinstance(collective, AllGather):
        collective.receive.view(world_size, -1).copy_(collective.send.expand(world_size, -1))
    elif isinstance(collective, AllToAll):
        mine: Tensor = collective.send.split(collective.splits)[rank]
        collective.receive.view(world_size, -1).copy_(mine.expand(world_size, -1))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""Measurements that nobody measured: their timelines can be worked out by hand."""

from __future__ import annotations

import torch

from lightning_compress.exchange.collectives import AllGather, AllReduce, AllToAll, Collective
from lightning_compress.planner.costs import BucketCost, Message
from lightning_compress.planner.link import GivenLink
from lightning_compress.planner.predict import Prediction
from lightning_compress.planner.profile import Bucket, Profile, StepTimes

LINK = GivenLink(bandwidth=1.0, latency=0.0, world_size=2)
"""One byte per second: bytes are seconds."""


def profile(*steps: StepTimes, device: str = "cpu", cores: float = 2.0) -> Profile:
    """Steps on a device with several cores, one of which backward uses."""
    buckets = tuple(Bucket((f"p{i}",), 4, torch.float32) for i in range(len(steps[0].ready)))
    return Profile(buckets, steps, torch.device(device), cores)


def cost(stages: tuple[float, ...], sent: tuple[float, ...] = ()) -> BucketCost:
    """A bucket with these seconds of computation, and bytes between them."""
    kinds: tuple[type[Collective], ...] = (AllReduce,) if len(sent) == 1 else (AllToAll, AllGather)
    messages = tuple(Message(kind, nbytes) for kind, nbytes in zip(kinds, sent, strict=True))
    return BucketCost(tuple((seconds,) for seconds in stages), messages)


def prediction(method: str, seconds: float, exposed: float = 0.0, spread: float = 0.0) -> Prediction:
    """A prediction without a timeline."""
    return Prediction(method, seconds, seconds - spread, seconds + spread, exposed, 1000)

"""Which tensors a method should compress: the fewest that hide the communication.

The rules are those of ByteComp and Espresso (arXiv 2205.14465): a large tensor saves more bytes for the same start-up costs, so
the largest comes first; of equally large ones that nearest to the output, whose exchange can hide behind most of the backward;
and what travels before a bubble, where the link waits for the backward, delays nobody and stays dense.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.costs import BucketCost, measure_costs
from lightning_compress.planner.link import Link
from lightning_compress.planner.methods import Choice
from lightning_compress.planner.predict import simulate
from lightning_compress.planner.profile import Profile
from lightning_compress.planner.timeline import Span

_DENSE = "bf16"
"""The code of what stays dense: the mildest that an exchange of payloads has."""
_INSTANT = 1e-9


@dataclass(frozen=True)
class LargeTensor:
    """A parameter that would be compressed by default.

    Attributes:
        name: Its name.
        numel: Its elements.
        bucket: Number of its bucket, in the order in which they become ready: from the output to the input.
    """

    name: str
    numel: int
    bucket: int


def fewest(
    tensors: Sequence[LargeTensor], timeline: Callable[[frozenset[str]], Sequence[Span]], limit: float
) -> frozenset[str]:
    """The names of the tensors to compress; all of them where fewer do not suffice.

    Args:
        tensors: All large ones.
        timeline: Simulates a step in which the named ones are compressed; its last span is the step's end.
        limit: Seconds that a step may take.
    """
    coded: frozenset[str] = frozenset()
    while (spans := timeline(coded))[-1].end > limit:
        first = after_last_bubble(spans)
        left = [tensor for tensor in tensors if tensor.name not in coded and tensor.bucket >= first]
        if not left:
            return frozenset(tensor.name for tensor in tensors)
        coded |= {max(left, key=lambda tensor: (tensor.numel, -tensor.bucket)).name}
    return coded


def after_last_bubble(spans: Sequence[Span]) -> int:
    """The first bucket behind the last bubble: at its start the link had nothing else to do, whatever travelled before."""
    transfers = [span for span in spans if span.task.kind == "link"]
    first, free = 0, 0.0
    for bucket in sorted({span.task.bucket for span in transfers}):
        own = [span for span in transfers if span.task.bucket == bucket]
        if own[0].start > free + _INSTANT:
            first = bucket
        free = max(free, *(span.end for span in own))
    return first


def rule_for(tensors: Sequence[LargeTensor], coded: Collection[str]) -> DenseRule | None:
    """The ``dense=`` argument that leaves all but the ``coded`` tensors dense; None if these are all: the default."""
    if len(coded) == len(tensors):
        return None
    smallest = min((tensor.numel for tensor in tensors if tensor.name in coded), default=math.inf)
    dense = [tensor for tensor in tensors if tensor.name not in coded]
    by_size = max((tensor.numel for tensor in dense if tensor.numel < smallest), default=DenseRule.max_numel)
    by_name = tuple(glob.escape(tensor.name) for tensor in dense if tensor.numel >= smallest)
    return DenseRule(_DENSE, by_size, by_name)


def large_tensors(module: torch.nn.Module, profile: Profile) -> list[LargeTensor]:
    """The parameters of a model that are not small, in the order in which their gradients become ready."""
    parameters, small = dict(module.named_parameters()), DenseRule()
    return [
        LargeTensor(name, parameters[name].numel(), number)
        for number, bucket in enumerate(profile.buckets)
        if not bucket.sparse
        for name in bucket.names
        if not small.matches(name, parameters[name].shape, parameters[name].numel())
    ]


def spare(
    choice: Choice,
    costs: Sequence[BucketCost],
    module: torch.nn.Module,
    profile: Profile,
    link: Link,
    limit: float,
    rank: int,
    nodes: Nodes,
) -> tuple[Choice, str]:
    """Leaves as many tensors dense as a step permits.

    Args:
        choice: The method, with all large tensors compressed.
        costs: Of ``choice``.
        module: The model.
        profile: Its steps.
        link: The network.
        limit: Seconds that a step may take.
        rank: This rank.
        nodes: Where all ranks are.

    Returns:
        The choice, and a sentence on it; none where nothing is compressed, or everything.
    """
    if not choice.compresses:
        return choice, ""
    tensors = large_tensors(module, profile)
    nothing = Choice(choice.method, DenseRule(_DENSE, patterns=("*",)))
    dense = measure_costs(nothing.as_run, module, profile, rank, nodes)

    def timeline(coded: frozenset[str]) -> list[Span]:
        mixed = [
            one.mixed(other, _share(tensors, coded, i)) for i, (one, other) in enumerate(zip(dense, costs, strict=True))
        ]
        return simulate(choice.as_run, profile, mixed, link)

    coded = fewest(tensors, timeline, limit)
    rule = rule_for(tensors, coded)
    said = f"Large tensors compressed: {len(coded)} of {len(tensors)}; the others travel in {_DENSE}." if rule else ""
    return Choice(choice.method, rule), said


def _share(tensors: Sequence[LargeTensor], coded: frozenset[str], bucket: int) -> float:
    """Of a bucket's large tensors, the part that is compressed."""
    inside = [tensor for tensor in tensors if tensor.bucket == bucket]
    return sum(t.numel for t in inside if t.name in coded) / max(1, sum(t.numel for t in inside))

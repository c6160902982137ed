"""Dense inside a node, compressed between the nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.exchange.collectives import AllGather, AllToAll, Collective
from lightning_compress.exchange.plan import ParameterSpec, Span
from lightning_compress.exchange.topology import BucketJob, Steps, Topology, planned_bytes
from lightning_compress.kernels import table as col

_ALIGNED = 8
"""Bytes: values of every format may begin there."""


class Hierarchical(Topology):
    """Any other exchange between the nodes, each of which acts as one worker.

    1. Reduce-scatter inside the node: each rank gets the dense sum of its shard (an all-to-all in the gradients' own format
       and a sum in float32: gloo has no reduce-scatter, and a sum in half precision would round). Who takes part travels
       along: a parameter takes part in a node if it does on any of its ranks.
    2. ``inner`` among the ranks with the same place in their nodes: they exchange the same shard.
    3. All-gather inside the node, in the gradients' own format.

    The shards are the same in every bucket layout (see ``plan.cut``), and so are the memories, which hold one shard each.

    Args:
        inner: The exchange of this rank's shard of the bucket; its rank is the node.
        shards: For every place in a node, the parts of the bucket's parameters, in the bucket's order.
        local: This rank's place in its node.
        world_size: Number of all ranks.
        dtype: Format of the bucket.
    """

    name = "hierarchical"

    def __init__(
        self,
        inner: Topology,
        shards: Sequence[Sequence[ParameterSpec]],
        local: int,
        world_size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(inner.plan, inner.rank, world_size, inner.device)
        self._inner, self._local, self._dtype = inner, local, dtype
        self._shards = shards
        self._numel = [sum(part.numel for part in shard) for shard in shards]
        self._head = _aligned(self.plan.header_nbytes)
        self._sections = [self._head + _aligned(numel * dtype.itemsize) for numel in self._numel]
        self._spans = list(_spans(shards))

    @override
    def planned(self) -> list[Collective]:
        ranks, mine, answer = len(self._shards), self._sections[self._local], max(self._sections)
        between = self._inner.planned()
        for collective in between:
            collective.level = "nodes"
        scatter = AllToAll(
            planned_bytes(sum(self._sections)), planned_bytes(mine * ranks), self._sections, level="node"
        )
        gather = AllGather(planned_bytes(answer), planned_bytes(answer * ranks), level="node")
        return [scatter, *between, gather]

    @override
    def run(self, job: BucketJob) -> Steps:
        ranks, mine, longest = len(self._shards), self._sections[self._local], max(self._sections)
        send, received = self._zeros(sum(self._sections)), self._empty(mine * ranks)
        with job.stats.time("encode", self.device):
            self._scatter(job, send)
        yield AllToAll(send, received, self._sections, level="node")
        with job.stats.time("encode", self.device):
            status = self._read_headers(received, ranks)
            shard = dataclasses.replace(job, buffer=self._sum(received), status=status, watch=None)
        for collective in self._inner.run(shard):
            collective.level = "nodes"
            yield collective
        answer, gathered = self._zeros(longest), self._empty(longest * ranks)
        with job.stats.time("decode", self.device):
            assert shard.seen is not None
            self._write_headers(answer, [0], shard.seen)
            self._values(answer, self._local).copy_(shard.buffer)
        yield AllGather(answer, gathered, level="node")
        with job.stats.time("decode", self.device):
            self._gather(job, gathered)

    def _scatter(self, job: BucketJob, send: Tensor) -> None:
        """Every place's section: who takes part, and its shard of this rank's gradients; zeros where no backward was."""
        buffer = job.buffer
        absent = job.status == col.ABSENT
        if self.device.type != "cpu" or bool(absent.any()):  # elsewhere a look at it would be a wait
            buffer = torch.cat([span.of(buffer).masked_fill(absent[span.index], 0.0) for span in self._spans])
        sections = send.split(self._sections)
        for local, section in enumerate(sections):
            self._write_headers(section, [0], job.status)
            torch.cat(list(self._pieces(buffer, local)), out=self._values(section, local))

    def _sum(self, received: Tensor) -> Tensor:
        """The node's mean of this rank's shard, added up in the order of the ranks."""
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        first, *others = (self._values(section, self._local) for section in received.chunk(len(self._shards)))
        total = first.to(wide, copy=True)
        for values in others:
            total += values
        return total.mul_(1.0 / len(self._shards))

    def _gather(self, job: BucketJob, gathered: Tensor) -> None:
        """Puts the node's shards together; what no rank's backward reached stays as it is."""
        buffer, ranks = job.buffer, len(self._shards)
        seen = self._read_headers(gathered, ranks)
        if job.watch is not None:  # a shard knows nothing of the others
            job.watch.look(self.plan.names, seen, job.step)
        sections = [self._values(section, local) for local, section in enumerate(gathered.chunk(ranks))]
        parts = [
            section.split([part.numel for part in shard]) for section, shard in zip(sections, self._shards, strict=True)
        ]
        pieces = [part for of_parameter in zip(*parts, strict=True) for part in of_parameter]
        if self.device.type == "cpu" and bool((seen == col.PRESENT).all()):
            torch.cat(pieces, out=buffer)
            return
        fresh = torch.cat(pieces)
        for span in self._spans:
            old, new = span.of(buffer), span.of(fresh)
            new = new.masked_fill(seen[span.index] == col.NONFINITE, torch.nan)
            old.copy_(torch.where(seen[span.index] == col.ABSENT, old, new))

    def _values(self, section: Tensor, local: int) -> Tensor:
        """The gradients in a section of the place ``local``."""
        return section[self._head : self._head + self._numel[local] * self._dtype.itemsize].view(self._dtype)

    def _pieces(self, buffer: Tensor, local: int) -> Iterator[Tensor]:
        """The parts of a bucket that make up a shard."""
        for span, part in zip(self._spans, self._shards[local], strict=True):
            yield span.of(buffer)[part.first : part.first + part.numel]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _spans(shards: Sequence[Sequence[ParameterSpec]]) -> Iterator[Span]:
    """Where whole parameters lie in the bucket."""
    first = 0
    for index, parts in enumerate(zip(*shards, strict=True)):
        numel = sum(part.numel for part in parts)
        yield Span(index, first, numel, parts[0].dense)
        first += numel

"""What a collective costs: measured on a real process group, or computed for a link that a user names."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_compress.exchange.collectives import AllGather, AllReduce, AllToAll, Collective, Level
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.sample import quantile

_PARTS: dict[Level, str] = {"node": "inside a node", "nodes": "between nodes"}
KINDS: tuple[type[Collective], ...] = (AllReduce, AllGather, AllToAll)
_SIZES = tuple(2**power for power in (12, 15, 18, 20, 22, 24))
"""Bytes of the tensors that are sent to and fro."""
_REPEATS = 4
_LONG = 0.4
"""Seconds of one collective after which no larger one is tried: time grows with size from here on."""


@dataclass(frozen=True)
class Hop:
    """One collective.

    Attributes:
        seconds: From its start to its end, with nobody else on the link.
        host: Seconds of one core for moving the bytes; 0 where the device does that itself.
    """

    seconds: float
    host: float = 0.0


class Link(ABC):
    """Costs of collectives among ``world_size`` ranks."""

    world_size: int

    @abstractmethod
    def hop(self, kind: type[Collective], sent: float, at: float = 0.5, level: Level = "world") -> Hop:
        """The cost of a collective.

        Args:
            kind: Its class.
            sent: Bytes that a rank puts on the wire.
            at: Quantile of the measurements: 0.25 a good one, 0.75 a bad one.
            level: Among whom.
        """

    @abstractmethod
    def describe(self) -> str:
        """In one line."""


@dataclass(frozen=True)
class GivenLink(Link):
    """A link that is named, not measured: latency per message plus bytes over bandwidth, one rank per node.

    A rank receives while it sends, at the same speed. Rings (all-reduce, all-gather) send one message after the other:
    2 (N - 1) and N - 1 of them. An all-to-all sends all of its messages at once.

    Args:
        bandwidth: Bytes per second that a rank can send.
        latency: Seconds until the first byte of a message is there.
        world_size: Number of ranks.
        host: Seconds of a core per byte that is sent and received (see ``host_cost``).
    """

    bandwidth: float
    latency: float
    world_size: int
    host: float = 0.0

    @override
    def hop(self, kind: type[Collective], sent: float, at: float = 0.5, level: Level = "world") -> Hop:
        messages = {AllReduce: 2 * (self.world_size - 1), AllGather: self.world_size - 1}.get(kind, 1)
        return Hop(messages * self.latency + sent / self.bandwidth, sent * self.host)

    @override
    def describe(self) -> str:
        return f"given: {_bits(self.bandwidth)}, {1e6 * self.latency:.0f} us, {self.world_size} ranks"


@dataclass
class Sample:
    """One size of one collective: the repetitions' seconds, each that of the slowest rank, and this rank's core seconds."""

    sent: float
    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MeasuredLink(Link):
    """A link as it was measured, interpolated between the sizes.

    Args:
        world_size: Number of ranks.
        samples: By collective, in the order of their sizes.
        parts: The links inside a node and between nodes, where both exist; measured while all nodes, or all places in
            them, do the same: what they share is shared.
    """

    world_size: int
    samples: Mapping[type[Collective], Sequence[Sample]]
    parts: Mapping[Level, MeasuredLink] = field(default_factory=dict)

    @override
    def hop(self, kind: type[Collective], sent: float, at: float = 0.5, level: Level = "world") -> Hop:
        if level in self.parts:
            return self.parts[level].hop(kind, sent, at)
        samples = self.samples[kind]
        seconds = _interpolate([(s.sent, quantile(s.seconds, at)) for s in samples], sent)
        return Hop(seconds, _interpolate([(s.sent, quantile(s.host, 0.5)) for s in samples], sent))

    @override
    def describe(self) -> str:
        parts = "".join(f"; {_PARTS[level]}: {part._summary()}" for level, part in self.parts.items())
        return f"measured: {self._summary()}, {self.world_size} ranks{parts}"

    def _summary(self) -> str:
        samples = self.samples[AllReduce]
        latency = quantile(samples[0].seconds, 0.5)
        return f"all-reduce at {_bits(samples[-1].sent / quantile(samples[-1].seconds, 0.5))}, at least {1e6 * latency:.0f} us"


def measure_link(
    group: dist.ProcessGroup, device: torch.device, nodes: Nodes, advance: Callable[[str], None] = lambda _: None
) -> MeasuredLink:
    """Sends messages of several sizes around; called on all ranks of ``group``, which must be idle.

    Where several ranks share each of several nodes, the links inside and between nodes are measured too.

    Args:
        group: The ranks.
        device: Where the tensors are.
        nodes: Where they are.
        advance: Told what was measured.
    """
    samples = {kind: _measure(kind, group, group, device, advance) for kind in KINDS}
    parts: dict[Level, MeasuredLink] = {}
    for level in _PARTS if nodes.nested else ():
        peers = nodes.peers(level, dist.get_rank(group))
        members = [dist.get_process_group_ranks(group)[peer] for peer in peers]
        among: Any = dist.new_group(members, use_local_synchronization=True)
        parts[level] = MeasuredLink(len(peers), {kind: _measure(kind, among, group, device, advance) for kind in KINDS})
        dist.destroy_process_group(among)
    return MeasuredLink(nodes.world_size, samples, parts)


def host_cost(nbytes: int = 2**25) -> float:
    """Core seconds that the system takes per byte sent and received: a message to ourselves over a socket."""
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    before = time.process_time()
    thread = threading.Thread(target=_send, args=(sender, nbytes))
    with server, sender, receiver:
        thread.start()
        into, left = bytearray(2**20), nbytes
        while left > 0:
            left -= receiver.recv_into(into)
        thread.join()
    return (time.process_time() - before) / nbytes


def _send(to: socket.socket, nbytes: int) -> None:
    payload = bytearray(2**20)
    for _ in range(nbytes // len(payload)):
        to.sendall(payload)


def _measure(
    kind: type[Collective],
    group: dist.ProcessGroup,
    everyone: dist.ProcessGroup,
    device: torch.device,
    advance: Callable[[str], None],
) -> list[Sample]:
    """The collective in ``group``, at the same time as in the other groups that ``everyone`` consists of."""
    samples: list[Sample] = []
    for size in _SIZES:
        collective = _example(kind, size, dist.get_world_size(group), device)
        sent = float(collective.wire_bytes(dist.get_rank(group), dist.get_world_size(group))[0])
        sample = Sample(sent)
        for repeat in range(_REPEATS + 1):
            dist.barrier(everyone)
            seconds, host = _timed(collective, group, device)
            slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=everyone)
            if repeat:  # the first one connects
                sample.seconds.append(float(slowest))
                sample.host.append(min(host, seconds))
        samples.append(sample)
        advance(f"link: {kind.__name__} of {size} bytes")
        if min(sample.seconds) > _LONG:
            break
    return samples


def _example(kind: type[Collective], nbytes: int, world_size: int, device: torch.device) -> Collective:
    if kind is AllReduce:
        return AllReduce(torch.zeros(nbytes // 4, device=device))
    part = max(1, nbytes // world_size)
    whole = torch.zeros(part * world_size, dtype=torch.uint8, device=device)
    if kind is AllGather:
        return AllGather(whole[:part].clone(), whole)
    return AllToAll(whole.clone(), whole, [part] * world_size)


def _timed(collective: Collective, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    start, host = time.perf_counter(), time.process_time()
    collective.start(group).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter() - start, 0.0
    return time.perf_counter() - start, time.process_time() - host


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between the points in straight lines; beyond the last one as between the last two, before the first one constant."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    between = next((pair for pair in pairwise(points) if x <= pair[1][0]), points[-2:])
    (x0, y0), (x1, y1) = between
    return y0 + max(0.0, y1 - y0) / (x1 - x0) * (x - x0)


def _bits(nbytes: float) -> str:
    """A bandwidth in bits per second."""
    bits = 8 * nbytes
    unit, name = next((u, n) for u, n in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"), (0.0, "b/s")) if bits >= u)
    return f"{bits / (unit or 1):.3g} {name}"

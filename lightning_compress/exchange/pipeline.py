"""Runs exchanges so that compression, communication and backward overlap, in the same order on every rank.

An exchange is a generator of collectives (see ``topology``). On the CPU its stages run in ordered threads: stage i
resumes the generator for the (i+1)-th time and issues the collective that comes out on a group of stage i. Each group is
used by one thread only, and every queue is first in, first out: all ranks issue the same collectives in the same order by
construction. (Chaining collectives in future callbacks is what kills torch's PowerSGD hook on gloo.) On CUDA everything is
enqueued from the calling thread on side streams, and nothing waits for the device.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_compress.exchange.collectives import Collective, Level, Work
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import Steps

Groups = Mapping[Level, dist.ProcessGroup]


@dataclass
class Exchange:
    """One bucket on its way through the pipeline.

    Attributes:
        steps: The exchange.
        buffer: What the future will hold.
        future: What DDP waits for.
        label: Names step, bucket and rank in an error.
        stats: Counts the bytes of each collective.
        work: The collective that is under way.
    """

    steps: Steps
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    label: str
    stats: ExchangeStats
    work: Work | None = None


class Pipeline(ABC):
    """Carries exchanges; ``submit`` returns at once, ``close`` ends it.

    After an error nothing more is issued, and all further exchanges fail with that error: a later bucket's collective would
    meet the failed bucket's on the other ranks.
    """

    def __init__(self, groups: list[Groups]) -> None:
        self._groups = groups
        self._failure: RuntimeError | None = None

    @abstractmethod
    def submit(self, exchange: Exchange) -> None:
        """Starts an exchange; its future is completed whatever happens."""

    def future(self) -> torch.futures.Future[Tensor]:
        """A future that this pipeline can complete."""
        return torch.futures.Future()

    @abstractmethod
    def close(self) -> None:
        """Ends the pipeline; no collective runs in here."""

    def _issue(self, collective: Collective, stage: int, stats: ExchangeStats) -> Work:
        group = self._groups[stage][collective.level]
        stats.count_wire(collective, dist.get_rank(group), dist.get_world_size(group))
        return collective.start(group)

    def _fail(self, exchange: Exchange, error: BaseException) -> None:
        """Notes the first error. DDP shows only the text of an exception: it must say where it happened."""
        if self._failure is None:
            where = f"lightning-compress: the exchange of {exchange.label} failed"
            self._failure = RuntimeError(f"{where}: {type(error).__name__}: {error}")
            self._failure.__cause__ = error


class ThreadPipeline(Pipeline):
    """The CPU pipeline: one thread more than there are groups.

    Args:
        groups: For each collective of an exchange, in their order, a process group of each level it may run at.
    """

    _PATIENCE = 5.0
    """Seconds to wait for the threads at the end; one that waits for a lost peer is left behind."""

    def __init__(self, groups: list[Groups]) -> None:
        super().__init__(groups)
        self._queues: list[queue.SimpleQueue[Exchange | None]] = [queue.SimpleQueue() for _ in range(len(groups) + 1)]
        # daemons: a process that dies of an error elsewhere must not wait for a peer that is gone
        self._threads = [
            threading.Thread(target=self._serve, args=(stage,), name=f"lightning-compress-{stage}", daemon=True)
            for stage in range(len(self._queues))
        ]
        for thread in self._threads:
            thread.start()

    @override
    def submit(self, exchange: Exchange) -> None:
        self._queues[0].put(exchange)

    @override
    def close(self) -> None:
        self._queues[0].put(None)
        deadline = time.monotonic() + self._PATIENCE
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    @torch.no_grad()  # grad mode is a property of the thread
    def _serve(self, stage: int) -> None:
        while (exchange := self._queues[stage].get()) is not None:
            try:
                if self._failure is None:
                    self._advance(exchange, stage)
                    continue
            except BaseException as error:
                self._fail(exchange, error)
            # a future that is never completed would hang backward for ever
            exchange.future.set_exception(self._failure)  # type: ignore[arg-type]  # torch annotates it with the result's type

        if stage + 1 < len(self._queues):
            self._queues[stage + 1].put(None)  # behind everything that is still to come from here

    def _advance(self, exchange: Exchange, stage: int) -> None:
        if exchange.work is not None:
            with exchange.stats.time("wait", torch.device("cpu")):
                exchange.work.wait()
        collective = next(exchange.steps, None)
        if collective is None:
            exchange.future.set_result(exchange.buffer)
            return
        exchange.work = self._issue(collective, stage, exchange.stats)
        self._queues[stage + 1].put(exchange)


class StreamPipeline(Pipeline):
    """The CUDA pipeline: a few side streams in turn, one communicator, everything issued by the calling thread.

    Args:
        groups: One communicator for each level; used at once, they would have to be ordered among each other.
        device: The device of the buckets.
    """

    _STREAMS = 3

    def __init__(self, groups: Groups, device: torch.device) -> None:
        super().__init__([groups])
        self._device = device
        count = self._STREAMS if len(groups) == 1 else 1
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._next = 0

    @override
    def future(self) -> torch.futures.Future[Tensor]:
        return torch.futures.Future(devices=[self._device])

    @override
    @torch.no_grad()
    def submit(self, exchange: Exchange) -> None:
        if self._failure is not None:
            exchange.future.set_exception(self._failure)  # type: ignore[arg-type]
            return
        stream = self._streams[self._next]
        self._next = (self._next + 1) % len(self._streams)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        exchange.buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            try:
                for collective in exchange.steps:
                    work = self._issue(collective, 0, exchange.stats)
                    with exchange.stats.time("wait", self._device):
                        work.wait()  # the stream waits, the host does not
                exchange.future.set_result(exchange.buffer)
            except BaseException as error:
                self._fail(exchange, error)
                exchange.future.set_exception(self._failure)  # type: ignore[arg-type]

    @override
    def close(self) -> None:
        pass  # nothing runs here but streams


def make_pipeline(
    device: torch.device, stages: Sequence[Sequence[Level]], new_group: Callable[[Level], dist.ProcessGroup]
) -> Pipeline:
    """The pipeline for ``device``.

    Args:
        device: The device of the buckets.
        stages: The levels at which each collective of an exchange may run.
        new_group: Makes this rank's process group of a level; called alike on all ranks.
    """
    if device.type == "cuda":
        return StreamPipeline({level: new_group(level) for level in dict.fromkeys(chain(*stages))}, device)
    return ThreadPipeline([{level: new_group(level) for level in levels} for levels in stages])

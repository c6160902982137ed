"""What the exchange has sent and how long it took: counted where it happens, read by ``stats()``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllReduce, Collective

Stage = Literal["encode", "decode", "wait"]
_STAGES: tuple[Stage, ...] = ("encode", "decode", "wait")


class ExchangeStats:
    """Totals of one rank, and the same of the last step. Safe to use from the pipeline's threads."""

    def __init__(self) -> None:
        self.steps = 0
        self._skipped: Tensor | int = 0
        self._lock = threading.Lock()
        self._total = _Tally()
        self._last = _Tally()
        self._buffers = Fraction(0)
        self._events: list[tuple[Stage, torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Called before the first bucket of a step."""
        with self._lock:
            self.steps += 1
            self._last = _Tally()
            buffers, self._buffers = self._buffers, Fraction(0)
        self._add(buffers=buffers)

    def count_skipped(self, skipped: Tensor | bool) -> None:
        """Notes whether the loss scaler has skipped a step; on CUDA the count stays on the device until it is read."""
        with self._lock:
            self._skipped = self._skipped + skipped

    def count_dense(self, buffer: Tensor, world_size: int) -> None:
        """Notes a bucket that plain DDP would have all-reduced."""
        self._add(dense=AllReduce(buffer).wire_bytes(0, world_size)[0])

    def count_buffers(self, nbytes: int) -> None:
        """Notes a broadcast of buffers by DDP itself: of a forward, whose step is yet to begin."""
        with self._lock:
            self._buffers += nbytes

    def count_wire(self, collective: Collective, rank: int, world_size: int) -> None:
        """Notes a collective at the moment it is handed to the process group of ``world_size`` ranks, as their ``rank``."""
        sent, received = collective.wire_bytes(rank, world_size)
        self._add(sent=sent, received=received, between=Fraction(0) if collective.level == "node" else sent)

    @contextmanager
    def time(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Times a stage; on CUDA by events, which are read when the figures are."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._add(**{stage: time.perf_counter() - start})
            return
        first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        second.record()
        with self._lock:
            self._events.append((stage, first, second))

    def last_bytes(self) -> tuple[int, int]:
        """Bytes sent in the last step, and those that dense DDP would have sent."""
        with self._lock:
            return round(self._last.sent), round(self._last.dense)

    def as_dict(self) -> dict[str, Any]:
        """The figures under their public names; bytes are integers, times are seconds."""
        self._read_events()
        with self._lock:
            steps = {"steps": self.steps, "skipped_steps": int(self._skipped)}
            return {**steps, **self._total.as_dict(), "last": self._last.as_dict()}

    def _add(self, **amounts: Fraction | float) -> None:
        with self._lock:
            self._total.add(**amounts)
            self._last.add(**amounts)

    def _read_events(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for stage, first, second in events:
            second.synchronize()
            self._add(**{stage: first.elapsed_time(second) / 1000.0})

    def __getstate__(self) -> dict[str, Any]:
        self._read_events()
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


class _Tally:
    """One set of counters. Bytes are fractions: a ring's share of an odd buffer is not a whole number."""

    def __init__(self) -> None:
        self.sent = self.received = self.between = self.dense = self.buffers = Fraction(0)
        self.seconds = dict.fromkeys(_STAGES, 0.0)

    def add(self, **amounts: Fraction | float) -> None:
        for key, amount in amounts.items():
            if key in self.seconds:
                self.seconds[key] += float(amount)
            else:
                setattr(self, key, getattr(self, key) + amount)

    def as_dict(self) -> dict[str, Any]:
        return {
            "bytes_sent": round(self.sent),
            "bytes_received": round(self.received),
            "bytes_between_nodes": round(self.between),
            "dense_bytes": round(self.dense),
            "buffer_bytes": round(self.buffers),
            # nothing was sent because nobody else is there: nothing was compressed either
            "ratio": float(self.dense / self.sent) if self.sent else 1.0,
            **{f"{stage}_seconds": seconds for stage, seconds in self.seconds.items()},
        }

"""What a training step consists of without its exchange: forward, backward, and when each bucket becomes ready."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_compress.planner.sample import quantile


@dataclass(frozen=True)
class Bucket:
    """One of DDP's buckets.

    Attributes:
        names: Its parameters in its order.
        numel: Its elements; of a sparse gradient the values that there are.
        dtype: Their format.
        sparse: Whether it is the sparse gradient of an embedding, which no method compresses.
    """

    names: tuple[str, ...]
    numel: int
    dtype: torch.dtype
    sparse: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step.

    Attributes:
        before: Until the backward whose gradients are exchanged: the forward, and under accumulation the earlier batches.
        backward: That backward.
        after: What follows: the optimizer.
        ready: When each bucket became ready, from the backward's start.
    """

    before: float
    backward: float
    after: float
    ready: tuple[float, ...]

    @property
    def total(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return self.before + self.backward + self.after


@dataclass(frozen=True)
class Profile:
    """The measured steps of one model on one device.

    Attributes:
        buckets: In the order in which they become ready.
        steps: The measurements.
        device: Where the gradients are.
        cores: Processors that backward, compression and network share; 1 on an accelerator.
        threads: Of them, those that the backward uses.
    """

    buckets: tuple[Bucket, ...]
    steps: tuple[StepTimes, ...]
    device: torch.device
    cores: float = 1.0
    threads: float = 1.0

    def at(self, share: float) -> StepTimes:
        """The quantile ``share`` of every figure."""

        def of(values: Sequence[float]) -> float:
            return quantile(values, share)

        ready = tuple(of([step.ready[i] for step in self.steps]) for i in range(len(self.buckets)))
        before, backward = of([s.before for s in self.steps]), of([s.backward for s in self.steps])
        return StepTimes(before, max([backward, *ready]), of([s.after for s in self.steps]), ready)

    def scaled(self, factor: float) -> Profile:
        """The same model on a machine whose steps take ``factor`` times as long."""
        steps = tuple(
            StepTimes(s.before * factor, s.backward * factor, s.after * factor, tuple(factor * r for r in s.ready))
            for s in self.steps
        )
        return replace(self, steps=steps)


class StepRecorder:
    """Notes the times of training steps; call ``begin``, ``backward``, ``gradients`` and ``end`` in every step.

    On CUDA the marks are events, read only by ``profile``: nothing waits for the device in between.

    Args:
        device: Where the gradients are.
        names: The model's parameter names by the parameters' ``id``.
    """

    def __init__(self, device: torch.device, names: Mapping[int, str]) -> None:
        self._device, self._names = device, names
        self._steps: list[_Marks] = []

    def begin(self) -> None:
        """A step begins."""
        self._steps.append(_Marks(begin=self._mark()))

    def backward(self) -> None:
        """A backward begins; under accumulation the last one of a step counts, and after its end none does."""
        if self._ended:
            return
        self._steps[-1].backward = self._mark()
        self._steps[-1].ready = []

    def bucket(self, bucket: Any) -> None:
        """A ``GradBucket`` is ready."""
        if self._ended:
            return
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        buffer = bucket.buffer()
        numel = buffer._values().numel() if buffer.is_sparse else buffer.numel()
        self._steps[-1].ready.append((Bucket(names, numel, buffer.dtype, buffer.is_sparse), self._mark()))

    def gradients(self) -> None:
        """The backward has ended."""
        if self._ended:
            return
        self._steps[-1].gradients = self._mark()

    def end(self) -> None:
        """The step has ended."""
        self._steps[-1].end = self._mark()

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return sum(step.end is not None for step in self._steps)

    def profile(self, skip: int, ranks_per_host: int = 1, exchanging: bool = False) -> Profile:
        """The steps but the first ``skip``; of them those with the buckets of the last one (DDP rebuilds its buckets).

        Args:
            skip: Steps of warming up.
            ranks_per_host: Processes that share the processors.
            exchanging: Whether backward has waited for an exchange: it is then taken to end with the last bucket.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = [step for step in self._steps if step.end is not None and step.ready][skip:]
        buckets = tuple(bucket for bucket, _ in steps[-1].ready)
        alike = [step for step in steps if tuple(bucket for bucket, _ in step.ready) == buckets]
        times = tuple(step.times(self._seconds, exchanging) for step in alike)
        if self._device.type != "cpu":
            return Profile(buckets, times, self._device)
        cores = max(1.0, _usable_cores() / ranks_per_host)
        return Profile(buckets, times, self._device, cores, min(cores, float(torch.get_num_threads())))

    @property
    def _ended(self) -> bool:
        """Of several optimizers' turns only the first is a step here."""
        return self._steps[-1].end is not None

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, first: Any, second: Any) -> float:
        return float(second - first) if self._device.type != "cuda" else first.elapsed_time(second) / 1e3


@dataclass
class _Marks:
    begin: Any
    backward: Any = None
    ready: list[tuple[Bucket, Any]] = field(default_factory=list)
    gradients: Any = None
    end: Any = None

    def times(self, seconds: Any, exchanging: bool) -> StepTimes:
        return StepTimes(
            before=seconds(self.begin, self.backward),
            backward=seconds(self.backward, self.ready[-1][1] if exchanging else self.gradients),
            after=seconds(self.gradients, self.end),
            ready=tuple(seconds(self.backward, mark) for _, mark in self.ready),
        )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

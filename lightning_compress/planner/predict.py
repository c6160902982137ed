"""One step of a model under a method, put together from measurements: which tasks there are, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_compress.exchange.collectives import Level
from lightning_compress.planner.costs import BucketCost
from lightning_compress.planner.link import Link
from lightning_compress.planner.methods import Method
from lightning_compress.planner.profile import Profile, StepTimes
from lightning_compress.planner.timeline import Need, Span, Task, run

_STREAMS = 3
"""Side streams of the CUDA pipeline (see ``exchange.pipeline``)."""


@dataclass(frozen=True)
class Prediction:
    """A method's predicted step.

    Attributes:
        method: Its name.
        seconds: Of the step, from the medians of all measurements.
        low: The shortest of that, and of what their lower and their upper quartiles give.
        high: The longest.
        exposed: Seconds by which the exchange makes the step longer than its computation.
        nbytes: What each rank puts on the wire.
        spans: The timeline.
    """

    method: str
    seconds: float
    low: float
    high: float
    exposed: float
    nbytes: int
    spans: tuple[Span, ...] = ()

    def as_row(self) -> dict[str, str | float | int]:
        """The public figures."""
        milliseconds = {"step_ms": self.seconds, "low_ms": self.low, "high_ms": self.high, "exposed_ms": self.exposed}
        return {"method": self.method, **{k: round(1e3 * s, 3) for k, s in milliseconds.items()}, "bytes": self.nbytes}


def predict(method: Method, profile: Profile, costs: Sequence[BucketCost], link: Link) -> Prediction:
    """Simulates the overlapped step three times: with good, middling and bad values of everything that was measured."""
    good, middle, bad = (simulate(method, profile, costs, link, share) for share in (0.25, 0.5, 0.75))
    # a slower backward may hide more of the exchange: bad values do not always give the longest step
    ends = [spans[-1].end for spans in (good, middle, bad)]
    nbytes = sum(message.sent for cost in costs for message in cost.messages)
    exposed = max(0.0, middle[-1].end - profile.at(0.5).total)
    return Prediction(method.name, middle[-1].end, min(ends), max(ends), exposed, round(nbytes), tuple(middle))


def calibrated(method: Method, profile: Profile, costs: Sequence[BucketCost], link: Link, seconds: float) -> Profile:
    """A profile measured beside the exchange ``method``, freed from what that took away from it.

    Where exchange and backward share processors, backward looks longer than it is. All its times are shortened by the one
    factor with which the prediction for ``method`` is the step that was measured.

    Args:
        method: The exchange that was in force.
        profile: As measured.
        costs: Of ``method``.
        link: The network.
        seconds: Median of the measured steps.
    """

    def predicted(factor: float) -> float:
        return simulate(method, profile.scaled(factor), costs, link, 0.5)[-1].end

    low, high = 0.0, 1.0
    if predicted(high) <= seconds:
        return profile
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if predicted(middle) > seconds else (middle, high)
    return profile.scaled(high)


def simulate(
    method: Method, profile: Profile, costs: Sequence[BucketCost], link: Link, share: float = 0.5
) -> list[Span]:
    """The timeline of one step, with the quantile ``share`` of everything that was measured; its last span is its end."""
    step = profile.at(share)
    buckets = [_Bucket.of(cost, link, share) for cost in costs]
    return run(step_tasks(method, step, buckets, profile), {"compute": profile.cores, "link": 1.0, "node": 1.0})


@dataclass(frozen=True)
class _Bucket:
    """One bucket's work: seconds of its stages, its transfers between them, and among whom these are."""

    stages: tuple[float, ...]
    transfers: tuple[Mapping[str, Need], ...]
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, cost: BucketCost, link: Link, share: float) -> _Bucket:
        transfers = []
        for message in cost.messages:
            hop = link.hop(message.kind, message.sent, share, message.level)
            needs = {"node" if message.level == "node" else "link": Need(hop.seconds)}
            if hop.host:
                needs["compute"] = Need(hop.seconds, min(1.0, hop.host / hop.seconds))
            transfers.append(needs)
        return cls(cost.at(share), tuple(transfers), tuple(message.level for message in cost.messages))


def step_tasks(method: Method, step: StepTimes, buckets: Sequence[_Bucket], profile: Profile) -> list[Task]:
    """The tasks of one step; the last one is its end.

    Backward runs piece by piece, each ending when a bucket is ready. What comes then depends on who carries it:

    - DDP's own all-reduce and torch's hooks encode in the backward's thread.
    - The CPU pipeline has a thread per stage and a process group per collective, all of them first in, first out.
    - The CUDA pipeline gives whole buckets to its side streams in turn, and one communicator takes their collectives in the
      order in which they were issued. A hierarchical exchange has one stream, and a communicator of each level.
    """
    tasks = [Task("backward", "forward", {"compute": Need(step.before, profile.threads)})]
    ends = []
    passed = 0.0
    for number, (ready, bucket) in enumerate(zip(step.ready, buckets, strict=True)):
        piece = {"compute": Need(ready - passed, profile.threads)}
        tasks.append(Task("backward", "backward", piece, bucket=number))
        passed = ready
        for stage, seconds in enumerate(bucket.stages):
            kind = "encode" if stage == 0 else "decode" if stage == len(bucket.stages) - 1 else "owner"
            lane = _lane(method, profile, bucket, number, stage)
            tasks.append(Task(lane, kind, {"compute": Need(seconds)}, (len(tasks) - 1,), number))
            if stage < len(bucket.transfers):
                group = f"link {bucket.levels[stage] if profile.device.type == 'cuda' else stage}"
                tasks.append(Task(group, "link", bucket.transfers[stage], (len(tasks) - 1,), number))
        ends.append(len(tasks) - 1)
    tasks.append(Task("backward", "backward", {"compute": Need(step.backward - passed, profile.threads)}))
    return [*tasks, Task("backward", "optimizer", {"compute": Need(step.after, profile.threads)}, tuple(ends))]


def _lane(method: Method, profile: Profile, bucket: _Bucket, number: int, stage: int) -> str:
    if method.arguments is None:
        return "backward" if stage == 0 else "stage 1"
    streams = 1 if "node" in bucket.levels else _STREAMS
    return f"stream {number % streams}" if profile.device.type == "cuda" else f"stage {stage}"

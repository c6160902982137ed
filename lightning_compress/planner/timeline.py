"""When does what run: tasks in ordered lanes that share processors and a link. Knows nothing of gradients or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NOTHING = 1e-12
"""Seconds below which a piece of work is done: rounding."""


@dataclass(frozen=True)
class Need:
    """What a task asks of a resource.

    Attributes:
        seconds: Of work, if nobody else wants the resource.
        width: How much of the resource it keeps busy meanwhile: a backward on two cores has 2, a transfer that needs the
            processor a tenth of the time has 0.1 of it.
    """

    seconds: float
    width: float = 1.0


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        lane: A thread, a stream or a communicator: does one task at a time, in the order in which they are listed.
        kind: What it is, for a plot: "backward", "encode", "link", ...
        needs: By resource; all of them are served at the same time, and the task ends when the last one is.
        after: Numbers of the tasks that must have ended before.
        bucket: The bucket it belongs to, -1 for none.
    """

    lane: str
    kind: str
    needs: Mapping[str, Need]
    after: tuple[int, ...] = ()
    bucket: int = -1


@dataclass
class Span:
    """When a task ran, in seconds."""

    task: Task
    start: float
    end: float


def run(tasks: Sequence[Task], capacity: Mapping[str, float]) -> list[Span]:
    """The spans of all tasks, in their order.

    A resource is shared as schedulers and links do it (max-min fairness): those who want little get it, the others get equal
    parts of the rest.

    Args:
        tasks: In an order in which they could run one after the other.
        capacity: How much there is of each resource: cores, 1 link.
    """
    lanes: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        lanes.setdefault(task.lane, deque()).append(number)
    ended: dict[int, Span] = {}
    running: dict[int, _Running] = {}
    now = 0.0
    while len(ended) < len(tasks):
        for lane in lanes.values():
            if lane and lane[0] not in running and all(before in ended for before in tasks[lane[0]].after):
                running[lane[0]] = _Running(tasks[lane[0]], now)
        assert running, "tasks wait for each other"
        wanted = {name: [r.task.needs[name] for r in running.values() if name in r.left] for name in capacity}
        levels = {name: _level(needs, capacity[name]) for name, needs in wanted.items()}
        passed = min(r.seconds_to_change(levels) for r in running.values())
        now += passed
        for number, r in list(running.items()):
            r.advance(passed, levels)
            if not r.left:
                del running[number]
                lanes[r.task.lane].popleft()
                ended[number] = Span(r.task, r.start, now)
    return [ended[number] for number in range(len(tasks))]


class _Running:
    """A task that has started, and what is left of its needs."""

    def __init__(self, task: Task, start: float) -> None:
        self.task, self.start = task, start
        self.left = {name: need.seconds for name, need in task.needs.items() if need.seconds > _NOTHING}

    def seconds_to_change(self, levels: Mapping[str, float]) -> float:
        """Until one of its needs is served; 0 if none is left."""
        return min((left / self._pace(name, levels) for name, left in self.left.items()), default=0.0)

    def advance(self, seconds: float, levels: Mapping[str, float]) -> None:
        """Lets time pass."""
        left = {name: seconds_left - seconds * self._pace(name, levels) for name, seconds_left in self.left.items()}
        self.left = {name: seconds_left for name, seconds_left in left.items() if seconds_left > _NOTHING}

    def _pace(self, name: str, levels: Mapping[str, float]) -> float:
        return min(1.0, levels[name] / min(1.0, self.task.needs[name].width))


def _level(needs: Sequence[Need], capacity: float) -> float:
    """What each of those who share a resource may take of it: a need of width 2 counts as two."""
    left, shares = capacity, sum(max(1.0, need.width) for need in needs)
    for need in sorted(needs, key=lambda need: need.width):
        if min(1.0, need.width) > left / shares:
            return left / shares
        left -= need.width
        shares -= max(1.0, need.width)
    return 1.0

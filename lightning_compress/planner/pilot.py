"""The decisions of ``compressed_auto``: knows no clock, no model and no network, only what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_compress.planner.methods import Choice
from lightning_compress.planner.sample import NOISE, quantile

Due = Literal["predict", "judge"]


@dataclass(frozen=True)
class Trial:
    """A candidate that is being tried.

    Attributes:
        before: What it has to beat.
        steps: Its step times in seconds.
        reason: Why it is tried.
    """

    before: Choice
    steps: tuple[float, ...]
    reason: str


class Pilot:
    """Measures, tries a candidate, keeps it if it wins, and looks again after a long while.

    Every rank has one and counts the same steps; only rank 0's times decide, and it tells the others what it decided. The
    caller does what ``step`` says is due: predict and ``propose``, or ``judge`` and ``conclude``.

    Args:
        choice: The one in force at the start.
        measure: Steps that are measured of each method.
        warm_up: Steps before them: DDP rebuilds its buckets, kernels are loaded, connections made.
        recheck_every: Steps after a decision until everything is measured again; 0: never.
    """

    def __init__(self, choice: Choice, measure: int = 10, warm_up: int = 3, recheck_every: int = 5000) -> None:
        for name, value, least in (
            ("measure", measure, 1),
            ("warm_up", warm_up, 0),
            ("recheck_every", recheck_every, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a number of steps and must be {least} or more, got {value!r}")
        self.choice, self.reason = choice, "the start, until a choice is made"
        self.settled = self._fixed = False
        self._measure, self.warm_up, self._recheck = measure, warm_up, recheck_every
        self._count = 0
        self._steps: list[float] = []
        self._trial: Trial | None = None

    @property
    def method(self) -> str:
        """The name of the method in force."""
        return self.choice.method

    @property
    def watches(self) -> bool:
        """Whether the times of the present step matter."""
        return not self.settled

    @property
    def seconds(self) -> float:
        """Median of the measured steps."""
        return quantile(self._steps, 0.5)

    def step(self, seconds: float) -> Due | None:
        """Counts a step that took ``seconds``; what is due after it is the same on all ranks."""
        self._count += 1
        if self.settled:
            if self._recheck and not self._fixed and self._count >= self._recheck:
                self._begin()
            return None
        if self._count > self.warm_up:
            self._steps.append(seconds)
        if len(self._steps) < self._measure:
            return None
        return "judge" if self._trial is not None else "predict"

    def propose(self, candidate: Choice, reason: str) -> None:
        """Takes the prediction's choice: tries it, unless it is in force already."""
        if candidate == self.choice:
            self._settle(reason)
            return
        self._trial = Trial(self.choice, tuple(self._steps), reason)
        self.choice = candidate
        self._begin()

    def fix(self, reason: str) -> None:
        """Settles what is in force without ever looking again: there is nothing to choose."""
        self._trial = None
        self._settle(reason)
        self._fixed = True

    def judge(self) -> bool:
        """Whether the candidate stays: a milder one if it is hardly slower, any other only if it is faster beyond noise."""
        assert self._trial is not None
        before, now = quantile(self._trial.steps, 0.5), self.seconds
        noise = max(NOISE * before, (_spread(self._trial.steps) + _spread(self._steps)) / 4)
        milder = self.choice.mildness < self._trial.before.mildness
        return now <= (1.0 + NOISE) * before if milder else now < before - noise

    def conclude(self, stays: bool) -> None:
        """Keeps the candidate or goes back to the method before it."""
        assert self._trial is not None
        trial, tried = self._trial, self.choice
        times = (
            f"{1e3 * self.seconds:.0f} ms a step against {1e3 * quantile(trial.steps, 0.5):.0f} ms with {trial.before}"
        )
        self._trial = None
        if stays:
            self._settle(f"{times}, tried on the wall clock. {trial.reason}")
        else:
            self.choice = trial.before
            self._settle(f"{tried} was predicted to be better and was not: {times}")

    def measure_again(self) -> None:
        """Forgets the measured steps of a method that is not settled: another fit begins."""
        if not self.settled:
            self._begin()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a candidate on trial has not won yet, a resumed run begins again with what it has to beat."""
        choice = self.choice if self._trial is None else self._trial.before
        return {**choice.state(), "reason": self.reason, "settled": self.settled}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on with a choice from a checkpoint, without measuring if it had been made."""
        self.choice = Choice.restored(state)
        self._trial, self._fixed = None, False
        self._begin()
        if state["settled"]:
            self._settle(state["reason"])

    def _begin(self) -> None:
        self.settled = False
        self._count, self._steps = 0, []

    def _settle(self, reason: str) -> None:
        self._begin()
        self.reason, self.settled = reason, True


def _spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    return quantile(values, 0.75) - quantile(values, 0.25)

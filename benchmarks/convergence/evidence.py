"""Is a method as good as dense training, within a margin that was written down before? Tests of non-inferiority."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from benchmarks.report import Row

Verdict = Literal["non-inferior", "worse", "not shown"]


@dataclass(frozen=True)
class Margin:
    """How much worse than dense still counts as no loss, and the level of the tests.

    Attributes:
        points: Of accuracy.
        loss: Of the test loss, relative to dense.
        alpha: Chance of a false claim, over all methods of a table together.
    """

    points: float = 0.5
    loss: float = 0.03
    alpha: float = 0.05


NO_LOSS = Margin()


@dataclass(frozen=True)
class Comparison:
    """A method against dense, over the seeds that both have.

    Attributes:
        seeds: How many.
        points: Mean difference of accuracy.
        loss: Mean relative difference of the test loss.
        p: One-sided paired t-tests against the margin, the larger of the two: both endpoints must hold, so neither needs a
            correction for the other.
        wilcoxon: The same from signed ranks.
        p_worse: That it is within the margin although it looks worse: twice the smaller of the opposite tests, as one
            endpoint suffices.
    """

    seeds: int
    points: float
    loss: float
    p: float
    wilcoxon: float
    p_worse: float


def compare(dense: Sequence[Row], method: Sequence[Row], margin: Margin) -> Comparison | None:
    """Pairs the rows by seed; None with fewer than two pairs. A run that diverged is as bad as can be."""
    baseline = {row["seed"]: row for row in dense}
    pairs = [(baseline[row["seed"]], row) for row in method if row["seed"] in baseline]
    if len(pairs) < 2:
        return None
    # both with a margin of zero, and larger is better
    points = [b["value"] - a["value"] + margin.points for a, b in pairs]
    losses = [1 + margin.loss - b["test_loss"] / a["test_loss"] for a, b in pairs]
    ends = (points, losses)
    diverged = not all(map(math.isfinite, losses))
    return Comparison(
        len(pairs),
        sum(points) / len(pairs) - margin.points,
        margin.loss - sum(losses) / len(pairs),
        1.0 if diverged else max(_t_test(end, "greater") for end in ends),
        1.0 if diverged else max(float(stats.wilcoxon(end, alternative="greater").pvalue) for end in ends),
        0.0 if diverged else min(1.0, 2 * min(_t_test(end, "less") for end in ends)),
    )


def _t_test(sample: Sequence[float], alternative: str) -> float:
    if max(sample) == min(sample):  # scipy divides by the spread
        return 0.0 if (sample[0] > 0) == (alternative == "greater") else 1.0
    return float(stats.ttest_1samp(sample, 0.0, alternative=alternative).pvalue)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: below alpha, all claims of the family together are wrong with at most that chance."""
    adjusted, largest = {}, 0.0
    for i, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - i) * p[name]))
        adjusted[name] = largest
    return adjusted


def verdict(comparison: Comparison, adjusted: float, margin: Margin) -> Verdict:
    """What may be said. That no difference was found is not among it."""
    if adjusted < margin.alpha:
        return "non-inferior"
    return "worse" if comparison.p_worse < margin.alpha else "not shown"

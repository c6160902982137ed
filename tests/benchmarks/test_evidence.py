"""Claims of no loss: on hand-made rows, whose tests can be followed on paper."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from benchmarks.convergence.evidence import NO_LOSS, Comparison, compare, holm, verdict
from benchmarks.convergence.summary import prove

SEEDS = range(8)
NOISE = (0.1, -0.1, 0.2, -0.2, 0.05, -0.05, 0.15, -0.15)


def rows_of(method: str, points: float = 0.0, loss: float = 1.0, noise: float = 1.0) -> list[dict[str, object]]:
    """Eight runs: dense has 90 % and 0.3 in loss; the noise of the pairs has a mean of zero."""
    return [
        {
            "method": method,
            "optimizer": "sgd",
            "seed": seed,
            "value": 90 + seed + points + noise * NOISE[seed],
            "test_loss": (0.3 + 0.01 * seed) * (loss + 0.05 * noise * NOISE[seed]),
        }
        for seed in SEEDS
    ]


DENSE = rows_of("dense", noise=0.0)


def compared(points: float = 0.0, loss: float = 1.0, noise: float = 1.0) -> Comparison:
    result = compare(DENSE, rows_of("method", points, loss, noise), NO_LOSS)
    assert result is not None
    return result


def test_the_t_test_is_that_of_the_margin() -> None:
    result = compared(-0.2)
    assert (result.seeds, result.points, result.loss) == pytest.approx((8, -0.2, 0.0))
    sd = math.sqrt(sum(x * x for x in NOISE) / 7)
    t_points, t_loss = 0.3 / (sd / math.sqrt(8)), 0.03 / (0.05 * sd / math.sqrt(8))
    assert t_points < t_loss
    assert result.p == pytest.approx(float(stats.t.sf(t_points, 7)))
    assert result.wilcoxon == pytest.approx(1 / 2**8)  # all eight differences are above the margin


@pytest.mark.parametrize(
    ("points", "loss", "expected"),
    [
        (0.0, 1.0, "non-inferior"),
        (2.0, 0.9, "non-inferior"),
        (-0.4, 1.0, "non-inferior"),
        (-0.45, 1.0, "not shown"),
        (-0.6, 1.0, "not shown"),
        (-2.0, 1.0, "worse"),
        (0.0, 1.02, "non-inferior"),
        (0.0, 1.03, "not shown"),  # accuracy alone is not enough
        (0.0, 1.2, "worse"),
    ],
)
def test_both_endpoints_must_hold(points: float, loss: float, expected: str) -> None:
    result = compared(points, loss)
    assert verdict(result, result.p, NO_LOSS) == expected


def test_a_spread_that_hides_everything_proves_nothing() -> None:
    result = compared(noise=20.0)
    assert verdict(result, result.p, NO_LOSS) == "not shown"


def test_seeds_are_paired_and_one_is_not_enough() -> None:
    shuffled = list(reversed(rows_of("method", -0.2)))
    unpaired = {**shuffled[0], "seed": 99, "value": 0.0}
    assert compare(DENSE, [*shuffled, unpaired], NO_LOSS) == compared(-0.2)
    assert compare(DENSE, shuffled[:1], NO_LOSS) is None


def test_equal_runs_and_diverged_ones() -> None:
    assert verdict(compared(noise=0.0), compared(noise=0.0).p, NO_LOSS) == "non-inferior"
    broken = rows_of("method")
    broken[3]["test_loss"] = math.nan
    result = compare(DENSE, broken, NO_LOSS)
    assert result is not None
    assert (result.p, verdict(result, result.p, NO_LOSS)) == (1.0, "worse")


def test_holm_multiplies_by_the_claims_that_are_left_and_never_falls() -> None:
    assert holm({"a": 0.03, "b": 0.01, "c": 0.02, "d": 0.9}) == pytest.approx(
        {"b": 0.04, "c": 0.06, "a": 0.06, "d": 0.9}
    )
    assert holm({"a": 0.6, "b": 0.5}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_claims_are_corrected_for_their_number_and_the_control_must_be_found_worse() -> None:
    assert 0.025 < compared(-0.39).p < 0.05
    alone = [*DENSE, *rows_of("barely", -0.39), *rows_of("control", -3.0)]
    lines, comment = prove(alone, "control", NO_LOSS)
    assert [(*line[:3], line[-1]) for line in lines] == [
        ("barely", "8", "-0.39", "non-inferior"),
        ("control", "8", "-3.00", "worse"),
    ]
    assert "CONTROL" not in comment
    lines, _ = prove([*alone, *rows_of("as barely", -0.39)], "control", NO_LOSS)
    assert [line[-1] for line in lines] == ["not shown", "worse", "not shown"]
    for weak in (rows_of("control", -0.3), [], rows_of("control", -3.0)[:1]):
        comment = prove([*DENSE, *rows_of("good"), *weak], "control", NO_LOSS)[1]
        assert "THE CONTROL control WAS NOT FOUND WORSE" in comment

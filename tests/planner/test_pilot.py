"""The decisions of ``compressed_auto``, without clocks."""

from __future__ import annotations

import pytest

from lightning_compress.planner.methods import Choice, Method
from lightning_compress.planner.pilot import Pilot
from lightning_compress.planner.predict import calibrated, predict
from lightning_compress.planner.profile import StepTimes
from tests.planner.hand_made import LINK, cost, profile


def pilot(method: str = "bf16", **settings: int) -> Pilot:
    return Pilot(Choice(method), **{"measure": 4, "warm_up": 2, "recheck_every": 10, **settings})


def steps(one: Pilot, *seconds: float) -> list[str | None]:
    return [one.step(s) for s in seconds]


def tried(candidate: str, now: float, before: str = "bf16") -> Pilot:
    """Steps of 1 s, and then of ``now`` seconds with the candidate."""
    one = pilot(before)
    steps(one, *[1.0] * 6)
    one.propose(Choice(candidate), "because")
    assert one.method == candidate
    assert steps(one, 9.0, 9.0, *[now] * 4) == [None] * 5 + ["judge"]  # the first two do not count
    one.conclude(one.judge())
    assert one.settled
    return one


def test_it_measures_after_the_warm_up() -> None:
    one = pilot()
    assert steps(one, 50.0, 50.0, 1.0, 2.0, 3.0, 4.0) == [None] * 5 + ["predict"]
    assert one.seconds == 2.5


def test_what_is_in_force_already_is_settled_at_once() -> None:
    one = pilot()
    steps(one, *[1.0] * 6)
    one.propose(Choice("bf16"), "compute bound")
    assert one.state() == {"method": "bf16", "dense": None, "reason": "compute bound", "settled": True}


def test_a_candidate_that_wins_stays() -> None:
    one = tried("quantize", 0.5)
    assert one.method == "quantize"
    assert one.reason == "500 ms a step against 1000 ms with bf16, tried on the wall clock. because"


@pytest.mark.parametrize("now", [0.98, 1.0, 1.5])
def test_a_candidate_that_does_not_win_by_more_than_noise_goes(now: float) -> None:
    one = tried("quantize", now)
    assert one.method == "bf16"
    assert "quantize was predicted to be better and was not" in one.reason


def test_a_milder_candidate_stays_unless_it_loses() -> None:
    assert tried("fp32", 1.02).method == "fp32"
    assert tried("fp32", 1.1).method == "bf16"
    assert tried("bf16", 1.02, before="quantize").method == "bf16"


def test_scattered_times_ask_for_a_larger_gain() -> None:
    one = pilot()
    steps(one, 1.0, 1.0, 0.6, 0.8, 1.2, 1.4)
    one.propose(Choice("quantize"), "")
    steps(one, 1.0, 1.0, 0.5, 0.7, 1.1, 1.3)
    assert not one.judge()
    milder = pilot()  # what may be noise may be a slower step too
    steps(milder, 1.0, 1.0, 0.6, 0.8, 1.2, 1.4)
    milder.propose(Choice("fp32"), "")
    steps(milder, 1.0, 1.0, 0.7, 0.9, 1.3, 1.5)
    assert not milder.judge()


def test_it_looks_again_after_a_long_while_from_what_is_in_force() -> None:
    one = tried("quantize", 0.5)
    assert steps(one, *[0.5] * 9) == [None] * 9
    assert one.settled
    one.step(0.5)
    assert not one.settled
    assert steps(one, *[0.5] * 6)[-1] == "predict"
    assert one.method == "quantize"
    never = pilot(recheck_every=0)
    never.propose(Choice("bf16"), "")
    assert steps(never, *[1.0] * 100) == [None] * 100
    assert never.settled


def test_a_choice_is_restored_without_measuring() -> None:
    other = pilot()
    other.restore(tried("quantize", 0.5).state())
    assert (other.method, other.settled) == ("quantize", True)
    unfinished = pilot()
    unfinished.propose(Choice("quantize"), "")
    other.restore(unfinished.state())
    assert (other.method, other.settled) == ("bf16", False)  # that has not won


def test_what_is_fixed_is_never_looked_at_again_until_another_choice_is_restored() -> None:
    one = pilot()
    one.fix("nothing to choose")
    assert steps(one, *[1.0] * 30) == [None] * 30
    assert one.settled
    one.restore(one.state())
    steps(one, *[1.0] * 10)
    assert not one.settled


@pytest.mark.parametrize("wrong", [{"measure": 0}, {"warm_up": -1}, {"recheck_every": -5}, {"measure": True}])
def test_numbers_of_steps_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is a number of steps"):
        pilot(**wrong)


def test_a_profile_measured_beside_an_exchange_is_calibrated() -> None:
    # on one core the encoding of 1 s beside a backward of 4 s makes it look like 5 s
    costs = [cost((1.0, 0.0), (0.0,)), cost((0.0, 0.0), (0.0,))]
    alone = profile(StepTimes(1.0, 4.0, 0.0, (1.0, 4.0)), cores=1.0)
    seconds = predict(Method.named("fp16"), alone, costs, LINK).seconds
    assert seconds == pytest.approx(6.0)
    seen = profile(StepTimes(1.0, 5.0, 0.0, (1.0, 5.0)), cores=1.0)
    freed = calibrated(Method.named("fp16"), seen, costs, LINK, seconds)
    assert predict(Method.named("fp16"), freed, costs, LINK).seconds == pytest.approx(6.0)
    assert freed.at(0.5).total == pytest.approx(5.0, rel=1e-3)
    # one that is slower than predicted is left alone
    assert calibrated(Method.named("fp16"), seen, costs, LINK, 100.0) is seen

"""The soak test finds what it is there for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks import soak


def test_a_course_is_reproducible_and_holds_every_disturbance() -> None:
    legs = soak.draw(400, 4, 0)
    assert legs == soak.draw(400, 4, 0) != soak.draw(400, 4, 1)
    steps = [step for leg in legs for step in leg.steps]
    assert [step.number for step in steps] == list(range(400))
    assert {leg.world_size for leg in legs} == {1, 2, 3, 4}
    assert {step.batches for step in steps} == {1, 2, 3}
    assert 10 < sum(step.overflow is not None for step in steps) < 80
    assert all(step.overflow is None or step.overflow < leg.world_size for leg in legs for step in leg.steps)
    calm = soak.undisturbed(legs)
    assert all(one.world_size != other.world_size for one, other in pairwise(calm))
    assert [step for leg in calm for step in leg.steps] == [step for step in steps if step.overflow is None]


def test_what_is_owed_is_compared_in_float64() -> None:
    state = {
        "worker": {"w": [torch.ones(2), 3 * torch.ones(2)]},
        "velocity": {},
        "owner": {"w": torch.tensor([0.0, 1.0])},
    }
    assert soak.owed(state)["w"].tolist() == [2.0, 3.0]
    assert soak.owed(state)["w"].dtype == torch.float64
    assert soak.distance({"w": torch.tensor([2.0, 3.3])}, soak.owed(state)) == pytest.approx(0.1, rel=1e-6)


def test_a_short_soak() -> None:
    step = soak.Step
    legs = [
        soak.Leg(2, (step(0, 1, None), step(1, 2, 1))),
        soak.Leg(2, (step(2, 1, None), step(3, 1, None))),
        soak.Leg(1, (step(4, 1, None),)),
    ]
    row = soak.soak("compressed_topk", legs, lambda _: None)
    assert row["bit_identical"]
    assert 0 < row["owed_error"] < 1e-6
    assert (row["resumes"], row["changes_of_world_size"], row["overflows"], row["accumulating_steps"]) == (2, 1, 1, 1)
    assert row["loss"] < row["untrained_loss"]

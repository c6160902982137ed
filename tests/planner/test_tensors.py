"""Which tensors stay dense, on timelines whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_compress import DenseRule
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner import tensors as module_of_tensors
from lightning_compress.planner.costs import BucketCost
from lightning_compress.planner.methods import Choice
from lightning_compress.planner.predict import simulate
from lightning_compress.planner.profile import Bucket, Profile, StepTimes
from lightning_compress.planner.tensors import (
    LargeTensor,
    after_last_bubble,
    fewest,
    large_tensors,
    rule_for,
    spare,
)
from lightning_compress.planner.timeline import Span
from tests.planner.hand_made import LINK, cost, profile


def compressed(sizes: Sequence[int], ready: Sequence[float], limit: float) -> list[int]:
    """Buckets of one tensor each: dense one byte per element, coded nothing, on a link of one byte per second."""
    tensors = [LargeTensor(str(i), numel, i) for i, numel in enumerate(sizes)]
    step = profile(StepTimes(0.0, ready[-1], 0.0, tuple(ready)))

    def timeline(coded: frozenset[str]) -> list[Span]:
        sent = [0.0 if str(i) in coded else float(numel) for i, numel in enumerate(sizes)]
        costs = [cost((0.0, 0.0, 0.0), (nbytes, 0.0)) for nbytes in sent]
        return simulate(Choice("quantize").as_run, step, costs, LINK)

    return sorted(int(name) for name in fewest(tensors, timeline, limit))


def test_what_hides_already_stays_dense() -> None:
    assert compressed([3, 3], [1.0, 4.0], limit=7.0) == []


def test_the_largest_first() -> None:
    # all of it: 1 + 2 + 8 + 4 = 15
    assert compressed([2, 8, 4], [1.0, 1.0, 1.0], limit=7.0) == [1]
    assert compressed([2, 8, 4], [1.0, 1.0, 1.0], limit=6.9) == [1, 2]


def test_of_equally_large_ones_the_nearest_to_the_output() -> None:
    assert compressed([4, 4, 4], [1.0, 1.0, 1.0], limit=9.0) == [0]
    assert compressed([4, 4, 4], [1.0, 1.0, 1.0], limit=5.0) == [0, 1]


def test_what_travels_before_a_bubble_stays_dense() -> None:
    # the larger one travels from 1 to 6; then the link waits until 10
    assert compressed([5, 4], [1.0, 10.0], limit=10.0) == [1]
    # here it ends when the other is ready, and there is no bubble
    assert compressed([9, 4], [1.0, 9.9], limit=10.0) == [0, 1]


def test_a_bubble_that_compressing_makes_is_seen() -> None:
    # 0: 1..10, 1: 10..16, 2: 16..18. Without 0 there is a bubble before 1, and the third is large enough for the rest
    assert compressed([9, 6, 2], [1.0, 8.0, 9.0], limit=14.0) == [0, 1]
    assert compressed([9, 6, 7], [1.0, 5.0, 15.0], limit=20.0) == [0, 2]


def test_all_where_fewer_do_not_suffice() -> None:
    assert compressed([2, 8, 4], [1.0, 1.0, 9.0], limit=8.0) == [0, 1, 2]


def test_a_link_that_waits_for_an_owner_is_no_bubble() -> None:
    step = profile(StepTimes(0.0, 2.0, 0.0, (1.0, 2.0)))
    # 0 goes to its owner 1..2, who takes until 7, and comes back 7..8; 1 meanwhile 2..3 and, after its owner, 12..13
    costs = [cost((0.0, 5.0, 0.0), (1.0, 1.0)), cost((0.0, 5.0, 0.0), (1.0, 1.0))]
    assert after_last_bubble(simulate(Choice("quantize").as_run, step, costs, LINK)) == 0


@pytest.mark.parametrize("coded", [(), ("a",), ("b", "layers[0].w"), ("d",), ("a", "b", "layers[0].w")])
def test_the_rule_names_what_stays_dense(coded: tuple[str, ...]) -> None:
    sizes = {"a": 9000, "b": 5000, "layers[0].w": 5000, "d": 2000}
    rule = rule_for([LargeTensor(name, numel, 0) for name, numel in sizes.items()], coded)
    assert rule is not None
    assert rule.code == "bf16"
    assert [n for n, numel in sizes.items() if not rule.matches(n, (numel // 10, 10), numel)] == sorted(coded)
    assert rule.matches("norm", (7,), 7)


def test_a_threshold_says_more_than_many_names() -> None:
    tensors = [LargeTensor(f"p{i}", 2000 + i, 0) for i in range(100)]
    assert rule_for(tensors, [f"p{i}" for i in range(90, 100)]) == DenseRule("bf16", 2089)
    assert rule_for(tensors, [t.name for t in tensors]) is None


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 200), torch.nn.Linear(200, 10))


def layout(ready: Sequence[float]) -> Profile:
    """The network's buckets, from the output to the input."""
    names = [("2.weight", "2.bias"), ("1.weight", "1.bias"), ("0.weight", "0.bias")]
    buckets = tuple(Bucket(bucket, 0, torch.float32) for bucket in names)
    one = profile(StepTimes(0.0, ready[-1], 0.0, tuple(ready)))
    return Profile(buckets, one.steps, one.device, one.cores)


def test_large_tensors_are_those_that_are_compressed_by_default() -> None:
    found = large_tensors(network(), layout([1.0, 2.0, 3.0]))
    assert [(t.name, t.numel, t.bucket) for t in found] == [
        ("2.weight", 2000, 0),
        ("1.weight", 10000, 1),
        ("0.weight", 5000, 2),
    ]


def test_a_choice_spares_what_need_not_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, coded = (
        [cost((0.0, 0.0, 0.0), (nbytes, 0.0)) for nbytes in sizes] for sizes in ((2.0, 10.0, 5.0), (0.2, 1.0, 0.5))
    )

    def measured(method: object, *_: object) -> list[BucketCost]:
        assert method == Choice("quantize", DenseRule("bf16", patterns=("*",))).as_run
        return dense

    monkeypatch.setattr(module_of_tensors, "measure_costs", measured)
    whole, step = Choice("quantize"), layout([1.0, 2.0, 3.0])
    place = 0, Nodes.alone(2)
    # dense: 1..3, 3..13, 13..18
    choice, said = spare(whole, coded, network(), step, LINK, 9.5, *place)
    assert choice == Choice("quantize", DenseRule("bf16", 5000))
    assert said == "Large tensors compressed: 1 of 3; the others travel in bf16."
    assert choice.mildness < whole.mildness
    assert Choice.restored(choice.state()) == choice
    assert spare(whole, coded, network(), step, LINK, 1.0, *place) == (whole, "")
    assert spare(Choice("bf16"), coded, network(), step, LINK, 1.0, *place) == (Choice("bf16"), "")


def test_costs_of_a_bucket_that_is_partly_compressed() -> None:
    mixed = cost((1.0, 0.0), (100.0,)).mixed(cost((3.0, 1.0), (20.0,)), 0.25)
    assert mixed.at(0.5) == (1.5, 0.25)
    assert mixed.messages[0].sent == 80.0

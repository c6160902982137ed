"""Timelines whose answers are known."""

from __future__ import annotations

import importlib

import pytest
import torch

from lightning_compress.exchange.collectives import AllGather, AllReduce, AllToAll
from lightning_compress.planner.costs import BucketCost, Message
from lightning_compress.planner.link import GivenLink, MeasuredLink, Sample
from lightning_compress.planner.methods import Method
from lightning_compress.planner.predict import predict
from lightning_compress.planner.profile import StepTimes
from lightning_compress.planner.timeline import Need, Span, Task, run
from tests.planner.hand_made import LINK, cost, profile


def spans(tasks: list[Task], **capacity: float) -> list[tuple[float, float]]:
    return [(round(s.start, 9), round(s.end, 9)) for s in run(tasks, {"compute": 1.0, "link": 1.0, **capacity})]


class TestTimeline:
    def test_a_lane_does_one_task_at_a_time(self) -> None:
        tasks = [Task("a", "x", {"compute": Need(1.0)}), Task("a", "x", {"link": Need(2.0)})]
        assert spans(tasks) == [(0, 1), (1, 3)]

    def test_a_task_waits_for_those_before_it(self) -> None:
        tasks = [Task("a", "x", {"link": Need(2.0)}), Task("b", "x", {"compute": Need(1.0)}, after=(0,))]
        assert spans(tasks) == [(0, 2), (2, 3)]

    def test_two_share_one_core(self) -> None:
        # both at half speed until the short one ends after 2 s; the long one has 2 s left then
        tasks = [Task("a", "x", {"compute": Need(3.0)}), Task("b", "x", {"compute": Need(1.0)})]
        assert spans(tasks) == [(0, 4), (0, 2)]
        assert spans(tasks, compute=2.0) == [(0, 3), (0, 1)]

    def test_a_wide_task_is_slowed_by_a_narrow_one(self) -> None:
        # 2 + 1 threads on 2 cores: everything at 2/3
        tasks = [Task("a", "x", {"compute": Need(4.0, width=2.0)}), Task("b", "x", {"compute": Need(2.0)})]
        assert spans(tasks, compute=2.0) == [(0, 5), (0, 3)]

    def test_a_transfer_that_needs_the_processor(self) -> None:
        # it wants a quarter of the core and gets it; the other has three quarters until then
        tasks = [
            Task("a", "x", {"compute": Need(4.0)}),
            Task("b", "x", {"link": Need(2.0), "compute": Need(2.0, width=0.25)}),
        ]
        assert spans(tasks) == [(0, 4.5), (0, 2)]

    def test_nothing_takes_no_time(self) -> None:
        tasks = [Task("a", "x", {}), Task("a", "x", {"compute": Need(0.0)}), Task("a", "x", {"link": Need(1.0)})]
        assert spans(tasks) == [(0, 0), (0, 0), (0, 1)]


class TestPrediction:
    def test_nothing_to_hide_behind(self) -> None:
        found = predict(
            Method.named("fp32"), profile(StepTimes(1.0, 2.0, 0.5, (2.0,))), [cost((0.0, 0.0), (3.0,))], LINK
        )
        assert found.seconds == pytest.approx(1.0 + 2.0 + 3.0 + 0.5)
        assert found.exposed == pytest.approx(3.0)
        assert found.nbytes == 3

    def test_the_first_bucket_hides_behind_backward(self) -> None:
        step = StepTimes(1.0, 4.0, 0.5, (1.0, 4.0))
        found = predict(Method.named("fp32"), profile(step), [cost((0.0, 0.0), (2.5,)), cost((0.0, 0.0), (1.0,))], LINK)
        assert found.exposed == pytest.approx(1.0)
        assert found.seconds == pytest.approx(6.5)

    def test_torch_hooks_encode_in_the_thread_of_backward(self) -> None:
        step = StepTimes(1.0, 4.0, 0.5, (1.0, 4.0))
        costs = [cost((0.5, 0.0), (0.1,)), cost((0.5, 0.0), (0.1,))]
        assert predict(Method.named("bf16"), profile(step), costs, LINK).exposed == pytest.approx(0.5 + 0.5 + 0.1)
        # in a thread of its own the first one is hidden
        assert predict(Method.named("fp16"), profile(step), costs, LINK).exposed == pytest.approx(0.5 + 0.1)
        # unless backward has the only core: 0.5 s of encoding take 0.5 s from it
        assert predict(Method.named("fp16"), profile(step, cores=1.0), costs, LINK).exposed == pytest.approx(
            0.5 + 0.5 + 0.1
        )

    def test_two_way_stages_are_in_order(self) -> None:
        # encode 1..2, to the owner 2..4, owner 4..5, back 5..6, decode 6..7
        step = StepTimes(0.0, 1.0, 0.0, (1.0,))
        found = predict(Method.named("quantize"), profile(step), [cost((1.0, 1.0, 1.0), (2.0, 1.0))], LINK)
        assert found.seconds == pytest.approx(7.0)
        kinds = [(s.task.kind, round(s.start), round(s.end)) for s in found.spans if s.task.bucket == 0]
        assert kinds == [
            ("backward", 0, 1),
            ("encode", 1, 2),
            ("link", 2, 4),
            ("owner", 4, 5),
            ("link", 5, 6),
            ("decode", 6, 7),
        ]

    def test_collectives_of_two_buckets_share_the_link(self) -> None:
        # bucket 0 goes back (1 s) while bucket 1 goes out (1 s): both take 2 s, so it is 0 + 1 + 2 + 1 (the way back)
        step = StepTimes(0.0, 0.0, 0.0, (0.0, 0.0))
        costs = [cost((0.0, 0.0, 0.0), (1.0, 1.0))] * 2
        assert predict(Method.named("quantize"), profile(step), costs, LINK).seconds == pytest.approx(4.0)

    def test_one_communicator_on_cuda_keeps_the_order_of_issue(self) -> None:
        # the second bucket's first collective waits for the first bucket's second, and that for its slow owner
        step = StepTimes(0.0, 0.0, 0.0, (0.0, 0.0))
        costs = [cost((0.0, 5.0, 0.0), (1.0, 1.0)), cost((0.0, 0.0, 0.0), (1.0, 1.0))]
        assert predict(Method.named("quantize"), profile(step, device="cuda"), costs, LINK).seconds == pytest.approx(
            9.0
        )
        assert predict(Method.named("quantize"), profile(step), costs, LINK).seconds == pytest.approx(8.0)

    def test_links_inside_and_between_nodes_work_at_the_same_time(self) -> None:
        step = StepTimes(0.0, 0.0, 0.0, (0.0, 0.0))
        messages = Message(AllToAll, 2.0, "node"), Message(AllReduce, 3.0, "nodes"), Message(AllGather, 1.0, "node")
        costs = [BucketCost(((0.0,),) * 4, messages)] * 2
        method = Method.named("hierarchical_bf16")
        # inside 0..2, between 2..5, inside 5..6; the other one inside 2..4, between 5..8, inside 8..9
        assert predict(method, profile(step), costs, LINK).seconds == pytest.approx(9.0)
        # one stream on CUDA: one bucket after the other
        assert predict(method, profile(step, device="cuda"), costs, LINK).seconds == pytest.approx(12.0)

    def test_the_interval_is_that_of_the_measurements(self) -> None:
        steps = [StepTimes(before, 1.0, 0.0, (1.0,)) for before in (1.0, 2.0, 3.0, 4.0, 5.0)]
        found = predict(Method.named("fp32"), profile(*steps), [cost((0.0, 0.0), (1.0,))], LINK)
        assert (found.low, found.seconds, found.high) == pytest.approx((4.0, 5.0, 6.0))
        row = {
            "method": "fp32",
            "step_ms": 5000.0,
            "low_ms": 4000.0,
            "high_ms": 6000.0,
            "exposed_ms": 1000.0,
            "bytes": 1,
        }
        assert found.as_row() == row

    def test_the_interval_holds_the_prediction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = {0.25: 5.4, 0.5: 5.6, 0.75: 5.5}  # worse values, and more is hidden
        module = importlib.import_module("lightning_compress.planner.predict")
        monkeypatch.setattr(module, "simulate", lambda *given: [Span(Task("backward", "end", {}), 0.0, ends[given[4]])])
        step = StepTimes(1.0, 1.0, 0.0, (1.0,))
        found = predict(Method.named("fp32"), profile(step), [cost((0.0, 0.0), (1.0,))], LINK)
        assert (found.low, found.seconds, found.high) == (5.4, 5.6, 5.6)


class TestLink:
    def test_a_named_link_counts_messages(self) -> None:
        link = GivenLink(bandwidth=1000.0, latency=0.1, world_size=4, host=1e-5)
        assert link.hop(AllReduce, 1000.0).seconds == pytest.approx(6 * 0.1 + 1.0)
        assert link.hop(AllGather, 1000.0).seconds == pytest.approx(3 * 0.1 + 1.0)
        assert link.hop(AllToAll, 1000.0).seconds == pytest.approx(0.1 + 1.0)
        assert link.hop(AllToAll, 1000.0).host == pytest.approx(0.01)
        assert link.describe() == "given: 8 kb/s, 100000 us, 4 ranks"

    def test_a_measured_link_is_interpolated(self) -> None:
        samples = [Sample(10.0, [1.0, 1.0, 5.0], [0.1]), Sample(20.0, [3.0, 3.0, 3.0], [0.1])]
        link = MeasuredLink(2, {AllReduce: samples})
        assert link.hop(AllReduce, 5.0).seconds == 1.0
        assert link.hop(AllReduce, 15.0).seconds == pytest.approx(2.0)
        assert link.hop(AllReduce, 40.0).seconds == pytest.approx(7.0)
        assert link.hop(AllReduce, 10.0, at=1.0).seconds == 5.0


def test_a_backward_never_ends_before_its_last_bucket() -> None:
    steps = [StepTimes(0.0, 1.0, 0.0, (1.0,)), StepTimes(0.0, 2.0, 0.0, (2.0,))]
    middle = profile(*steps).at(0.5)
    assert middle.backward >= middle.ready[-1]
    assert profile(*steps).scaled(2.0).at(1.0) == StepTimes(0.0, 4.0, 0.0, (4.0,))
    assert profile(*steps).device == torch.device("cpu")

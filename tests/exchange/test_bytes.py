"""bytes_sent and bytes_received are what travels: statistics == plan == formula over what torch.distributed was given."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress import Cast, Quantize
from lightning_compress.exchange import collectives
from lightning_compress.exchange.plan import BlockPlan
from tests.exchange.training import batch, make_net, mean_square, wrap
from tests.ranks import run_ranks

WAYS = {
    "two_way": {"compressor": Quantize(4), "exchange": "two_way"},
    "all_gather": {"compressor": Quantize(4), "exchange": "all_gather"},
    "all_reduce": {"compressor": "bf16", "exchange": "all_reduce"},
    "none": {"compressor": "none"},
    "none two_way": {"compressor": "none", "exchange": "two_way"},
}


class Wire:
    """Notes what the collectives of the exchange are given: (bytes sent, bytes received) by the formulas of invariant 10."""

    def __init__(self, monkeypatch):
        self.sent = self.received = Fraction(0)
        self.calls = 0
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        for module, name, note in (
            (dist, "all_reduce", self._all_reduce),
            (collectives, "_all_gather_single", self._all_gather),
            (collectives, "Messages", self._messages),
        ):
            monkeypatch.setattr(module, name, self._noting(getattr(module, name), note))

    def _noting(self, original, note):
        def call(*args, **kwargs):
            sent, received = note(*args)
            self.sent += sent
            self.received += received
            self.calls += 1
            return original(*args, **kwargs)

        return call

    def _all_reduce(self, tensor):
        ring = Fraction(2 * (self._ranks - 1) * tensor.nbytes, self._ranks)
        return ring, ring

    def _all_gather(self, out, own):
        assert out.nbytes == self._ranks * own.nbytes
        return Fraction(out.nbytes - own.nbytes), Fraction(out.nbytes - own.nbytes)

    def _messages(self, sends, receives, _group):
        assert len(sends) == len(receives) == self._ranks
        return tuple(
            Fraction(sum(part.nbytes for rank, part in enumerate(parts) if rank != self._rank))
            for parts in (sends, receives)
        )


class Planned:
    """Notes the plans of buckets as they are made."""

    def __init__(self, monkeypatch):
        self.buckets = []
        original = BlockPlan.bucket

        def bucket(plan, *args):
            self.buckets.append(original(plan, *args))
            return self.buckets[-1]

        monkeypatch.setattr(BlockPlan, "bucket", bucket)

    def sent(self, way):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        total = 0
        for bucket in self.buckets:
            sections = bucket.section_nbytes
            if "two_way" in way:
                total += sum(sections) - sections[rank] + (ranks - 1) * max(sections)
            elif way == "all_gather":
                total += (ranks - 1) * sections[0]
            else:
                # the header of an all-reduce is one number per parameter
                total += Fraction(2 * (ranks - 1), ranks) * (sections[0] - bucket.header_nbytes + 2 * len(bucket.names))
        return total


def two_steps(way):
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire, planned = Wire(monkeypatch), Planned(monkeypatch)
        ddp, exchange = wrap(make_net(), **WAYS[way])
        steps = []
        for step in range(2):
            before = (wire.sent, wire.received, wire.calls)
            planned.buckets.clear()
            ddp.zero_grad()
            mean_square(ddp, batch(step)).backward()
            figures = tuple(
                now - then for now, then in zip((wire.sent, wire.received, wire.calls), before, strict=False)
            )
            steps.append((exchange.stats()["last"], figures, planned.sent(way)))
        exchange.close()
        elements = sum(p.numel() for p in ddp.parameters())
        return steps, exchange.stats(), elements


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_statistics_are_the_plan_are_the_wire(way, ranks):
    for steps, total, elements in run_ranks(two_steps, ranks, way):
        for (last, (sent, received, calls), planned), buckets in zip(steps, (1, 4), strict=True):
            assert last["bytes_sent"] == round(sent)
            assert last["bytes_received"] == round(received)
            assert sent > 0
            assert calls == buckets * (2 if "two_way" in way else 1)
            if way != "none":
                assert planned == sent
            assert last["dense_bytes"] == round(Fraction(2 * (ranks - 1) * 4 * elements, ranks))
            assert last["ratio"] == pytest.approx(last["dense_bytes"] / float(sent), rel=1e-4)
            if way == "none":
                assert last["ratio"] == 1.0
        assert total["steps"] == 2
        # totals are exact sums; each step's integers are rounded
        for name in ("bytes_sent", "bytes_received", "dense_bytes"):
            assert abs(total[name] - sum(last[name] for last, *_ in steps)) <= 1


def figures_of_odd_models(settings):
    """Buckets whose share of a ring is not a whole number; bf16; a sparse one."""
    found = {}
    for name, model in {
        "odd": nn.Linear(20, 5, bias=False),
        "one element": nn.ParameterList([nn.Parameter(torch.ones(1))]),
        "bf16": nn.Linear(20, 7).bfloat16(),
        "sparse": nn.Embedding(50, 7, sparse=True),
    }.items():
        ddp, exchange = wrap(nn.ModuleList([model]), **settings)
        p = next(model.parameters())
        torch.manual_seed(dist.get_rank())
        if name == "sparse":
            loss = model(torch.randint(0, 50, (11,))).sum()
        else:
            loss = (p * torch.randn_like(p)).sum() + sum(q.sum() for q in model.parameters())
        ddp.forward = lambda loss=loss: loss
        ddp.reducer.prepare_for_backward([])
        loss.backward()
        stats = exchange.stats()
        found[name] = stats["bytes_sent"], stats["dense_bytes"], stats["ratio"]
        exchange.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_none_has_ratio_one(ranks):
    for found in run_ranks(figures_of_odd_models, ranks, {"compressor": "none"}):
        for sent, dense, ratio in found.values():
            assert sent == dense
            assert (sent > 0) == (ranks > 1)
            assert ratio == 1.0


def one_step(settings):
    ddp, exchange = wrap(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5)), **settings)
    ddp(batch(0, 300)).sum().backward()
    expected = {name: p.grad.clone() for name, p in ddp.module.named_parameters()}
    exchange.close()
    return exchange.stats(), exchange.state_dict(), expected


def test_traffic_of_two_way_does_not_grow_with_the_ranks():
    sent = {n: max(stats["bytes_sent"] for stats, *_ in run_ranks(one_step, n, WAYS["two_way"])) for n in (2, 3, 4)}
    for ranks, nbytes in sent.items():
        assert nbytes / (2 * (ranks - 1) / ranks) == pytest.approx(sent[2], rel=0.05)
    gathered = {n: run_ranks(one_step, n, WAYS["all_gather"])[0][0]["bytes_sent"] for n in (2, 4)}
    assert gathered[4] == 3 * gathered[2]


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_sends_nothing_and_changes_nothing(way):
    ((stats, state, gradients),) = run_ranks(one_step, 1, WAYS[way])
    ((_, _, expected),) = run_ranks(one_step, 1, WAYS["none"])
    assert (stats["bytes_sent"], stats["bytes_received"], stats["dense_bytes"], stats["ratio"]) == (0, 0, 0, 1.0)
    assert stats["steps"] == 1
    assert state["worker"] == state["owner"] == {}
    assert all(gradients[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("compressor", "at_least"), [("quantize", 7), (Cast("bf16"), 1.9), (Quantize(8), 3.8)], ids=str
)
def test_compression_happens_on_gloo(compressor, at_least):
    for stats, *_ in run_ranks(one_step, 2, {"compressor": compressor}):
        assert at_least < stats["ratio"] < 9


def accumulate(settings):
    ddp, exchange = wrap(make_net(), **settings)
    micro_batches, sent = 4, []
    for step in range(3):
        ddp.zero_grad()
        for part in range(micro_batches):
            ddp.require_backward_grad_sync = part == micro_batches - 1
            mean_square(ddp, batch(micro_batches * step + part)).backward()
            sent.append(exchange.stats()["bytes_sent"])
    exchange.close()
    one = {name: p.grad.clone() for name, p in ddp.module.named_parameters()}
    return sent, exchange.stats()["steps"], one


@pytest.mark.parametrize("way", WAYS)
def test_accumulation_sends_once_per_optimizer_step(way):
    for sent, steps, _ in run_ranks(accumulate, 2, WAYS[way]):
        assert steps == 3
        assert sent[:3] == [0, 0, 0]
        assert len(set(sent)) == 4  # nothing, and one amount more after each fourth micro-batch
        assert sent[3::4] == sorted(set(sent))[1:]

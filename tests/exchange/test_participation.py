"""What never had a gradient never moves; what takes no part sends nothing and touches no memory (invariant 5)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress import DensityWarmup, Quantize, TopK
from lightning_compress.compressors import compressor_names
from lightning_compress.testing import SimulatedExchange
from tests.exchange.training import Ledger, batch, content, residuals, wrap
from tests.ranks import run_ranks

WAYS = {
    "two_way": {"compressor": Quantize(4), "exchange": "two_way"},
    "all_gather": {"compressor": Quantize(4), "exchange": "all_gather"},
    "all_reduce": {"compressor": "none", "exchange": "all_reduce"},
    "none": {"compressor": "none"},
}


class Tokens(nn.Module):
    """Words by number; only the first half of the table is ever used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(60, 40)
        self.head = nn.Linear(40, 30)

    def forward(self, x):
        return self.head(self.table((x.abs() * 10).long().clamp_max(29))).square().mean()


def rows_that_moved():
    moved = {}
    for name in compressor_names():
        for way in ("auto", "all_gather", "two_way"):
            ddp, exchange = wrap(Tokens(), compressor=name, exchange=way)
            start = ddp.module.table.weight.detach().clone()
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            for step in range(6):
                optimizer.zero_grad()
                ddp(batch(step)).backward()
                optimizer.step()
            changed = (ddp.module.table.weight != start).any(dim=1)
            moved[f"{name} {way}"] = (int(changed[:30].sum()), int(changed[30:].sum()))
            exchange.close()
    return moved


@pytest.mark.filterwarnings("ignore:.*is biased")
def test_a_row_without_gradient_never_moves():
    for moved in run_ranks(rows_that_moved, 2):
        assert {case: rows for case, rows in moved.items() if rows[1]} == {}
        assert {case: rows for case, rows in moved.items() if rows[0] < 5} == {}  # the others do


class Branches(nn.Module):
    """A trunk, and two branches of which a step may use any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(20, 60)
        self.left = nn.Linear(60, 40)
        self.right = nn.Linear(60, 40)

    def forward(self, x, branches):
        x = torch.tanh(self.trunk(x))
        return sum((getattr(self, name)(x).square().mean() for name in branches), 0.0 * x.sum())


def wrap_branches(settings, **ddp):
    return wrap(Branches(), {"find_unused_parameters": True, **ddp}, **settings)


def skip_a_branch(settings):
    ddp, exchange = wrap_branches(settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(step), ["left", "right"]).backward()
        optimizer.step()
    before, weights = residuals(exchange), content(ddp.module.right.parameters())
    for step in range(3, 6):
        optimizer.zero_grad()
        ddp(batch(step), ["left"]).backward()
        optimizer.step()
    gradients = [p.grad is None for p in ddp.module.right.parameters()]
    same_weights = content(ddp.module.right.parameters()) == weights
    after = residuals(exchange)
    return (
        gradients,
        same_weights,
        {name: (bool(before[name].any()), torch.equal(before[name], after[name])) for name in before},
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_no_rank_reached_keeps_its_value_and_its_memories(way):
    for gradients, same_weights, memories in run_ranks(skip_a_branch, 2, WAYS[way]):
        assert gradients == [True, True]
        assert same_weights
        right = {name: kept for name, kept in memories.items() if name.endswith("right.weight")}
        assert all(kept == (True, True) for kept in right.values())  # something is remembered, and it stayed
        left = {name: kept for name, kept in memories.items() if name.endswith("left.weight")}
        assert all(kept == (True, False) for kept in left.values())
        assert bool(right) == bool(left) == (way in ("two_way", "all_gather"))


def reach_on_one_rank(settings):
    ddp, exchange = wrap_branches(settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ledger = Ledger(ddp, exchange)
    untouched = []
    for step in range(6):
        branches = ["left", "right"] if step < 2 or dist.get_rank() == 0 else ["left"]
        before = residuals(exchange)
        optimizer.zero_grad()
        ledger.expect(ddp.module(batch(step), branches))
        ddp(batch(step), branches).backward()
        ledger.note()
        optimizer.step()
        after = residuals(exchange)
        untouched.append([torch.equal(before[n], after[n]) for n in before if n.startswith("worker right")])
    return content(ddp.parameters()), ledger.errors(), untouched


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["two_way", "all_gather"])
def test_a_parameter_reached_on_one_rank_only_loses_nothing(way, ranks):
    found = run_ranks(reach_on_one_rank, ranks, WAYS[way])
    assert len({parameters for parameters, *_ in found}) == 1
    for rank, (_, errors, untouched) in enumerate(found):
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}
        # what a rank owes of a parameter waits until its backward reaches the parameter again
        assert all(all(kept) == (rank > 0) for kept in untouched[2:])


def mean_of_one_rank(settings):
    ddp, _exchange = wrap_branches(settings)
    branches = ["left", "right"] if dist.get_rank() == 0 else ["left"]
    x = torch.ones(8, 20)
    expected = torch.autograd.grad(ddp.module(x, ["right"]), ddp.module.right.weight)[0] / dist.get_world_size()
    ddp(x, branches).backward()
    return float((ddp.module.right.weight.grad - expected).norm() / expected.norm())


@pytest.mark.parametrize("way", WAYS)
def test_absent_ranks_count_in_the_mean(way):
    assert (
        max(run_ranks(mean_of_one_rank, 3, WAYS[way])) < 0.3
    )  # 4 bits are rough; a wrong divisor would be off by half and more


def stale_gradients(settings, view):
    """GAN-like: one backward for each branch, no zero_grad in between."""
    ddp, exchange = wrap_branches(settings, gradient_as_bucket_view=view)
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(step), ["left", "right"]).backward()
    before = residuals(exchange)
    gradient = ddp.module.right.weight.grad.clone()
    ddp(batch(2), ["left"]).backward()
    kept = torch.equal(ddp.module.right.weight.grad, gradient)
    after = residuals(exchange)
    return kept, all(torch.equal(before[name], after[name]) for name in before if "right" in name)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket view"])
@pytest.mark.parametrize("way", WAYS)
def test_an_old_gradient_is_not_sent_again(way, view):
    assert run_ranks(stale_gradients, 2, WAYS[way], view) == [(True, True)] * 2


def zero_gradient(settings):
    ddp, _exchange = wrap_branches(settings)
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(step), ["left", "right"]).backward()
    ddp.zero_grad()
    (0.0 * ddp(batch(2), ["left", "right"])).backward()
    return bool(ddp.module.right.weight.grad.any())


@pytest.mark.parametrize("way", ["two_way", "all_gather"])
def test_a_zero_gradient_takes_part_and_its_residual_goes_on_being_sent(way):
    assert run_ranks(zero_gradient, 2, WAYS[way]) == [True, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": TopK(0.01), "schedule": DensityWarmup((0.25, 0.125), steps=1)},  # a plan for every stage
        {"compressor": Quantize(4), "exchange": "hierarchical", "ranks_per_node": 2},
    ],
    ids=["warm-up", "hierarchical"],
)
def test_a_parameter_that_is_switched_off_for_a_while_keeps_its_place(settings):
    found = []
    for switched in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30))
        exchange = SimulatedExchange(net, 4, **settings)
        means = []
        for step in range(4):
            # as a GAN's two optimizers do, each in its turn
            off = step % 2
            net[off].requires_grad_(not switched)
            gradients = {
                name: torch.randn_like(p) for name, p in net.named_parameters() if not name.startswith(str(off))
            }
            means.append(exchange.mean([gradients] * 4))
            net[off].requires_grad_(True)
        found.append(content(mean for of_step in means for mean in of_step.values()))
    assert found[0] == found[1]

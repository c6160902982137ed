"""Under a loss scaler memories hold unscaled values, and a skipped step has not been (invariant 6)."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress import Cast, LinearDithering, NaturalDithering, OneBit, Quantize, Ternary, TopK
from tests.exchange.training import batch, content, make_net, mean_square, residuals, wrap
from tests.ranks import run_ranks

WAYS = {
    "two_way": {"compressor": Quantize(4), "exchange": "two_way"},
    "two_way_per_tensor": {"compressor": Quantize(4, block_size=None), "exchange": "two_way"},
    "all_gather": {"compressor": Quantize(4), "exchange": "all_gather"},
    "all_reduce": {"compressor": Cast("bf16"), "exchange": "all_reduce"},
    "none": {"compressor": "none"},
}
OVERFLOW = 3
"""The step at which the gradients of the last rank overflow."""


def sgd(model, fused=False):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)


def grad_scaler():
    # grows at the second and fourth good step, halves at the overflow: the scale moves both ways
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def overflowing(loss):
    """Finite, with gradients that are not once they are scaled: on one rank."""
    return loss * 1e38 if dist.get_rank() == dist.get_world_size() - 1 else loss


def train_with_scaler(settings, fused):
    scaler, scales, undone = grad_scaler(), [], None
    ddp, exchange = wrap(make_net(), grad_scaler=scaler, **settings)
    optimizer = sgd(ddp, fused)
    for step in range(8):
        optimizer.zero_grad()
        loss = mean_square(ddp, batch(step))
        if step == OVERFLOW:
            loss, before = overflowing(loss), (content(ddp.parameters()), residuals(exchange))
        scaler.scale(loss).backward()
        if step == OVERFLOW:
            assert not torch.isfinite(ddp.module.second.weight.grad).all()  # on every rank
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == OVERFLOW:
            parameters, memories = before
            after = residuals(exchange)
            undone = content(ddp.parameters()) == parameters, all(torch.equal(memories[n], after[n]) for n in memories)
    return scales, undone, content([*ddp.parameters(), *residuals(exchange).values()])


def train_without_scaler(settings, fused):
    ddp, exchange = wrap(make_net(), **settings)
    optimizer = sgd(ddp, fused)
    for step in range(8):
        if step != OVERFLOW:
            optimizer.zero_grad()
            mean_square(ddp, batch(step)).backward()
            optimizer.step()
    return content([*ddp.parameters(), *residuals(exchange).values()])


def with_and_without_scaler(settings, fused):
    return train_with_scaler(settings, fused), train_without_scaler(settings, fused)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_on_one_rank_leaves_no_trace(way, fused):
    # scales are powers of two, so scaling is exact: the run must equal one without a scaler and without that step
    for (scales, undone, found), expected in run_ranks(with_and_without_scaler, 2, WAYS[way], fused):
        assert scales == [1024, 2048, 2048, 1024, 1024, 2048, 2048, 4096]
        assert undone == (True, True)
        assert found == expected


def overflow_in_half_precision():
    """The last rank's gradients are the larger ones: there the scale is too large for float16, until it has been lowered."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 110), nn.ReLU(), nn.Linear(110, 5))
    ddp, exchange = wrap(model, grad_scaler=scaler, compressor=Quantize(4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    weight = 50.0 if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    losses, skipped = [], []
    for step in range(40):
        x = batch(step % 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = ddp(x)
        loss = (y.float() - x[:, :5]).square().mean()
        scaler.scale(weight * loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        losses.append(float(loss))
    finite = all(torch.isfinite(memory).all() for memory in residuals(exchange).values())
    return losses, skipped, finite, content(ddp.parameters())


def test_training_recovers_from_overflows_in_half_precision():
    first, second = run_ranks(overflow_in_half_precision, 2)
    assert first[1] == second[1]
    assert 2 <= sum(first[1]) <= 15  # it did overflow, and found its scale
    assert not any(first[1][20:])
    assert first[3] == second[3]
    assert first[2]
    assert second[2]
    assert sum(second[0][-4:]) < 0.5 * sum(second[0][:4])  # the rank with the weight learns


def overflow_while_accumulating(settings, scaled):
    """Two exchanges before each optimizer step; in the skipped one the first of them overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=scaled)
    ddp, exchange = wrap(make_net(), grad_scaler=scaler, **settings)
    optimizer = sgd(ddp)
    for step in range(6):
        if step == OVERFLOW and not scaled:
            continue
        optimizer.zero_grad()
        for part in range(2):
            loss = mean_square(ddp, batch(10 * step + part))
            scaler.scale(overflowing(loss) if step == OVERFLOW and part == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return content([*ddp.parameters(), *residuals(exchange).values()])


@pytest.mark.parametrize("way", ["two_way", "all_gather"])
def test_all_exchanges_of_a_skipped_step_are_forgotten(way):
    scaled, plain = (run_ranks(overflow_while_accumulating, 2, WAYS[way], scaled) for scaled in (True, False))
    assert scaled == plain


class Pair(nn.Module):
    """Two networks that are trained by an optimizer each, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.one, self.two = make_net(), make_net()

    def forward(self, x, which):
        return getattr(self, which)(x)


def overflow_of_one_optimizer(settings, scaled, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=scaled)
    ddp, exchange = wrap(Pair(), {"find_unused_parameters": True}, grad_scaler=scaler, **settings)
    optimizers = {"one": sgd(ddp.module.one, fused), "two": sgd(ddp.module.two, fused)}
    for step in range(6):
        for which, optimizer in optimizers.items():
            overflows = step == OVERFLOW and which == "one"
            if overflows and not scaled:
                continue
            x = batch(step)
            optimizer.zero_grad()
            loss = (ddp(x, which) - x[:, :5]).square().mean()
            scaler.scale(overflowing(loss) if overflows else loss).backward()
            scaler.step(optimizer)
        scaler.update()
    return content([*ddp.parameters(), *residuals(exchange).values()])


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_one_of_two_optimizers_skips_is_forgotten_for_its_parameters_only(fused):
    scaled, plain = (
        run_ranks(overflow_of_one_optimizer, 2, WAYS["two_way"], scaled, fused) for scaled in (True, False)
    )
    assert scaled == plain


def nan_without_scaler(settings, value):
    model = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 5))  # 300 x 300 has several pieces
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.05)
    ddp, exchange = wrap(model, **settings)
    poison = [value if dist.get_rank() == 0 else 1.0]
    # one element, in the second of the tensor's pieces
    model[1].weight.register_hook(lambda g: g.index_put((torch.tensor(250), torch.tensor(7)), torch.tensor(poison[0])))
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            ddp.zero_grad()
            mean_square(ddp, batch(step)).backward()
            seen.append([bool(torch.isfinite(p.grad).any()) for p in ddp.parameters()])
            poison[0] = value if step == 0 and dist.get_rank() == 1 else 1.0
    said = [str(w.message) for w in caught if "not finite" in str(w.message)]
    return said, seen, [name for name, memory in residuals(exchange).items() if not memory.abs().max() < 1e6]


PER_TENSOR = {
    f"{compressor.name}_per_tensor": {"compressor": compressor, "memory": "error_feedback", "exchange": "two_way"}
    for compressor in (
        OneBit(block_size=None),
        Ternary(block_size=None),
        Cast("fp8", block_size=None),
        LinearDithering(4, norm="l2", block_size=None),
        NaturalDithering(4, block_size=None),
        TopK(0.01, block_size=None),
    )
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", [way for way in {**WAYS, **PER_TENSOR} if way != "none"])
def test_a_non_finite_element_reaches_all_ranks_and_stays_in_no_memory(way, value):
    (said, *first), (nothing, *second) = run_ranks(nan_without_scaler, 2, {**WAYS, **PER_TENSOR}[way], value)
    assert first == second
    seen, poisoned = first
    weight = 2
    # the whole parameter, on both ranks, and no other; in the second step it is the other rank's
    assert seen[0] == seen[1] == [i != weight for i in range(6)]
    assert seen[2] == [True] * 6
    assert poisoned == []
    assert len(said) == 1  # of two steps
    assert "At step 0 the gradient of '1.weight' was not finite" in said[0]
    assert nothing == []

"""What must hold after every step, whatever the exchange (DESIGN.md, invariants 1 to 4)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress import Cast, LinearDithering, NaturalDithering, RandomK
from tests.exchange.training import EXCHANGES, batch, content, make_net, train, wrap
from tests.ranks import run_ranks


def train_every_way():
    found = {}
    for name, settings in EXCHANGES.items():
        ddp, exchange = wrap(make_net(), **settings)
        found[name] = content(train(ddp, 5))
        assert len(exchange.layouts) == 5  # one bucket in the first step, four from then on
        exchange.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_hold_bit_identical_parameters(ranks):
    first, *others = run_ranks(train_every_way, ranks)
    for other in others:
        assert {name for name in first if first[name] != other[name]} == set()
    # they did train, and differently: the codes differ
    assert len({first[name] for name in first if name != "all_reduce"}) == len(first) - 1


def gradients_of_a_known_mean():
    """On rank r every gradient is (r + 1) x (+1 or -1); returns how far each exchange is from the mean, relatively."""
    errors = {}
    ways = {**EXCHANGES, "fp16": {"compressor": Cast("fp16")}, "bf16": {"compressor": Cast("bf16")}}
    for name, settings in ways.items():
        ddp, exchange = wrap(make_net(), **settings)
        signs = [torch.where(torch.arange(p.numel()) % 3 == 0, 1.0, -1.0).view_as(p) for p in ddp.parameters()]
        mean = (dist.get_world_size() + 1) / 2
        for _ in range(2):
            ddp.zero_grad()
            unused = 0.0 * ddp(batch(0)).sum()
            loss = sum(((p - p.detach()) * sign).sum() for p, sign in zip(ddp.parameters(), signs, strict=True))
            ((dist.get_rank() + 1) * loss + unused).backward()
            found = [
                (p.grad / (mean * sign) - 1).abs().max()
                for p, sign in zip(ddp.parameters(), signs, strict=True)
                if p.numel()
            ]
            errors[name] = max(errors.get(name, 0.0), float(max(found)))
        exchange.close()
    return errors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_averaged_exactly_once(ranks):
    for errors in run_ranks(gradients_of_a_known_mean, ranks):
        assert errors["none"] <= 1e-6
        assert {name: error for name, error in errors.items() if error > 0.01} == {}


def decode_equal_gradients():
    """All ranks have the same gradient at every step, and nothing is remembered: only the random numbers differ."""
    found = {}
    for name, compressor in {
        "dithering": LinearDithering(2, block_size=1024),
        "natural": NaturalDithering(3, block_size=1024),
        "randomk": RandomK(1 / 8, unbiased=True),
    }.items():
        exchange_name = "auto" if name == "randomk" else "all_gather"
        ddp, exchange = wrap(
            nn.Linear(50, 50, bias=False), compressor=compressor, memory="none", exchange=exchange_name
        )
        gradient = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
        decoded = []
        for _ in range(3):
            ddp.zero_grad()
            (0.0 * ddp(torch.ones(1, 50)).sum() + (ddp.module.weight * gradient).sum()).backward()
            decoded.append(ddp.module.weight.grad.clone())
        found[name] = decoded
        exchange.close()
    return found


@pytest.mark.filterwarnings("ignore:.*sends .* times the bytes")
def test_random_numbers_differ_between_steps_and_where_they_should_between_ranks():
    alone, both = run_ranks(decode_equal_gradients, 2)[0], run_ranks(decode_equal_gradients, 4)[0]
    for name in ("dithering", "natural", "randomk"):
        assert not alone[name][0].equal(alone[name][1])
        assert not alone[name][1].equal(alone[name][2])
    # the mean of several draws lies between the levels of one
    for name in ("dithering", "natural"):
        assert both[name][1].abs().unique().numel() > 1.5 * alone[name][1].abs().unique().numel()
    # random-k's ranks share their seed: no more elements than one rank sends
    assert int((both["randomk"][1] != 0).sum()) <= 2500 / 8 + 8

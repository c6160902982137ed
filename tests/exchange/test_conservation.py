"""Nothing is lost: applied updates + mean worker residuals + owner residuals = true mean gradients (invariant 3)."""

from __future__ import annotations

import pytest
import torch

from lightning_compress import Quantize
from lightning_compress.compressors import compressor_names, get_compressor
from tests.exchange.training import Ledger, batch, make_net, mean_square, wrap
from tests.ranks import run_ranks


def biased_compressors():
    everything = [get_compressor(name) for name in compressor_names()]
    return [Quantize(2, block_size=None), *(c for c in everything if not c.unbiased)]


def conservation_errors(dtype, steps):
    """{case: error}; six steps cross DDP's bucket rebuild, from one bucket to several."""
    errors = {}
    for compressor in biased_compressors():
        for exchange_name in ("two_way", "all_gather"):
            ddp, exchange = wrap(
                make_net(dtype), compressor=compressor, memory="error_feedback", exchange=exchange_name
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
            ledger = Ledger(ddp, exchange)
            for step in range(steps):
                x = batch(step, dtype=dtype)
                optimizer.zero_grad()
                ledger.expect(mean_square(ddp.module, x))
                mean_square(ddp, x).backward()
                ledger.note()
                optimizer.step()
            layouts = len(exchange.layouts)
            errors[f"{compressor!r} {exchange_name}, {layouts} bucket layouts"] = max(ledger.errors().values())
            exchange.close()
    return errors


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=str)
def test_what_is_not_applied_is_remembered(ranks, dtype, tolerance):
    first, *others = run_ranks(conservation_errors, ranks, dtype, 6)
    assert all(other == first for other in others)
    assert {case: error for case, error in first.items() if error > tolerance} == {}
    assert all("5 bucket layouts" in case for case in first)  # one in the first step, four from then on


def error_without_memory():
    ddp, exchange = wrap(make_net(), compressor=Quantize(4), memory="none", exchange="all_gather")
    ledger = Ledger(ddp, exchange)
    ledger.expect(mean_square(ddp.module, batch(0)))
    mean_square(ddp, batch(0)).backward()
    ledger.note()
    return max(ledger.errors().values())


@pytest.mark.filterwarnings("ignore:.*is biased")
def test_the_ledger_sees_what_is_lost_without_a_memory():
    assert all(error > 1e-2 for error in run_ranks(error_without_memory, 2))

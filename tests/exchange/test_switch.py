"""Other settings from one step to the next: nothing that was owed is lost."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_compress import GradientExchange
from lightning_compress.exchange.debt import Debt
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.kernels.table import ABSENT, PRESENT
from lightning_compress.testing.simulation import SimulatedExchange
from tests.exchange.training import batch, make_net, mean_square, wrap
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("exchange", "workers", "size"), [("two_way", 3, 1), ("all_gather", 3, 1), ("hierarchical", 6, 2)]
)
def test_what_is_owed_is_in_the_mean_of_the_next_gradients(exchange: str, workers: int, size: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30)).double()
    simulated = SimulatedExchange(net, workers, "quantize", exchange=exchange, ranks_per_node=size)
    names = tuple(name for name, _ in net.named_parameters())
    applied = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    true = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for _ in range(5):
        gradients = [{name: torch.randn_like(p) for name, p in net.named_parameters()} for _ in range(workers)]
        for name, mean in simulated.mean(gradients).items():
            applied[name] += mean
            true[name] += sum(g[name] for g in gradients) / workers
    before = max(float((true[name] - applied[name]).abs().max()) for name in names)
    assert before > 0.01

    buffers = [torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64) for _ in range(workers)]
    debts = [Debt(worker) for worker in simulated.workers]
    status = torch.full((len(names),), PRESENT, dtype=torch.uint8)
    status[1] = ABSENT
    for debt, buffer in zip(debts, buffers, strict=True):
        debt.repay(names, status, buffer, 1.0)
        assert not debt.paid()  # the second parameter took no part
    assert not buffers[0][50 * 70 : 50 * 70 + 70].any()
    for debt, buffer in zip(debts, buffers, strict=True):
        debt.repay(names, torch.full_like(status, PRESENT), buffer, 1.0)
        assert debt.paid()
    left = torch.cat([(true[name] - applied[name]).flatten() for name in names])
    torch.testing.assert_close(sum(buffers) / workers, left, rtol=0, atol=1e-12)


def test_a_payment_in_a_skipped_step_has_not_happened() -> None:
    net = nn.Linear(8, 8)
    old = RankExchange(ExchangeSettings.make("quantize"), net, 0, Nodes.alone(2), ExchangeStats(), transactional=True)
    names, status = tuple(old.parameters), torch.full((2,), PRESENT, dtype=torch.uint8)
    old.memories.write("worker", "weight", net.weight, torch.ones(64))
    old.memories.watch(4.0)
    debt = Debt(old)
    for scale, taken in ((4.0, False), (2.0, True)):  # the scaler halves its scale when it skips a step
        buffer = torch.zeros(72)
        debt.repay(names, status, buffer, scale)
        assert buffer.tolist() == [scale] * 64 + [0.0] * 8
        if taken:
            old.memories.note_step(names, True)
        old.memories.settle(2.0)
        assert debt.paid() == taken


def switched(to: str) -> tuple[list[float], int, int]:
    """Distances to a run with exact gradients: before the switch, after it; and the debts left."""
    net, exact = make_net(torch.float64), make_net(torch.float64)
    ddp, exchange = wrap(net, compressor="quantize")
    reference, dense = wrap(exact, compressor="none")
    # the same gradients in both: those of a model that stands still
    frozen = make_net(torch.float64)
    distances = []
    for step in range(4):
        if step == 3:
            before = weakref.ref(exchange._runtime)
            exchange.switch({"compressor": to}, ddp)
            gc.collect()
            assert before() is None  # nothing holds the old pipeline while the model stays wrapped
        for wrapped in (ddp, reference):
            state = {k: v.clone() for k, v in wrapped.module.state_dict().items()}
            wrapped.module.load_state_dict(frozen.state_dict())
            wrapped.zero_grad()
            mean_square(wrapped, batch(step, dtype=torch.float64)).backward()
            wrapped.module.load_state_dict(state)
            torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
        pairs = zip(net.parameters(), exact.parameters(), strict=True)
        distances.append(max(float((a - b).abs().max()) for a, b in pairs if a.numel()))
    sent = exchange.stats()["last"]["bytes_sent"]
    assert exchange._runtime is not None
    exchange._runtime.begin_step(4)
    debts = len(exchange._runtime.debts)
    assert exchange.stats()["steps"] == 5  # they go on
    exchange.close()
    dense.close()
    return distances, sent, debts


def test_switching_between_real_processes() -> None:
    (distances, dense, debts), other = run_ranks(switched, 2, "none")
    assert distances == other[0]
    assert distances[2] > 1e-4
    assert distances[3] < 1e-12  # the first exact exchange pays everything back
    assert debts == 0
    parameters = sum(p.numel() for p in make_net().parameters())
    assert dense == 8 * parameters


def test_switching_needs_an_attached_exchange() -> None:
    with pytest.raises(RuntimeError, match="needs an attached exchange"):
        GradientExchange().switch({"compressor": "none"}, None)  # type: ignore[arg-type]

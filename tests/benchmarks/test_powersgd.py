"""benchmarks/convergence/powersgd.py is torch's PowerSGD."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.powersgd import PowerSGD
from lightning_compress.testing import simulate
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks

STEPS, RANK, WORKERS = 12, 2, 2
MATRICES = {"5.weight": (10, 300), "2.weight": (300, 200), "0.weight": (200, 100)}
"""In the order in which their gradients are ready, which is that of the hook's random numbers."""


def train_with_torchs_hook() -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(make_model(torch.float64))  # one bucket
    model.register_comm_hook(
        PowerSGDState(None, RANK, start_powerSGD_iter=2, orthogonalization_epsilon=0), powerSGD_hook
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batches in make_batches(WORKERS, STEPS, torch.float64):
        optimizer.zero_grad()
        loss_of(model, batches[dist.get_rank()]).backward()
        optimizer.step()
    return model.module.state_dict()


def test_it_trains_as_torchs_hook_does_and_counts_what_that_sends() -> None:
    # In float64: error feedback makes the factors chaotic, and float32's rounding, which depends on the machine, grows in
    # these steps to what an error in the algorithm might be.
    model = make_model(torch.float64)
    exchange = PowerSGD(model, WORKERS, RANK, start_step=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        for name, (_, m) in MATRICES.items():
            exchange._matrices[name].q = torch.randn(m, RANK, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    simulate(model, optimizer, loss_of, make_batches(WORKERS, STEPS, torch.float64), exchange)
    theirs = run_ranks(train_with_torchs_hook, WORKERS)[0]
    for name, value in model.state_dict().items():
        assert torch.allclose(value, theirs[name], rtol=1e-7, atol=1e-10), name
    whole = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    numbers = whole + RANK * sum(n + m for n, m in MATRICES.values())
    assert exchange.stats()["last"]["bytes_sent"] == 8 * numbers  # a ring of two sends each number once
    dense = 8 * sum(p.numel() for p in model.parameters())
    assert exchange.stats()["bytes_sent"] == (STEPS - 2) * 8 * numbers + 2 * dense
    assert exchange.stats()["dense_bytes"] == STEPS * dense


def test_a_matrix_that_would_not_send_half_travels_whole() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    gradients = [{"weight": torch.randn(8, 8)} for _ in range(2)]
    mean = (gradients[0]["weight"] + gradients[1]["weight"]) / 2
    assert torch.allclose(PowerSGD(model, 2, 2).mean(gradients)["weight"], mean)  # 2 x 2 x (8 + 8) = 64
    low_rank = PowerSGD(model, 2, 1).mean(gradients)["weight"]
    assert torch.linalg.matrix_rank(low_rank) == 1


def test_what_is_left_out_comes_later() -> None:
    torch.manual_seed(0)
    exchange = PowerSGD(torch.nn.Linear(8, 8, bias=False), 2, 1)
    gradient = torch.randn(8, 8)
    exchanges = 1_000
    sent = sum(exchange.mean([{"weight": gradient}] * 2)["weight"] for _ in range(exchanges))
    (error, _) = exchange._matrices["weight"].errors
    assert torch.allclose(sent + error, exchanges * gradient, rtol=1e-4, atol=0.1)
    assert torch.allclose(sent / exchanges, gradient, atol=0.1)  # what is owed does not grow with the exchanges

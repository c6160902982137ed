"""On the CPU an owner works through its blocks in pieces: what comes out does not depend on their size."""

from __future__ import annotations

import torch

from lightning_compress import Quantize
from lightning_compress.exchange import topology
from lightning_compress.testing import SimulatedExchange

STEPS, WORKERS, BLOCK = 3, 2, 64


def exchanged(spoiled):
    """Every step's means, and what the owners remember at the end; ``spoiled``: a sum that only its owner sees overflow."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 96), torch.nn.Linear(96, 30))
    exchange = SimulatedExchange(model, WORKERS, Quantize(4, block_size=BLOCK), "error_feedback", "two_way", dense=0)
    generator = torch.Generator().manual_seed(0)
    means = []
    for step in range(STEPS):
        gradients = [
            {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
            for _ in range(WORKERS)
        ]
        if spoiled and step == 1:
            for each in gradients:
                each["0.weight"][3, 7] = 3e38
        means.append(exchange.mean(gradients))
    owed = [
        worker.memories.read("owner", name, torch.float32)
        for worker in exchange.workers
        for name in worker.plan.owner_sizes(worker.rank)
    ]
    pieces = max(len(each._shard) for worker in exchange.workers for each in worker._topologies.values())
    return means, owed, pieces


def test_the_size_of_the_pieces_changes_nothing(monkeypatch):
    for spoiled in (False, True):
        whole_means, whole_owed, one = exchanged(spoiled)
        with monkeypatch.context() as patched:
            patched.setattr(topology, "_PIECE", 5 * BLOCK)
            means, owed, many = exchanged(spoiled)
        assert (one, many > 5) == (2, True)  # weights and biases
        for mean, whole in zip(means, whole_means, strict=True):
            assert all(torch.equal(mean[name].nan_to_num(7.0), whole[name].nan_to_num(7.0)) for name in whole)
        assert all(map(torch.equal, owed, whole_owed))
        assert whole_means[1]["0.weight"].isnan().all().item() is spoiled

"""A small model and reproducible batches that several tests train on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A classifier with weights of several blocks, biases and a batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 10)
    ).to(dtype)


def make_batches(world_size: int, steps: int, dtype: torch.dtype = torch.float32) -> list[list[Batch]]:
    """For every step one batch per rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(16, 100, generator=generator).to(dtype), torch.randint(0, 10, (16,), generator=generator))
            for _ in range(world_size)
        ]
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

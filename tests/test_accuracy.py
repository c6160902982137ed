"""Every preset learns scikit-learn's digits in sixty steps: guards against breakage, proves nothing about accuracy."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_compress.memory import MomentumCorrection
from lightning_compress.optim import DGCSGD
from lightning_compress.presets import PRESETS
from lightning_compress.recipes.images import digits, to_network_input
from lightning_compress.testing import SimulatedExchange, simulate

Batch = tuple[Tensor, Tensor]
STEPS, WORKERS, BATCH_SIZE = 60, 2, 32
FLOORS = {"_onebit": 72.0, "_clan": 72.0, "_topk": 72.0, "_randomk": 58.0, "_dgc": 58.0}
"""In per cent; all others 82, of which dense training reaches 90. Sparse codes owe much after so few steps."""


@cache
def images(held_out: bool) -> Batch:
    sets = digits(seed=0)
    pixels, labels = (sets.held_out if held_out else sets.train).tensors  # type: ignore[attr-defined]
    return to_network_input(pixels, sets, 8, torch.float32)[:, :1], labels


def make_network() -> nn.Module:
    """Two convolutions and a fully connected tensor, each larger than what travels dense but for the first."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def batches() -> list[list[Batch]]:
    pixels, labels = images(held_out=False)
    order = torch.randint(len(labels), (STEPS, WORKERS, BATCH_SIZE), generator=torch.Generator().manual_seed(0))
    return [[(pixels[own], labels[own]) for own in of_step] for of_step in order]


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns(preset: str) -> None:
    network, settings = make_network(), PRESETS[preset]
    sgd = DGCSGD if isinstance(settings.get("memory"), MomentumCorrection) else torch.optim.SGD
    optimizer = sgd(network.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    exchange = SimulatedExchange(network, WORKERS, **settings, steps_per_epoch=STEPS // 10)
    simulate(network, optimizer, loss_of, batches(), exchange, lambda _: schedule.step())
    pixels, labels = images(held_out=True)
    with torch.no_grad():
        logits = network(pixels)
    accuracy = 100 * float((logits.argmax(1) == labels).float().mean())
    assert F.cross_entropy(logits, labels).isfinite()
    assert accuracy > FLOORS.get(preset, 82.0)
    assert exchange.stats()["last"]["ratio"] > 1.0

"""The sample of residual and gradient: the same elements of both, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_compress import Cast, MomentumCorrection, Quantize, TopK
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.sampling import sample_norms
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.state import _to_memory
from lightning_compress.testing import SimulatedExchange
from tests.models import make_model


def exchange_of(model: nn.Module, rank: int = 0, nodes: tuple[int, ...] = (0, 1), **settings: object) -> RankExchange:
    return RankExchange(ExchangeSettings.make(**settings), model, rank, Nodes.of(nodes), ExchangeStats())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_norms_are_of_the_same_elements(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 30, 3).to(memory_format=torch.channels_last), nn.Linear(300, 50), nn.Linear(7, 3)
    )
    model[2].weight = nn.Parameter(torch.randn(7, 3).t())
    model.to(dtype)
    exchange = exchange_of(model, compressor=Quantize(4))
    for name, p in exchange.parameters.items():
        p.grad = torch.randn_like(p)
        exchange.memories.write("worker", name, p, _to_memory(3 * p.grad.float(), p))
    residual, gradient = sample_norms(exchange)
    assert residual == pytest.approx(3 * gradient, rel=1e-6)
    assert gradient > 10


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_hierarchical_exchange_both_norms_are_of_the_shard(rank: int) -> None:
    model = nn.Linear(300, 200)
    exchange = exchange_of(model, rank, (0, 0, 1, 1), compressor=Quantize(4), exchange="hierarchical")
    for name, p in exchange.parameters.items():
        p.grad = torch.randn_like(p)
        exchange.memories.write("worker", name, p, 3 * p.grad.flatten()[exchange.plan.held(name)])
    residual, gradient = sample_norms(exchange)
    assert residual == pytest.approx(3 * gradient, rel=1e-6)
    assert gradient > 10


def test_a_tensor_is_sampled_over_its_whole_length() -> None:
    model = nn.Linear(1000, 1000)
    exchange = exchange_of(model, compressor=Quantize(4))
    model.weight.grad = torch.ones(1000, 1000)
    # of a memory that is filled in its last tenth, a tenth of the sample is
    exchange.memories.write("worker", "weight", model.weight, (torch.arange(10**6) >= 900_000).float())
    residual, gradient = sample_norms(exchange)
    assert residual**2 / gradient**2 == pytest.approx(0.1, rel=0.05)
    assert gradient**2 < 300


def test_nothing_remembered_or_no_gradient_is_no_sample() -> None:
    model = make_model()
    exchange = exchange_of(model, compressor=Quantize(4))
    assert sample_norms(exchange) is None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    without = exchange_of(model, compressor="dithering")
    assert sample_norms(without) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": Quantize(4)},
        {"compressor": Quantize(4), "exchange": "all_gather"},
        {"compressor": Cast("bf16")},
        {"compressor": TopK(0.01), "memory": MomentumCorrection(0.9)},
        {"compressor": "none"},
        {"compressor": Quantize(4), "start_step": 1},
        {"compressor": Quantize(4), "exchange": "hierarchical"},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_planned_ratio_is_the_measured_one(settings: dict[str, object], world_size: int) -> None:
    model = make_model()
    exchange = SimulatedExchange(model, world_size, **settings)
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for step in range(2):
        exchange.mean([gradients] * world_size)
        planned = [worker.planned_ratio(step) for worker in exchange.workers]
        assert planned == pytest.approx([exchange.stats(rank)["last"]["ratio"] for rank in range(world_size)], rel=1e-4)
    assert (planned[0] > 1.5) == (world_size > 1 and settings["compressor"] != "none")

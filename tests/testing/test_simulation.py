"""The simulator is the real exchange: N simulated workers end where N gloo processes end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import register_comm_hook
from lightning_compress.testing import SimulatedExchange, simulate
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks

STEPS = 20


def train_for_real(world_size: int, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    exchange = register_comm_hook(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batches in make_batches(world_size, STEPS):
        optimizer.zero_grad()
        loss_of(model, batches[dist.get_rank()]).backward()
        optimizer.step()
    exchange.close()
    return model.module.state_dict(), exchange.stats()


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({}, 1),
        ({}, 2),
        ({}, 3),
        ({"exchange": "all_gather"}, 3),
        ({"compressor": "none"}, 2),
        ({"compressor": "bf16"}, 2),
        ({"compressor": "dithering"}, 2),
        ({"compressor": "topk", "start_step": 5}, 2),
    ],
    ids=str,
)
def test_simulated_training_equals_real_training_bit_for_bit(settings: dict[str, Any], world_size: int) -> None:
    model = make_model()
    exchange = SimulatedExchange(model, world_size, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    simulate(model, optimizer, loss_of, make_batches(world_size, STEPS), exchange)
    real, stats = run_ranks(train_for_real, world_size, world_size, settings)[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, real[name]), name
    # several buckets have several headers and pads, one simulated bucket has one
    assert exchange.stats()["bytes_sent"] == pytest.approx(stats["bytes_sent"], rel=0.03)
    assert exchange.stats()["dense_bytes"] == stats["dense_bytes"]


def test_a_parameter_that_no_worker_gives_is_missing_from_the_mean() -> None:
    model = make_model()
    exchange = SimulatedExchange(model, 2)
    gradient = {"0.weight": torch.ones(200, 100)}
    mean = exchange.mean([gradient, {}])
    assert set(mean) == {"0.weight"}
    assert torch.allclose(mean["0.weight"], torch.full((200, 100), 0.5), atol=1e-6)


def test_mixed_dtypes_are_refused() -> None:
    model = make_model()
    model[0].double()
    with pytest.raises(ValueError, match="one dtype"):
        SimulatedExchange(model, 2)

"""Residuals survive: resuming is exact, and what is owed is conserved on another number of ranks."""

from __future__ import annotations

import io
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import GradientExchange, MomentumCorrection, TopK, register_comm_hook
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.state import merge
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks

STEPS = 12


def train(world_size: int, settings: dict[str, Any], first: int, last: int, start: Any) -> Any:
    """Trains from step ``first`` to ``last``; ``start`` is what an earlier run returned for each rank."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    exchange = register_comm_hook(model, **settings)
    if start is not None:
        model.module.load_state_dict(start[rank][0])
        optimizer.load_state_dict(start[rank][1])
        exchange.load_state_dict(start[rank][2])
    for batches in make_batches(world_size, STEPS)[first:last]:
        optimizer.zero_grad()
        loss_of(model, batches[rank]).backward()
        optimizer.step()
    exchange.close()
    return model.module.state_dict(), optimizer.state_dict(), reload(exchange.state_dict())


def reload(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({}, 2),
        ({}, 3),
        ({"exchange": "all_gather"}, 3),
        ({"compressor": "bf16"}, 2),
        ({"compressor": "dithering"}, 2),
        ({"compressor": "onebit", "start_step": 8}, 2),
    ],
    ids=str,
)
def test_resuming_is_bit_identical_to_an_unbroken_run(settings: dict[str, Any], world_size: int) -> None:
    unbroken = run_ranks(train, world_size, world_size, settings, 0, STEPS, None)
    half = run_ranks(train, world_size, world_size, settings, 0, STEPS // 2, None)
    resumed = run_ranks(train, world_size, world_size, settings, STEPS // 2, STEPS, half)
    for (expected, *_), (model, *_) in zip(unbroken, resumed, strict=True):
        for name, value in expected.items():
            assert torch.equal(value, model[name]), name


def exchange_once(state: dict[str, Any], train_first: bool) -> dict[str, Any]:
    """Loads a merged state on this number of ranks, and gives back the state without training."""
    model = DistributedDataParallel(make_model(torch.float64), bucket_cap_mb=0.1)
    exchange = register_comm_hook(model, "quantize")
    if train_first:
        for batches in make_batches(dist.get_world_size(), 3, torch.float64):
            model.zero_grad()
            loss_of(model, batches[dist.get_rank()]).backward()
    else:
        exchange.load_state_dict(state)
    exchange.close()
    return exchange.state_dict()


def owed(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of the ranks, and of the owners where a number of ranks has any."""
    return {name: torch.stack(parts).mean(0) + state["owner"].get(name, 0.0) for name, parts in state["worker"].items()}


def test_what_is_owed_is_conserved_over_changes_of_the_world_size() -> None:
    state = merge(run_ranks(exchange_once, 4, {}, True))
    expected = owed(state)
    assert max(debt.abs().max() for debt in expected.values()) > 0
    assert any(residual.any() for residual in state["owner"].values())
    for world_size in (2, 3, 1):  # two ranks gather: they take up what the owners of four owed
        state = merge(run_ranks(exchange_once, world_size, state, False))
        assert state["world_size"] == world_size
        for name, debt in owed(state).items():
            assert torch.allclose(debt, expected[name], rtol=1e-12, atol=1e-18), name


@pytest.mark.parametrize("broken", ["version", "world_size", "ranks", "worker", "velocity", "owner"])
def test_a_damaged_state_is_named(broken: str) -> None:
    settings = ExchangeSettings.make()
    exchange = RankExchange(settings, make_model(), 0, Nodes.alone(1), ExchangeStats())
    state = exchange.state() | {"worker": {"0.weight": [torch.ones(200, 100)]}}
    exchange.restore(state)
    del state[broken]
    with pytest.raises(ValueError, match=f"damaged one: {broken} missing"):
        exchange.restore(state)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (None, "damaged one: owner, ranks, velocity, version, worker, world_size missing"),
        ({"step": None}, "step missing"),
        ({"version": 9}, "has version 9, this lightning-compress reads version 1"),
        ({"ranks": [0, 1]}, "0.weight has no worker memory of 2 ranks"),
        ({"worker": {"0.weight": ["lost"]}}, "0.weight has no worker memory of 1 ranks"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_before_the_model_is_known(damaged: Any, message: str) -> None:
    exchange = RankExchange(ExchangeSettings.make(), make_model(), 0, Nodes.alone(1), ExchangeStats())
    state = exchange.state() | {"worker": {"0.weight": [torch.ones(200, 100)]}, "step": 3}
    loaded = GradientExchange()
    loaded.load_state_dict(state)
    changed = None if damaged is None else {k: v for k, v in {**state, **damaged}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        loaded.load_state_dict(changed)
    assert loaded.state_dict() == state  # of which nothing was taken


def load_other_ranks_state() -> str:
    model = DistributedDataParallel(make_model())
    exchange = register_comm_hook(model)
    loss_of(model, make_batches(2, 1)[0][dist.get_rank()]).backward()
    state = exchange.state_dict()
    state["ranks"], state["world_size"] = [0], 3
    with pytest.raises(ValueError, match="merge") as error:
        exchange.load_state_dict(state)
    exchange.close()
    return str(error.value)


def test_one_ranks_state_on_another_number_of_ranks_names_the_remedy() -> None:
    assert all("merge" in message for message in run_ranks(load_other_ranks_state, 2))


def step_alone(state: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    model = DistributedDataParallel(make_model(torch.float64))
    exchange = register_comm_hook(model)
    exchange.load_state_dict(state)
    gradients = []
    for batches in make_batches(1, 1, torch.float64) * 2:
        model.zero_grad()
        loss_of(model, batches[0]).backward()
        gradients.append({name: p.grad for name, p in model.module.named_parameters()})
    exchange.close()
    return gradients[0], gradients[1], exchange.state_dict()


def test_on_one_rank_what_is_owed_joins_the_first_gradient() -> None:
    state = merge(run_ranks(exchange_once, 2, {}, True))
    first, second, after = run_ranks(step_alone, 1, state)[0]
    for name, debt in owed(state).items():
        assert torch.allclose(first[name] - second[name], debt, rtol=1e-9, atol=1e-15), name
    assert all(not debt.any() for debt in owed(after).values())


def other_memories() -> list[tuple[list[str], bool, str]]:
    """What one rank is told when it loads what another memory has saved, whether that is used, and what is saved then."""
    found = []
    kinds: tuple[dict[str, Any], ...] = ({"memory": "error_feedback"}, {"memory": MomentumCorrection(0.9)})
    states = [exchange_at_zero(settings, None)[0] for settings in kinds]
    for saved, own in product((0, 1), (0, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            after, gradient = exchange_at_zero(kinds[own], states[saved])
        fresh = exchange_at_zero(kinds[own], None)[1]
        found.append(([str(w.message) for w in caught], not torch.equal(gradient, fresh), after["quantity"]))
    return found


def exchange_at_zero(settings: dict[str, Any], state: Any) -> tuple[dict[str, Any], torch.Tensor]:
    model = DistributedDataParallel(make_model())
    exchange = register_comm_hook(model, TopK(0.1), **settings)
    if state is not None:
        exchange.load_state_dict(state)
    loss_of(model, make_batches(2, 1)[0][dist.get_rank()]).backward()
    exchange.close()
    return exchange.state_dict(), next(model.parameters()).grad.clone()  # type: ignore[union-attr]


def test_residuals_of_one_quantity_are_not_taken_for_those_of_another() -> None:
    for rank, found in enumerate(run_ranks(other_memories, 2)):
        assert [used for _, used, _ in found] == [True, False, False, True]
        assert [quantity for *_, quantity in found] == ["gradient", "velocity", "gradient", "velocity"]
        said = ["\n".join(w for w in warned if "worth nothing" in w) for warned, *_ in found]
        if rank == 0:
            assert "gradients, which are worth nothing with momentum correction" in said[1]
            assert "velocities, which are worth nothing without" in said[2]
        assert [bool(text) for text in said] == [False, rank == 0, rank == 0, False]

"""Wrapped again by hand, or switched: what the exchange was told, and what it remembers, stays."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import DensityWarmup, GradientExchange, MomentumCorrection, TopK, register_comm_hook
from lightning_compress.optim import DGCSGD, CompressedAdam
from tests.exchange.training import content
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks

STEPS, WRAPPED_AT = 8, 5
CLIPPED = MomentumCorrection(0.9, clip_norm=0.05, clip_norm_from="previous_step")


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for batches in make_batches(2, STEPS)[first:last]:
        optimizer.zero_grad()
        loss_of(ddp, batches[dist.get_rank()]).backward()
        optimizer.step()


def trained(make_optimizer: Any, again: bool, **settings: Any) -> tuple[str, GradientExchange]:
    """A short run, in which the model may be wrapped again; the exchange is told of it once."""
    ddp = DistributedDataParallel(make_model())
    optimizer = make_optimizer(ddp.parameters())
    exchange = register_comm_hook(ddp, **settings, optimizer=optimizer)
    train(ddp, optimizer, 0, WRAPPED_AT)
    if again:
        ddp = DistributedDataParallel(ddp.module)
        exchange.attach(ddp)
    train(ddp, optimizer, WRAPPED_AT, STEPS)
    exchange.close()
    return content(ddp.parameters()), exchange


def one_bit_adam(parameters: Any) -> torch.optim.Optimizer:
    return CompressedAdam(parameters, lr=3e-3, update="adam", exchanged="momentum", freeze_step=3)


def dgc_sgd(parameters: Any) -> torch.optim.Optimizer:
    return DGCSGD(parameters, lr=0.05, momentum=0.9)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def wrapped_again() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer, settings in (
        ("momenta", one_bit_adam, {}),
        ("clipped", dgc_sgd, {"compressor": TopK(0.05), "memory": CLIPPED}),
    ):
        found[name] = [trained(optimizer, again, **settings)[0] for again in (False, True)]
    warmup = {"compressor": TopK(0.01), "schedule": DensityWarmup((0.5, 0.25, 0.125)), "steps_per_epoch": 3}
    found["density"] = trained(sgd, True, **warmup)[1].stats()["density"]
    nodes = trained(sgd, True, exchange="hierarchical", ranks_per_node=1)[1]
    found["nodes"] = nodes.stats()["last"]["bytes_between_nodes"], nodes.stats()["last"]["bytes_sent"]
    found["said"] = not_finite_before_and_after()
    found["refused"] = refused_switches()
    return found


def not_finite_before_and_after() -> list[str]:
    ddp = DistributedDataParallel(make_model())
    exchange = register_comm_hook(ddp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batches in make_batches(2, 2):
            (loss_of(ddp, batches[dist.get_rank()]) * float("inf")).backward()
            ddp = DistributedDataParallel(ddp.module)
            exchange.attach(ddp)
    exchange.close()
    return [str(w.message) for w in caught if "not finite" in str(w.message)]


def refused_switches() -> tuple[bool, list[str], float, float]:
    """What is refused leaves the settings as they are, and the next step works; then one is taken, with its epochs."""
    ddp = DistributedDataParallel(make_model())
    optimizer = sgd(ddp.parameters())
    exchange = register_comm_hook(ddp)
    train(ddp, optimizer, 0, 2)
    before, messages = exchange.settings, []
    warmup = {"compressor": TopK(0.01), "schedule": DensityWarmup((0.5, 0.25))}
    for arguments in (
        {"compressor": "topkk"},
        {"compressor": TopK(0.01), "memory": MomentumCorrection(0.9)},
        warmup,  # counts epochs, and nobody has said how long they are
        {"compressor": "bf16", "start_step": 3 + dist.get_rank()},
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the messages are checked by the test
            exchange.switch(arguments, ddp)
        messages.append(str(error.value))
        if "All ranks" in messages[-1]:
            exchange.attach(ddp)  # that one was found when the old exchange had ended
        unchanged = exchange.settings is before
        train(ddp, optimizer, 2, 3)
    exchange.switch(warmup, ddp, steps_per_epoch=4)
    train(ddp, optimizer, 3, 4)
    first = exchange.stats()["density"]
    exchange.switch({**warmup, "start_step": 1}, ddp)
    train(ddp, optimizer, 4, 5)
    second = exchange.stats()["density"]
    exchange.close()
    return unchanged, messages, first, second


def test_what_was_said_once_holds_after_wrapping_again() -> None:
    first, second = run_ranks(wrapped_again, 2)
    for name in ("momenta", "clipped"):
        assert first[name][0] == first[name][1] == second[name][1], name
    assert first["density"] == 0.125
    between, sent = first["nodes"]
    assert 0 < between == sent  # each rank is a node of its own: LOCAL_WORLD_SIZE or the host's name would say one node
    assert len(first["said"]) == 1
    assert second["said"] == []
    unchanged, messages, *densities = first["refused"]
    assert unchanged
    for part, message in zip(("'topkk'", "MomentumCorrection", "steps_per_epoch", "All ranks"), messages, strict=True):
        assert part in message
    assert densities == [0.25, 0.25]

"""Faults that a first user ran into, each as a test of its kind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import numba
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import GradientExchange, register_comm_hook
from lightning_compress.kernels.cpu.compiling import njit
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "code",
    [
        "from lightning_compress import CompressedStrategy",
        "from lightning_compress import *; CompressedStrategy(), CompressionMonitor()",
        "import lightning_compress; lightning_compress.CompressedStrategy('topk')",
        "import lightning_compress.pytorch_lightning as own; own.CompressedStrategy()",
        "import lightning_compress.lightning as own; own.CompressedStrategy()",
        "import lightning_compress as own; import lightning.pytorch; assert own.CompressedStrategy.root[9:] == '.pytorch'",
    ],
)
def test_the_strategy_is_there_whatever_is_imported_first(code: str) -> None:
    registered = "; from pytorch_lightning.strategies import StrategyRegistry as r; assert 'compressed_topk_spawn' in r"
    run = subprocess.run(
        [sys.executable, "-c", code + registered], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    original = numba.njit

    def without_a_folder(*function: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return original(*function, **options)

    monkeypatch.setattr(numba, "njit", without_a_folder)

    @njit()
    def twice(x):  # type: ignore[no-untyped-def]
        return 2 * x

    assert twice(21) == 42


def train(ddp: DistributedDataParallel, steps: int) -> None:
    for batches in make_batches(dist.get_world_size(), steps):
        ddp.zero_grad()
        loss_of(ddp, batches[dist.get_rank()]).backward()


def go_back_to_the_start() -> bool:
    ddp = DistributedDataParallel(make_model())
    exchange = register_comm_hook(ddp, "topk")
    start = exchange.state_dict()
    train(ddp, 3)
    before = any(r[0].any() for r in exchange.state_dict()["worker"].values())
    exchange.load_state_dict(start)
    state = exchange.state_dict()
    exchange.close()
    assert state["step"] == 0
    return (
        before
        and not any(r[0].any() for r in state["worker"].values())
        and not any(r.any() for r in state["owner"].values())
    )


def test_going_back_to_a_state_without_residuals_forgets_them() -> None:
    assert all(run_ranks(go_back_to_the_start, 2))


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 128)[:, ::2])
        self.column = nn.Parameter(torch.randn(40, 50).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean() + self.column.square().mean() * x.mean()


def save_and_load_strided() -> bool:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Strided())
    exchange = register_comm_hook(ddp, "topk")
    ddp(torch.randn(8, 64)).backward()
    state = exchange.state_dict()
    assert state["worker"]["weight"][0].shape == (64, 64)
    exchange.load_state_dict(state)
    again = exchange.state_dict()
    exchange.close()
    same = all(torch.equal(r[0], again["worker"][n][0]) for n, r in state["worker"].items())
    return same and all(r[0].any() for r in state["worker"].values())


def test_parameters_whose_elements_are_no_run_of_memory_are_saved() -> None:
    assert all(run_ranks(save_and_load_strided, 2))


def wait_for_a_hanging_rank() -> float:
    group = dist.new_group(timeout=timedelta(seconds=4))
    # no batch norm: DDP's own broadcast of its buffers would be the first to wait
    ddp = DistributedDataParallel(nn.Linear(100, 10), process_group=group)
    exchange = register_comm_hook(ddp)
    train(ddp, 3)  # DDP rebuilds its buckets first, with a broadcast of its own
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(12)
    else:
        with pytest.raises(RuntimeError, match="step 3, bucket 0, rank 0"):
            train(ddp, 1)
    seconds = time.monotonic() - start
    exchange.close()
    return seconds


def test_the_exchange_waits_no_longer_than_the_models_own_group() -> None:
    assert run_ranks(wait_for_a_hanging_rank, 2)[0] < 10


def count_threads_of_dropped_exchanges() -> int:
    for _ in range(3):
        ddp = DistributedDataParallel(make_model())
        exchange = register_comm_hook(ddp)
        train(ddp, 1)
        del ddp, exchange
        gc.collect()
    return sum(thread.name.startswith("lightning-compress") for thread in threading.enumerate())


def test_an_exchange_that_is_dropped_leaves_no_threads() -> None:
    assert run_ranks(count_threads_of_dropped_exchanges, 2) == [0, 0]


def resume_with_another_memory() -> list[str]:
    import warnings

    ddp = DistributedDataParallel(make_model())
    exchange = register_comm_hook(ddp, "topk")
    train(ddp, 2)
    state = exchange.state_dict()
    exchange.close()
    ddp = DistributedDataParallel(make_model())
    other = register_comm_hook(ddp, "dithering")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(state)
    other.close()
    return [str(w.message) for w in caught]


def test_resuming_with_settings_that_remember_less_is_said_once() -> None:
    said = run_ranks(resume_with_another_memory, 2)
    assert ["such memory" in message for message in said[0]] == [True]
    assert said[1] == []


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(ValueError, match="Wrap the model first"):
        GradientExchange().attach(nn.Linear(2, 2))  # type: ignore[arg-type]

"""When something breaks, everybody hears of it soon, and the message says where."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import GradientExchange
from lightning_compress.exchange import topology
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.exchange.pipeline import Exchange, ThreadPipeline
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import exchange_dense
from tests.exchange.training import batch, make_net, mean_square, wrap
from tests.ranks import run_ranks


class Failing(BlockCodec):
    """Fails when it has encoded often enough."""

    encoded = 0
    fails_at = 0

    def encode(self, *args, **kwargs):
        Failing.encoded += 1
        if Failing.encoded == Failing.fails_at:
            raise ZeroDivisionError("a broken kernel")
        super().encode(*args, **kwargs)


def outcome(folder, train):
    """Writes what ended the training, after how many seconds, for a test whose processes do not end well."""
    start = time.monotonic()
    try:
        train()
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    (Path(folder) / f"{dist.get_rank()}").write_text(f"{time.monotonic() - start:.1f} {said}")
    raise SystemExit(1)


def said(folder, rank):
    seconds, message = (folder / str(rank)).read_text().split(" ", 1)
    return float(seconds), message


def broken_kernel(folder, way, at):
    """The last rank's kernel breaks."""
    Failing.fails_at = at if dist.get_rank() == dist.get_world_size() - 1 else -1
    topology.BlockCodec = Failing
    ddp, _exchange = wrap(make_net(), exchange=way)

    def train():
        for step in range(4):
            mean_square(ddp, batch(step)).backward()

    outcome(folder, train)


# The first step has one bucket, with an encoding for large and one for small tensors (and as many by the owner).
# The second has four; the third encoding of the worker belongs to its bucket 0 or 1.
@pytest.mark.parametrize(
    ("way", "at", "step"), [("two_way", 1, 0), ("two_way", 4, 0), ("all_gather", 3, 1), ("all_gather", 6, 1)]
)
def test_an_error_in_a_kernel_names_step_bucket_and_rank_and_hangs_nobody(tmp_path, way, at, step):
    with pytest.raises(AssertionError, match="failed"):
        run_ranks(broken_kernel, 3, str(tmp_path), way, at, timeout=30)
    seconds, message = said(tmp_path, 2)
    assert seconds < 15
    assert "ZeroDivisionError: a broken kernel" in message
    assert f"step {step}, bucket" in message
    assert "rank 2" in message
    for rank in (0, 1):
        seconds, message = said(tmp_path, rank)
        assert seconds < 15
        assert f"step {step}, bucket" in message
        assert f"rank {rank}" in message


def goes_on_after_an_error():
    """Both ranks fail at the same place, catch the error, and try again."""
    Failing.fails_at = 3
    topology.BlockCodec = Failing
    ddp, exchange = wrap(make_net(), exchange="all_gather")
    errors = []
    for step in range(4):
        try:
            mean_square(ddp, batch(step)).backward()
            errors.append(None)
        except RuntimeError as error:
            errors.append("a broken kernel" in str(error))
            ddp = DistributedDataParallel(ddp.module)
            exchange.attach(ddp)
    exchange.close()
    return errors


def test_after_an_error_a_new_wrap_works_again():
    assert run_ranks(goes_on_after_an_error, 2) == [[None, True, None, None]] * 2


def failing_steps():
    raise ZeroDivisionError("a broken kernel")
    yield


def broken_pipeline():
    stats = ExchangeStats()
    pipeline = ThreadPipeline([{"world": dist.new_group()} for _ in range(2)])
    exchanges = [
        Exchange(steps, torch.ones(3), pipeline.future(), f"bucket {i}", stats)
        for i, steps in enumerate((exchange_dense(torch.ones(3), 1), failing_steps(), exchange_dense(torch.ones(3), 1)))
    ]
    pipeline.submit(exchanges[0])
    exchanges[0].future.wait()
    for exchange in exchanges[1:]:
        pipeline.submit(exchange)
    for exchange in exchanges[1:]:
        with pytest.raises(RuntimeError, match="bucket 1 failed: ZeroDivisionError: a broken kernel"):
            exchange.future.wait()
    pipeline.close()
    return exchanges[0].work is not None, exchanges[2].work is None


def test_after_an_error_nothing_more_is_sent():
    # a later bucket's collective would meet the failed bucket's on the other ranks
    assert run_ranks(broken_pipeline, 1) == [(True, True)]


def killed(folder, how):
    ddp, _exchange = wrap(make_net())
    last = dist.get_rank() == dist.get_world_size() - 1

    def train():
        for step in range(4):
            loss = mean_square(ddp, batch(step))
            if last and step == 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise SystemExit(0)
            loss.backward()

    outcome(folder, train)


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_peer_that_is_gone_is_an_error_within_seconds(tmp_path, how):
    with pytest.raises(AssertionError):
        run_ranks(killed, 3, str(tmp_path), how, timeout=30)
    for rank in (0, 1):
        seconds, message = said(tmp_path, rank)
        assert seconds < 15
        assert "step 2, bucket 0" in message
        assert f"rank {rank}" in message


def hanging(folder):
    ddp = DistributedDataParallel(make_net())
    GradientExchange().attach(ddp, timeout=timedelta(seconds=2))

    def train():
        mean_square(ddp, batch(0)).backward()
        loss = mean_square(ddp, batch(1))
        if dist.get_rank() == 1:
            time.sleep(5)
        loss.backward()

    outcome(folder, train)


def test_a_peer_that_hangs_is_an_error_after_the_timeout(tmp_path):
    with pytest.raises(AssertionError):
        run_ranks(hanging, 2, str(tmp_path), timeout=30)
    seconds, message = said(tmp_path, 0)
    assert 2 <= seconds < 5
    assert "step 1, bucket 0, rank 0" in message


def different_settings():
    messages = []
    for name, values in (("compressor", ("bf16", "fp16")), ("start_step", (0, 1)), ("dense", ("auto", 4096))):
        ddp = DistributedDataParallel(make_net())
        with pytest.raises(ValueError, match=f"All ranks need the same settings.*{name} differs") as error:
            GradientExchange(**{name: values[dist.get_rank()]}).attach(ddp)
        messages.append(str(error.value))
    return messages


def test_settings_that_differ_between_ranks_are_an_error_on_all_of_them():
    first, second = run_ranks(different_settings, 2)
    assert first == second
    assert all("rank 1 has" in message for message in first)


def second_hook():
    ddp, exchange = wrap(make_net())
    with pytest.raises(ValueError, match="hook") as error:
        GradientExchange().attach(ddp)
    torch.manual_seed(0)
    mean_square(ddp, batch(0)).backward()  # the first one still works
    exchange.close()
    exchange.attach(ddp)  # and may be attached again
    mean_square(ddp, batch(0)).backward()
    return str(error.value), exchange.stats()["steps"]


def test_a_second_hook_is_refused_and_the_first_goes_on():
    for message, steps in run_ranks(second_hook, 2):
        assert "only one" in message
        assert steps == 2

"""benchmarks/wire_bytes.py: its counts are those of the real exchange."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import wire_bytes
from benchmarks.methods import SETTINGS, make_exchange
from lightning_compress import GradientExchange
from lightning_compress.testing import SimulatedExchange
from tests.models import make_model
from tests.ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(
    "method",
    [
        "compressed",
        "compressed_bf16",
        "compressed_onebit",
        "compressed_topk",
        "compressed_topk_0.001",
        "compressed_dgc",
    ],
)
def test_equals_a_simulated_exchange(method: str, world_size: int) -> None:
    model = make_model()
    settings = SETTINGS[method]
    exchange = SimulatedExchange(model, world_size, **{**settings, "schedule": None})
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    exchange.mean([gradients] * world_size)
    sent = [exchange.stats(rank)["bytes_sent"] for rank in range(world_size)]
    wire = wire_bytes.count(model, make_exchange(method).settings, world_size)
    assert wire.sent == pytest.approx(sum(sent) / world_size, abs=1)
    assert wire.coded > 0
    assert wire.small > 0
    assert wire.headers > 0


def deep_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))


def bytes_on_ranks(method: str) -> int:
    ddp = DistributedDataParallel(deep_model(), bucket_cap_mb=2)
    settings = {**SETTINGS[method], "schedule": None}
    exchange = GradientExchange(**settings).attach(ddp)
    for _ in range(3):  # DDP has rebuilt its buckets by then
        ddp.zero_grad()
        ddp(torch.randn(2, 600)).sum().backward()
    exchange.close()
    return int(exchange.stats()["last"]["bytes_sent"])


@pytest.mark.parametrize("method", ["compressed", "compressed_dgc"])
def test_equals_real_ranks_with_several_buckets(method: str) -> None:
    model = deep_model()
    assert len(wire_bytes.ddp_buckets(model, 2.0)) > 2
    sent = run_ranks(bytes_on_ranks, 2, method)
    # DDP rebuilds its buckets in the order in which gradients came: headers and pads differ by a few bytes
    assert wire_bytes.count(model, make_exchange(method).settings, 2, 2.0).sent == pytest.approx(
        sum(sent) / 2, rel=2e-3
    )


def test_bert_base_under_topk_of_the_paper_sends_500_times_less_than_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    wire_bytes.main(["--models", "bert_base", "--methods", "compressed_topk_0.001", "--hosts", "2", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ratio"] > 2 * 500  # of fp32


def test_resnet50_under_dgc_of_the_paper_sends_500_times_less(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    wire_bytes.main(["--models", "resnet50", "--methods", "compressed_dgc_0.001", "--hosts", "2", "8", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["ranks"], row["exchange"]) for row in rows] == [(2, "all_gather"), (8, "two_way")]
    assert all(row["ratio"] > 500 for row in rows)
    assert all(row["coded_bytes"] + row["small_bytes"] + row["header_bytes"] == row["payload_bytes"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "1"], "--hosts must be 2 or more"),
        (["--bucket-mb", "0"], "--bucket-mb"),
        (["--models", "x"], "choose"),
        (
            ["--ranks-per-host", "2", "--methods", "compressed", "compressed_dgc_0.001"],
            "compressed_dgc_0.001 needs --ranks-per-host 1",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wire_bytes.parse(arguments)
    assert message in capsys.readouterr().err

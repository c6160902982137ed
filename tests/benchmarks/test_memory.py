"""benchmarks/memory.py: the documented formula holds for every preset, on models of ordinary shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.methods import SETTINGS, make_exchange
from lightning_compress.exchange.settings import ExchangeSettings


def model() -> nn.Module:
    """3.3 M elements: what Python's own objects take is small beside it."""
    return nn.Sequential(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.Linear(2048, 1024), nn.Linear(1024, 1024))


def ratio(settings: ExchangeSettings, world_size: int = 2, **how: Any) -> float:
    expected = sum(memory.formula(model(), settings, world_size, 4.0, **how).values())
    return expected / memory.measured(model(), settings, world_size, 4.0, **how)


@pytest.mark.parametrize("method", SETTINGS)
def test_the_formula_is_within_a_tenth_of_what_is_allocated(method: str) -> None:
    assert ratio(make_exchange(method).settings) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    [
        ({"compressor": "quantize"}, 4),
        ({"compressor": "quantize", "exchange": "all_gather"}, 4),
        ({"compressor": "onebit"}, 8),
    ],
)
def test_it_holds_on_more_ranks(arguments: dict[str, Any], world_size: int) -> None:
    assert ratio(ExchangeSettings.make(**arguments), world_size) == pytest.approx(1.0, abs=0.1)


def test_under_a_loss_scaler_memories_exist_twice() -> None:
    settings = ExchangeSettings.make(exchange="two_way")
    assert ratio(settings, loss_scaler=True) == pytest.approx(1.0, abs=0.1)
    once, twice = (memory.formula(model(), settings, 2, loss_scaler=scaler) for scaler in (False, True))
    assert twice["residuals"] == 2 * once["residuals"] == 2 * 4 * 1.5 * sum(p.numel() for p in model().parameters())


def test_what_is_measured_grows_with_what_is_kept() -> None:
    settings = make_exchange("compressed_topk").settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_compress.memory.store.pages.zeros", lambda n, *how: torch.zeros(2 * n, dtype=how[0])[:n]
        )
        assert ratio(settings) < 0.6


def test_ddps_own_exchange_takes_nothing() -> None:
    assert sum(memory.formula(model(), ExchangeSettings.make("none"), 2).values()) == 0


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--models", "tiny", "--methods", "compressed", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["method"], row["hosts"], row["gradient_bytes"]) == ("tiny", "compressed", 2, 4 * 263_936)
    assert row["formula_bytes"] == sum(row[f"{part}_bytes"] for part in memory.PARTS)
    memory.main(["--models", "tiny", "--methods", "compressed_dgc"])
    assert "compressed_dgc" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"), [("--hosts", "--hosts must be 2 or more"), ("--bucket-mb", "positive")]
)
def test_a_wrong_argument_is_named(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main([argument, "0"])
    assert message in capsys.readouterr().err

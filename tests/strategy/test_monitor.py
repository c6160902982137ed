"""CompressionMonitor: stable names in the user's logger, one table at the end."""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger

from lightning_compress import CompressionMonitor
from tests.ranks import run_ranks
from tests.strategy.training import QUIET, Classifier, make_trainer

NAMES = {"bytes_sent", "bytes_received", "ratio", "encode_seconds", "decode_seconds", "wait_seconds", "density"}


def fit_with_monitor(folder: str, accumulate: int, rich: bool) -> tuple[str, dict[str, float], dict[str, float]]:
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
        if not rich:
            monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
        logger = CSVLogger(folder, name="", version="")
        trainer = make_trainer(
            "compressed",
            callbacks=[CompressionMonitor()],
            logger=logger,
            log_every_n_steps=1,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(Classifier(8))
    stats = trainer.strategy.exchange.stats()
    return said.getvalue(), {k: float(v) for k, v in trainer.callback_metrics.items()}, stats


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_of_every_step_are_logged_under_stable_names(tmp_path: Path, accumulate: int) -> None:
    (_, metrics, stats), _ = run_ranks(fit_with_monitor, 2, str(tmp_path), accumulate, True)
    assert {name for name in metrics if name.startswith("comm/")} == {f"comm/{name}" for name in NAMES}
    assert metrics["comm/bytes_sent"] == stats["last"]["bytes_sent"] > 0
    assert metrics["comm/ratio"] == pytest.approx(stats["last"]["ratio"])
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["comm/bytes_sent"]]
    assert len(rows) == 8 // accumulate
    assert sum(float(row["comm/bytes_sent"]) for row in rows) == pytest.approx(stats["bytes_sent"], abs=1)


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_rank_0_prints_one_table(tmp_path: Path, rich: bool) -> None:
    (said, _, stats), (other, *_) = run_ranks(fit_with_monitor, 2, str(tmp_path), 1, rich)
    for row in (
        "compression ratio",
        "Quantize(bits=4",
        f"{stats['bytes_sent']:,}",
        f"{stats['dense_bytes']:,}",
        "steps",
    ):
        assert said.count(row) == 1 or row == "steps"
    assert "compression ratio" not in other


def silent() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        make_trainer("compressed", callbacks=[CompressionMonitor(summary=False)]).fit(Classifier(2))
    return said.getvalue()


def test_the_table_can_be_left_out() -> None:
    assert run_ranks(silent, 1) == [""]


def test_another_strategy_is_an_error_that_names_the_remedy() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[CompressionMonitor()], max_epochs=1, **QUIET)
    with pytest.raises(
        ValueError, match=r"CompressionMonitor needs a compressed strategy.*SingleDeviceStrategy.*'compressed'"
    ):
        trainer.fit(Classifier(1))

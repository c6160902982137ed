"""CompressionMonitor: stable names in the user's loggers, warnings, one table and a report at the end."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins import MixedPrecision

from lightning_compress import Cast, CompressionMonitor, MomentumCorrection, OneBit, Quantize, TopK
from lightning_compress.exchange.settings import ExchangeSettings
from tests.ranks import run_ranks
from tests.strategy.training import QUIET, Classifier, make_trainer

STEP_NAMES = {"bytes_sent", "bytes_received", "ratio", "encode_seconds", "decode_seconds", "wait_seconds", "density"}
TOTAL_NAMES = {"total_bytes_sent", "total_bytes_received", "skipped_steps"}
NAMES = STEP_NAMES | TOTAL_NAMES


class Recorder(DummyLogger):
    """Any other logger than CSV: it keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))


def fit_with_monitor(folder: str, accumulate: int, rich: bool) -> tuple[Any, ...]:
    said = io.StringIO()
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
        if not rich:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        monitor = CompressionMonitor(report=Path(folder) / "plots" / "report.html", sample_every_n_steps=2)
        trainer = make_trainer(
            "compressed",
            callbacks=[monitor],
            logger=[CSVLogger(folder, name="", version=""), recorder],
            log_every_n_steps=1,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(Classifier(8))
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    # read after teardown
    stats = trainer.strategy.exchange.stats()
    return said.getvalue(), metrics, stats, recorder.rows, monitor._samples


@pytest.mark.parametrize(("accumulate", "rich"), [(1, True), (2, False)])
def test_logs_table_and_report_of_a_fit(tmp_path: Path, accumulate: int, rich: bool) -> None:
    (said, metrics, stats, recorded, samples), (other_said, *_) = run_ranks(
        fit_with_monitor, 2, str(tmp_path), accumulate, rich
    )
    steps = 8 // accumulate
    assert {name for name in metrics if name.startswith("comm/")} == {
        f"comm/{name}" for name in NAMES | {"residual_ratio"}
    }
    assert metrics["comm/bytes_sent"] == stats["last"]["bytes_sent"] > 0
    assert metrics["comm/ratio"] == pytest.approx(stats["last"]["ratio"])
    assert metrics["comm/total_bytes_received"] == stats["bytes_received"]
    assert metrics["comm/skipped_steps"] == 0
    assert 0.02 < metrics["comm/residual_ratio"] < 1  # four bits leave a part of the gradient
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["comm/bytes_sent"]]
    assert len(rows) == steps
    assert sum(float(row["comm/bytes_sent"]) for row in rows) == pytest.approx(stats["bytes_sent"], abs=1)
    totals = [float(row["comm/total_bytes_sent"]) for row in rows]
    assert totals == sorted(totals)
    assert totals[-1] == stats["bytes_sent"]
    assert [row["comm/total_bytes_sent"] for row in recorded if "comm/bytes_sent" in row] == totals

    for row in ("compression ratio", "planned ratio", "Quantize(bits=4", "residual"):
        assert said.count(row) == 1
    # two ranks send each other as much
    assert said.count(f"{stats['bytes_sent']:,}") == 2
    assert "compression ratio" not in other_said
    page = (tmp_path / "plots" / "report.html").read_text()
    assert f"{stats['bytes_sent']:,}" in page
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert [sample.step for sample in samples] == list(range(1, steps + 1, 2))
    assert all(sample.ratio == pytest.approx(sample.planned_ratio, rel=0.05) for sample in samples)


class Overflowing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e37 if batch_idx in (2, 3) else loss


def fit_under_a_scaler(folder: str) -> tuple[dict[str, float], dict[str, Any]]:
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    monitor = CompressionMonitor(summary=False, report=Path(folder) / "report.png", sample_every_n_steps=1)
    trainer = make_trainer("compressed", callbacks=[monitor], plugins=[precision])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient exchange")
        trainer.fit(Overflowing())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, trainer.strategy.exchange.stats()


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    (metrics, stats), _ = run_ranks(fit_under_a_scaler, 2, str(tmp_path))
    assert metrics["comm/skipped_steps"] == stats["skipped_steps"] == 2
    assert stats["steps"] == 8
    assert 0 < metrics["comm/residual_ratio"] < 1  # the overflows have left nothing in it
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def fit_alone() -> tuple[str, dict[str, float]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer = make_trainer("compressed", callbacks=[CompressionMonitor(summary=False)])
        trainer.fit(Classifier(2))
    return said.getvalue(), {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_one_rank_has_nothing_to_say_and_the_table_can_be_left_out() -> None:
    ((said, metrics),) = run_ranks(fit_alone, 1)
    assert said == ""
    assert set(metrics) == {f"comm/{name}" for name in NAMES}
    assert metrics["comm/ratio"] == 1.0
    assert metrics["comm/total_bytes_sent"] == 0


class Scripted:
    """An exchange that says what a test wants it to say."""

    def __init__(self, ratio: float = 8.0, norms: tuple[float, float] | None = None, **settings: Any) -> None:
        self.settings = ExchangeSettings.make(**settings)
        self.ratio, self.norms, self.step = ratio, norms, 0

    def stats(self) -> dict[str, Any]:
        figures = {"bytes_sent": 100 * self.step, "bytes_received": 0, "dense_bytes": 0, "ratio": self.ratio}
        figures |= dict.fromkeys(("encode_seconds", "decode_seconds", "wait_seconds"), 0.0)
        return {"steps": self.step, "skipped_steps": 0, **figures, "last": figures, "density": 1.0}

    def planned_ratio(self) -> float:
        return 8.0

    def residual_norms(self) -> tuple[float, float] | None:
        return self.norms


def watch(exchange: Scripted, monitor: CompressionMonitor, residuals: list[float], gradient: float = 1.0) -> list[str]:
    """Steps of a fit on four ranks with the given residual norms; returns what was warned of."""
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(exchange=exchange),
        global_step=0,
        world_size=4,
        is_global_zero=True,
        is_last_batch=False,
        _logger_connector=SimpleNamespace(should_update_logs=False),
    )
    module: Any = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor.on_fit_start(trainer, module)
        for residual in residuals:
            exchange.step += 1
            exchange.norms = (residual, gradient)
            monitor.on_before_optimizer_step(trainer, module, None)
            monitor.on_train_batch_end(trainer, module, None, None, 0)
            trainer.global_step += 1
    return [str(w.message) for w in caught]


def monitor() -> CompressionMonitor:
    return CompressionMonitor(sample_every_n_steps=1)


TOP = {"compressor": TopK(0.01, block_size=100)}
"""Theory bounds its residual by sqrt(.99) / (1 - sqrt(.99)) = 198.5 local gradients: 397 mean ones of four ranks."""


def test_a_residual_beyond_every_bound_is_warned_of_once() -> None:
    said = watch(Scripted(**TOP), monitor(), [1.0, 390.0, 400.0, 500.0, 600.0])
    assert len(said) == 1
    assert re.search(r"grows without bound.*400.*TopK.*at most 397.*learning rate", said[0])


@pytest.mark.parametrize(
    ("settings", "residuals", "gradient"),
    [
        (TOP, [1.0, 390.0, 395.0], 1.0),  # inside the bound
        (TOP, [4000.0, 7000.0], 20.0),  # beside larger gradients
        ({**TOP, "memory": MomentumCorrection(0.9)}, [3000.0, 3900.0], 1.0),  # velocities are ten gradients
        ({"compressor": OneBit()}, [10.0, 500.0], 1.0),  # one bit promises little
    ],
)
def test_a_residual_within_its_bound_is_not(settings: dict[str, Any], residuals: list[float], gradient: float) -> None:
    assert watch(Scripted(**settings), monitor(), residuals, gradient) == []


def test_only_growth_is_warned_of() -> None:
    exchange, watching = Scripted(**TOP), monitor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch(exchange, watching, [1000.0])
    watching._said.clear()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(exchange=exchange), world_size=4, is_global_zero=True)
    for residual, said in ((900.0, 0), (800.0, 0), (801.0, 1)):
        watching._norms = (residual, 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watching._watch_residual(trainer)
        assert len(caught) == said


def test_a_residual_that_is_not_a_number_is_warned_of() -> None:
    assert "grows without bound" in watch(Scripted(**TOP), monitor(), [1.0, float("nan")])[0]


def test_an_overflow_says_nothing_about_the_residual() -> None:
    assert watch(Scripted(**TOP), monitor(), [1.0, 2.0], gradient=float("inf")) == []


@pytest.mark.parametrize(("ratio", "warned"), [(8.0, 0), (7.3, 0), (7.1, 1)])
def test_more_bytes_than_planned_are_warned_of_once(ratio: float, warned: int) -> None:
    said = watch(Scripted(ratio, compressor="quantize"), monitor(), [0.1, 0.1])
    assert len(said) == warned
    assert all(re.search(r"1.1 times the planned bytes.*7.1, planned 8.*bucket_cap_mb", text) for text in said)


def test_bytes_between_nodes_follow_an_exchange_that_changes() -> None:
    exchange, watching = Scripted(compressor="quantize"), monitor()
    watch(exchange, watching, [])
    assert "bytes_between_nodes" not in watching._figures(exchange)
    exchange.settings = ExchangeSettings.make(compressor="quantize", exchange="hierarchical")
    exchange.stats = lambda: {
        **Scripted.stats(exchange),
        "last": {**Scripted.stats(exchange)["last"], "bytes_between_nodes": 7},
    }
    assert watching._figures(exchange)["bytes_between_nodes"] == 7


def test_the_table_says_from_which_step_on_a_compressor_was_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    exchange, watching = Scripted(compressor="bf16"), monitor()
    watch(exchange, watching, [0.1])
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(exchange=exchange), is_global_zero=True)
    module: Any = None
    for compressor, steps in (("bf16", 1), ("quantize", 3)):
        exchange.settings = ExchangeSettings.make(compressor=compressor)
        for _ in range(steps):
            exchange.step += 1
            watching._note_switch(exchange)  # type: ignore[arg-type]
    watching.on_fit_end(trainer, module)
    assert watching._compressors == [(1, repr(Cast("bf16"))), (3, repr(Quantize(4)))]
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert re.search(r"from step 1, Quantize\(.*\) from step 3", said)
    assert "planned ratio of the last one" in said


def test_the_residual_is_sampled_at_the_given_steps() -> None:
    watching = CompressionMonitor(sample_every_n_steps=3)
    watch(Scripted(compressor="quantize"), watching, [0.1] * 8)
    assert [sample.step for sample in watching._samples] == [1, 4, 7]


def test_a_report_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    CompressionMonitor()
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib: pip install \"lightning-compress\[recipes\]\""):
        CompressionMonitor(report="report.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"report": "report.pdf"}, "report.*html or .png.*report.pdf"),
        ({"sample_every_n_steps": 0}, "sample_every_n_steps"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressionMonitor(**arguments)


def test_another_strategy_is_an_error_that_names_the_remedy() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[CompressionMonitor()], max_epochs=1, **QUIET)
    with pytest.raises(
        ValueError, match=r"CompressionMonitor needs a compressed strategy.*SingleDeviceStrategy.*'compressed'"
    ):
        trainer.fit(Classifier(1))

"""benchmarks/convergence: runs are paired, remembered and summed up rightly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from benchmarks.convergence import __main__ as command
from benchmarks.convergence import runs, summary, tasks
from benchmarks.convergence.methods import METHODS, SEARCH
from benchmarks.convergence.runs import Run
from benchmarks.convergence.tables import TABLES
from benchmarks.convergence.tasks import TASKS, SmallVGG
from tests.models import Batch, loss_of, make_batches, make_model


class TinyTask:
    """The other tests' model and data in place of a real task."""

    name, metric, batch_size = "tiny", "agreement", 32
    rates: ClassVar[dict[str, float]] = {"sgd": 0.1, "lans": 0.03, "adamw": 2e-3, "ternary": 0.07}

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = make_model()
        for parameter in model.parameters():
            parameter.data += 0.01 * seed
        return model

    def batches(self, seed: int, steps: int, workers: int, batch_size: int) -> Iterator[list[Batch]]:
        return iter(make_batches(workers, steps))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        return 50.0, float(sum(p.detach().sum() for p in model.parameters()))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", TinyTask())  # type: ignore[misc]
    monkeypatch.setattr(runs, "EVALUATE_EVERY", 4)


def test_a_row_has_what_readers_need() -> None:
    row = runs.execute(Run("tiny", "dgc_0.01", 1, 10))
    names = ["family", "optimizer", "method", "seed", "steps"]
    assert [row[name] for name in names] == ["tiny", "sgd", "dgc_0.01", 1, 10]
    assert (row["metric"], row["value"]) == ("agreement", 50.0)
    assert [point[0] for point in row["curve"]] == [4, 8, 10]
    assert row["test_loss"] == row["curve"][-1][2]
    assert 0 < row["last_bits_per_parameter"] < row["bits_per_parameter"] < 48  # the warm-up sent more
    assert row == json.loads(json.dumps(row))


def test_dense_sends_what_a_ring_of_four_does() -> None:
    assert runs.execute(Run("tiny", "dense", 0, 2))["bits_per_parameter"] == 48.0


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SEARCH])
def test_every_method_runs(method: str) -> None:
    row = runs.execute(Run("tiny", method, 0, 2))
    assert row == {**row, **Run("tiny", method, 0, 2).settings()}


def test_the_learning_rate_is_the_methods_or_the_tasks() -> None:
    assert [Run("tiny", method, 0, 1).lr() for method in ("dense", "ternary", "clan_ternary")] == [0.1, 0.07, 0.03]
    assert Run("tiny", "ternary_lr_0.3", 0, 1).lr() == 0.3
    assert runs.execute(Run("tiny", "ternary_lr_0.3", 0, 2))["lr"] == 0.3


def test_the_small_vgg_is_what_it_says() -> None:
    sizes = [p.numel() for p in SmallVGG(10).parameters()]
    assert sum(sizes) == 206_922
    assert max(sizes) / sum(sizes) == pytest.approx(0.97, abs=0.001)
    assert SmallVGG(10)(torch.zeros(2, 3, 28, 28)).shape == (2, 10)


def test_a_run_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "results" / "runs.jsonl"
    wanted = list(runs.plan("tiny", ["dense", "dgc_0.01"], [0, 1], 2))
    assert runs.missing(wanted, file) == wanted
    runs.append(runs.execute(wanted[0]), file)
    runs.append(runs.execute(wanted[3]), file)
    assert runs.missing(wanted, file) == wanted[1:3]
    assert runs.missing([Run("tiny", "dense", 0, 3)], file) == [Run("tiny", "dense", 0, 3)]


def test_a_name_that_means_something_else_by_now_is_refused(tmp_path: Path) -> None:
    run = Run("tiny", "dense", 0, 2)
    runs.append({**run.settings(), "lr": 7.0}, tmp_path / "runs.jsonl")
    with pytest.raises(ValueError, match=r"another lr \(7.0, now 0.1\): give the method another name"):
        runs.missing([run], tmp_path / "runs.jsonl")


def test_the_comparison_that_matters_most_is_made_first() -> None:
    order = [(run.method, run.seed) for run in runs.plan("tiny", ["dense", "a", "b"], [0, 1], 2)]
    assert order == [("dense", 0), ("a", 0), ("dense", 1), ("a", 1), ("b", 0), ("b", 1)]


def row_of(method: str, seed: int, value: float, optimizer: str = "sgd") -> dict[str, object]:
    bits = {"bits_per_parameter": 1.0, "last_bits_per_parameter": 0.5}
    return {"method": method, "optimizer": optimizer, "seed": seed, "value": value, "test_loss": 0.25, **bits}


def test_differences_are_paired_by_seed() -> None:
    rows = [row_of("dense", seed, value) for seed, value in ((0, 90.0), (1, 92.0), (2, 94.0))]
    rows += [row_of("dgc", seed, value) for seed, value in ((2, 93.0), (0, 89.5), (1, 91.0), (7, 10.0))]
    dense, dgc = summary.lines(rows)
    assert dense == ["dense", "3", "92.00", "2.00", "-", "-", "0.250", "1.00", "0.50"]
    assert dgc[:2] == ["dgc", "4"]
    assert dgc[4] == "-0.83"  # of seeds 0, 1, 2: -0.5, -1, -1
    low, high = summary.interval([-0.5, -1.0, -1.0])
    assert (low, high) == pytest.approx((-0.8333 - 4.3027 / 6, -0.8333 + 4.3027 / 6), abs=1e-3)
    assert dgc[5] == f"{low:+.2f} to {high:+.2f}"


def test_every_optimizer_has_its_own_baseline() -> None:
    rows = [row_of("lans_dense", 0, 30.0, "lans"), row_of("clan", 0, 29.0, "lans")]
    rows += [row_of("adamw_dense", 0, 20.0, "adamw"), row_of("adamw_onebit", 0, 20.5, "adamw")]
    assert [line[4] for line in summary.lines(rows)] == ["-", "-1.00", "-", "+0.50"]


def test_tables_name_known_methods_and_tasks() -> None:
    for table in TABLES.values():
        assert "dense" in table.methods[0]
        assert set(table.methods) <= set(METHODS)
        assert {METHODS[method].optimizer for method in table.methods} <= set(TASKS[table.task].rates)
        if table.control:
            assert "control" in table.methods[-1] == table.control
            assert len(table.methods) <= 6  # dense, four finalists, the control
            assert not {*table.seeds} & {
                *TABLES["screen_vgg"].seeds,
                *TABLES["rates_vgg"].seeds,
            }  # those that chose them
    assert [run.method for run in runs.plan("tiny", TABLES["dgc"].methods, [0], 1)][:2] == ["dense", "dgc_0.01"]


def test_summary_and_plot_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "runs.jsonl"
    made = Run("resnet8_fashion_mnist", "dense", 0, 8)
    runs.append({**made.settings(), **row_of("dense", 0, 88.5), "curve": [[4, 70.0, 1.0], [8, 88.5, 0.4]]}, file)
    command.main(["summary", "dgc", "--steps", "8", "--runs", str(file)])
    assert "88.50" in capsys.readouterr().out
    command.main(["summary", "dgc", "--steps", "8", "--runs", str(file), "--markdown"])
    assert "| dense | 1 | 88.50 | - | - | - | 0.250 | 1.00 | 0.50 |" in capsys.readouterr().out.splitlines()
    command.main(["plot", "dgc", "--steps", "8", "--runs", str(file)])
    assert (tmp_path / "convergence_dgc.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="run dgc_curve"):
        command.main(["summary", "dgc_curve", "--runs", str(file)])


def test_without_the_packages_the_embedded_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "PYTHON_DOCS", tmp_path)
    monkeypatch.setattr(command, "execute_all", lambda wanted, *_: [runs.execute(run) for run in wanted])
    file = ["--runs", str(tmp_path / "runs.jsonl")]
    with pytest.raises(SystemExit, match=r"apt-get install python3-doc .*--family: .*tiny_bert_pydoc comes"):
        command.main(["run", "screen_lans", *file])
    for family, table, metric in (
        ("tiny_bert_pydoc", "screen_lans", "masked_word"),
        ("vgg_digits", "screen_vgg", "test"),
    ):
        args = command.parse(["run", table, "--family", family, *file])
        batch, *_ = next(TASKS[args.family].batches(0, 1, 4, 2))
        assert TASKS[family].loss(TASKS[family].model(0), batch).isfinite()
        assert TASKS[family].metric == f"{metric}_accuracy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "choose from"),
        (["run", "dgc", "--steps", "0"], "--steps must be 1 or more"),
        (["run", "dgc", "--methods", "dgc_2"], "dgc_2"),
        (
            ["run", "dgc", "--methods", "lans_dense"],
            "no learning rate for the optimizer of lans_dense",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert message in capsys.readouterr().err

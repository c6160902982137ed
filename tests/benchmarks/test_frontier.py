"""Bits against accuracy, and the time to an accuracy: on hand-made rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.convergence import __main__ as command
from benchmarks.convergence import frontier, runs


def row_of(
    method: str, bits: float, value: float, seed: int = 0, optimizer: str = "sgd", **other: object
) -> dict[str, object]:
    return {
        "family": "resnet8_fashion_mnist",
        "optimizer": optimizer,
        "method": method,
        "seed": seed,
        "steps": 1000,
        "value": value,
        "test_loss": 1 - value / 100,
        "bits_per_parameter": bits,
        "last_bits_per_parameter": bits / 2,
        "exchange": {},
        "curve": [[500, value - 10, 0.0], [1000, value, 0.0]],
        **other,
    }


ROWS = [
    row_of("ternary", 2.0, 89.5),
    row_of("dense", 48.0, 90.0),
    row_of("dense", 48.0, 92.0, seed=1),
    row_of("ternary", 2.0, 91.75, seed=1),
    row_of("onebit", 1.5, 85.0),
    row_of("quantize_4", 6.0, 88.0),
    row_of("topk_0.01", 0.5, 86.0),
    row_of("lans_dense", 48.0, 30.0, optimizer="lans"),
    row_of("adamw_onebit", 1.5, 30.0, optimizer="adamw"),  # no dense run beside it
    row_of("dense_lr_0.3", 48.0, 99.0),
    row_of("control", 0.1, 99.0, steps=500),
    row_of("control", 0.1, 99.0, seed=7),
]


def test_points_are_paired_and_the_front_is_what_nothing_beats() -> None:
    panels = frontier.panels(ROWS, 1000)
    assert list(panels) == [("resnet8_fashion_mnist", "sgd"), ("resnet8_fashion_mnist", "lans")]
    found = {point.method: point for point in frontier.points(panels["resnet8_fashion_mnist", "sgd"])}
    assert list(found) == ["dense", "quantize_4", "ternary", "onebit", "topk_0.01"]
    assert (found["ternary"].seeds, found["ternary"].bits, found["ternary"].last_bits) == (2, 2.0, 1.0)
    assert found["ternary"].points == pytest.approx(-0.375)
    assert found["ternary"].loss == pytest.approx((0.105 + 0.0825) / (0.1 + 0.08) - 1)
    assert found["onebit"].points == -5.0  # to dense of its own seed
    assert [p.method for p in frontier.front(list(found.values()))] == ["topk_0.01", "ternary", "dense"]


def test_steps_to_an_accuracy_are_read_off_the_curve() -> None:
    curve = [[500, 80.0, 0.0], [1000, 90.0, 0.0], [1500, 85.0, 0.0]]
    assert frontier.steps_to(curve, 84.0) == 700
    assert frontier.steps_to(curve, 90.0) == 1000
    assert frontier.steps_to(curve, 70.0) == 500  # nobody looked earlier
    assert frontier.steps_to(curve, 90.1) is None


def test_time_counts_dense_steps_at_fp32s_rate() -> None:
    times = {("1gbit", "fp32"): 3000.0, ("1gbit", "compressed_ternary"): 1000.0, ("100mbit", "fp32"): 9000.0}
    ternary = row_of("clan_ternary_dense_0.1", 2.0, 90.0, exchange={"start_step": 100})
    hours = (100 * 3000 + 900 * 1000) / 3.6e6
    assert frontier._times([ternary], 90.0, times) == ["clan_ternary_dense_0.1", "1000", "", f"{hours:.2f}"]
    assert frontier._times([ternary], 90.1, times) == ["clan_ternary_dense_0.1", "-", "-", "-"]
    assert frontier._times([row_of("natural_3", 3.0, 90.0)], 90.0, times) is None


def test_the_newest_step_times_count(tmp_path: Path) -> None:
    for date, ms in (("2026-01-02", 2.0), ("2026-01-01", 1.0)):
        row = {"model": "vgg16", "rate": "1gbit", "method": "fp32", "median_ms": ms}
        (tmp_path / f"{date}_step_time.json").write_text(json.dumps({"rows": [row, {**row, "model": "resnet50"}]}))
    assert frontier.step_times("vgg16", tmp_path) == {("1gbit", "fp32"): 2.0}
    assert ("1gbit", "fp32") in frontier.step_times("resnet50")  # of the committed files


def test_the_command_prints_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "runs.jsonl"
    for row in ROWS:
        runs.append(row, file)
    command.main(["frontier", "--steps", "1000", "--runs", str(file)])
    printed = capsys.readouterr().out.splitlines()
    assert "| ternary | 2 | 2 | 1 | 24 | -0.38 | +4.2 % | yes |" in printed
    assert any(line.startswith("| dense | 975 | ") for line in printed)  # 81 % after 500, 91 % after 1000
    assert (tmp_path / "frontier_1000.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="no dense runs of 7 steps"):
        command.main(["frontier", "--steps", "7", "--runs", str(file)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["frontier", "dgc"], "takes --steps and --runs only"), (["summary"], "summary needs a table, one of dgc")],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert message in capsys.readouterr().err

"""benchmarks/prediction.py and break_even.py: what they make of measurements."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from benchmarks import auto, break_even, prediction, step_time
from benchmarks.methods import SETTINGS
from benchmarks.prediction_rank import planned
from benchmarks.step_time import Launch
from lightning_compress.planner.methods import method_names
from lightning_compress.planner.profile import StepTimes
from tests.planner.hand_made import cost, profile


def sample(method: str, measured: list[float], predicted: float) -> dict[str, object]:
    row = {"method": method, "step_ms": predicted, "low_ms": predicted - 1, "high_ms": predicted + 1, "bytes": 7}
    return {"method": method, "steps_ms": measured, "prediction": row, "link": "measured"}


def test_error_is_that_of_the_medians() -> None:
    (row,) = prediction.summarise(Launch("tiny", "1gbit", ("fp32",)), [sample("fp32", [90.0, 100.0, 500.0], 110.0)])
    assert row["error"] == pytest.approx(0.1)
    assert (row["measured_ms"], row["predicted_ms"], row["bytes"]) == (100.0, 110.0, 7)


def test_what_is_off_is_counted() -> None:
    launch = Launch("tiny", "1gbit", ("fp32", "bf16"))
    rows = prediction.summarise(launch, [sample("fp32", [100.0], step) for step in (84.0, 86.0, 114.0, 116.0)])
    caption = str(prediction.tabulate(rows).caption)
    assert caption.startswith("2 of 4 predictions within 15%;")
    assert caption.endswith("\ntiny, 1gbit, 2 hosts; measured")


def test_methods_of_ours_are_predicted_with_the_settings_that_are_measured() -> None:
    for method, settings in SETTINGS.items():
        assert planned(method).arguments == settings
    assert planned("fp32").name in method_names()


@pytest.mark.parametrize("method", ["powersgd", "fp16"])
def test_what_the_planner_does_not_know_is_refused_by_name(method: str) -> None:
    with pytest.raises(SystemExit, match=f"nothing predicts {method}: --methods takes noop, fp32, bf16, compressed"):
        prediction.main(["--models", "tiny", "--methods", "fp32", method])


def test_the_preset_bf16_is_no_hook_of_torch() -> None:
    assert planned("bf16").arguments is None
    assert planned("compressed_bf16").arguments == {"compressor": "bf16"}


def test_auto_is_compared_with_bf16() -> None:
    choice = {"choice": "quantize", "reason": "because"}
    samples = [
        {"method": "bf16", "steps_ms": [100.0, 90.0, 500.0], **choice},
        {"method": "compressed_auto", "steps_ms": [50.0, 40.0, 60.0], **choice},
    ]
    (row,) = auto.summarise(Launch("tiny", "1gbit", ("bf16",)), samples)
    assert (row["bf16_ms"], row["auto_ms"], row["ratio"], row["choice"]) == (100.0, 50.0, 0.5, "quantize")


def test_break_even_is_the_last_rate_at_which_it_pays() -> None:
    # 1 MB dense, a quarter of it coded at 10 ms of encoding on the way: equal at 1 MB / 2 / rate ~ 10 ms
    one = profile(StepTimes(0.1, 0.1, 0.0, (0.1,)))
    costs = {
        "fp32": [cost((0.0, 0.0), (1e6,))],
        "bf16": [cost((0.0, 0.0), (5e5,))],
        "quantize": [cost((0.01, 0.0, 0.0), (5e4, 5e4))],
        "topk": [cost((1.0, 0.0, 0.0), (1e3, 1e3))],
    }
    steps = break_even.curves(one, costs, 2, 0.0, 0.0)
    rows = {row["method"]: row for row in break_even.rows_of("tiny", 2, steps)}
    # 0.2 + 0.01 + 0.8 / r < 0.97 (0.2 + 8 / r) with r in Mb/s: r < 435; of ten steps per decade the last one is 398
    assert rows["quantize"]["mbit_over_fp32"] == 398
    assert rows["quantize"]["mbit_over_bf16"] < 398
    assert rows["topk"]["mbit_over_fp32"] is None


@pytest.mark.parametrize("script", [auto, prediction])
def test_both_have_one_frame(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = []

    def run(launch: Launch, _args: object, _advance: object, program: str) -> list[dict[str, object]]:
        if launch.rate == "2gbit":
            raise RuntimeError("tiny at 2gbit: status 1, see above")
        programs.append(program)
        choice = {"choice": "fp32", "reason": "because"}
        return [{**sample(method, [2.0], 2.0), **choice} for method in (*launch.methods, "compressed_auto")]

    monkeypatch.setattr(step_time, "require_hosts", lambda: None)
    monkeypatch.setattr(step_time, "run", run)
    script.main(["--models", "tiny", "--rates", "1gbit", "none", "--methods", "bf16", "--steps", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    name = script.__name__.rpartition(".")[2]
    assert programs == [f"benchmarks.{name}_rank"] * 2
    assert {row["rate"] for row in rows} == {"1gbit", "none"}
    with pytest.raises(SystemExit, match=f"^{name}.py: tiny at 2gbit: status 1"):
        script.main(["--models", "tiny", "--rates", "2gbit"])

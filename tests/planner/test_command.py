"""``lightning-compress plan``."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_compress import cli

TINY = ["--model", "pytorch_lightning.demos.boring_classes.BoringModel", "--trainer.accelerator", "cpu"]
LINK = ["--bandwidth", "100mbit", "--latency", "1ms", "--nodes", "4"]


def test_json_is_one_line_and_the_plot_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    options = ["--methods", "fp32", "bf16", "topk", "--steps", "3", "--json", "--plot", str(picture)]
    cli.main(["plan", *TINY, *LINK, *options])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    found = json.loads(out)
    assert [row["method"] for row in found["rows"]] == ["fp32", "bf16", "topk"]
    assert found["recommended"] in ("fp32", "bf16", "topk")
    for row in found["rows"]:
        assert set(row) == {"method", "step_ms", "low_ms", "high_ms", "exposed_ms", "bytes"}
        assert row["low_ms"] <= row["step_ms"] <= row["high_ms"]
    assert found["rows"][0]["bytes"] == 2 * 3 / 4 * 4 * (32 * 2 + 2)
    assert found["rows"][0]["exposed_ms"] >= 5  # six messages of 1 ms follow each other
    assert "Use " in err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", *TINY, *LINK, "--methods", "fp32", "bf16", "--steps", "3"])
    out = capsys.readouterr().out
    assert "given: 100 Mb/s, 1000 us, 4 ranks" in out
    assert "x bf16 DDP" in out
    assert out.splitlines()[-1].startswith("Use ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth", "10"], "bandwidth='10' is no number with a unit: write 10gbit"),
        ([], "There is one process and so no link to measure"),
        ([*LINK, "--methods", "tobk"], "method 'tobk' is unknown; known are fp32"),
        ([*LINK, "--plot", "timeline.odt"], "--plot timeline.odt: a picture's name ends with .png"),
        ([*LINK, "--plot", "nowhere/timeline.png"], "--plot nowhere/timeline.png: there is no folder"),
        ([*LINK, "--bandwith", "1gbit"], "unrecognized arguments: --bandwith 1gbit"),
        (
            [*LINK, "--model", "nowhere.Model"],
            "Problem with given class_path 'nowhere.Model': No module named 'nowhere'",
        ),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *TINY, *options])
    assert str(stop.value.code).startswith(f"lightning-compress plan: {message}")
    assert "\n" not in str(stop.value.code)


def test_a_model_that_does_not_build(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "model: {class_path: lightning_compress.recipes.ImageClassifier, init_args: {architecture: resnet51}}"
    )
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--config", str(tmp_path / "own.yaml"), *LINK])
    assert str(stop.value.code).startswith(
        "lightning-compress plan: Problem with given class_path 'lightning_compress.recipes"
    )
    assert str(stop.value.code).endswith("Got value: resnet51")


def test_a_step_that_fails() -> None:
    failing = ["--model", "tests.planner.test_command.Failing", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *failing, *LINK])
    assert stop.value.code == "lightning-compress plan: RuntimeError: no such batch"


def test_ctrl_c_leaves_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["plan", "--model", "tests.planner.test_command.Interrupted", "--trainer.accelerator", "cpu", *LINK]
            )
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from here on
    assert stop.value.code == 130
    out, err = capsys.readouterr()
    assert err.rstrip().endswith("lightning-compress plan: interrupted")
    assert not out
    assert not dist.is_initialized()


def __getattr__(name: str) -> object:
    errors = {"Failing": RuntimeError("no such batch"), "Interrupted": KeyboardInterrupt()}
    if name not in errors:
        raise AttributeError(name)
    from pytorch_lightning.demos.boring_classes import BoringModel

    class Failing(BoringModel):  # type: ignore[misc]
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise errors[name]

    return Failing

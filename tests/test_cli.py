"""The command line: how configs are found, that every shipped one is valid, and what a run leaves behind."""

import csv
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_compress import cli

CONSOLE_SCRIPT = Path(sys.executable).with_name("lightning-compress")
SHIPPED = sorted(cli.shipped_configs())
DEMO = str(cli.shipped_configs()["demo"])
TOPK = str(cli.shipped_configs()["compression/topk"])
# One process without an exchange, done in a second, that leaves no files behind.
QUICK = [
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1"),
    *("--trainer.strategy", "auto", "--trainer.callbacks", "null"),
    *("--trainer.fast_dev_run", "1", "--trainer.enable_progress_bar", "false"),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts in an empty folder, far from the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed_config(capsys: pytest.CaptureFixture[str], args: Sequence[str]) -> dict[str, Any]:
    """What ``--print_config`` prints for a command line."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*args, "--print_config"])
    output = capsys.readouterr()
    assert stop.value.code in (0, None), output.err
    config: dict[str, Any] = yaml.safe_load(output.out)
    return config


def usage_error(capsys: pytest.CaptureFixture[str], args: Sequence[str]) -> str:
    """The message of a command line that is refused."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    assert stop.value.code == 2
    return capsys.readouterr().err


class TestFindConfig:
    @pytest.mark.parametrize("name", ["demo", "demo.yaml", "configs/demo", "configs/demo.yaml"])
    def test_by_name_from_any_folder(self, name: str) -> None:
        assert cli.find_config(name) == DEMO

    def test_in_a_subfolder(self) -> None:
        assert yaml.safe_load(Path(cli.find_config("compression/topk")).read_text())["trainer"]

    def test_own_file_comes_first(self, empty_folder: Path) -> None:
        (empty_folder / "demo.yaml").write_text("trainer: {}")
        assert cli.find_config("demo.yaml") == "demo.yaml"
        assert cli.find_config("demo") == DEMO

    def test_a_folder_is_no_config(self, empty_folder: Path) -> None:
        (empty_folder / "demo").mkdir()
        assert cli.find_config("demo") == DEMO

    @pytest.mark.parametrize("text", ["{trainer: {max_steps: 1}}", "s3://bucket/demo.yaml", "x: " + "y" * 5000])
    def test_other_forms_are_left_alone(self, text: str) -> None:
        assert cli.find_config(text) == text

    @pytest.mark.parametrize("name", ["dem", "configs/dem.yaml", "compression/nothing", "../demo"])
    def test_unknown_lists_all(self, name: str) -> None:
        with pytest.raises(FileNotFoundError) as error:
            cli.find_config(name)
        assert repr(name) in str(error.value)
        assert all(shipped in str(error.value) for shipped in SHIPPED)

    def test_unknown_on_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = usage_error(capsys, ["fit", "--config", "dem"])
        assert "config 'dem' is neither a file nor one of bert_base_classification" in message


class TestCommandLine:
    @pytest.mark.parametrize("typed", [["--config", "demo"], ["--config=demo"], ["-c", "demo"], ["-c=demo"]])
    def test_every_form_of_the_option(self, typed: list[str]) -> None:
        option = typed[0].partition("=")[0]
        assert cli.with_shipped_configs(["fit", *typed, "--x", "demo"]) == ["fit", option, DEMO, "--x", "demo"]

    @pytest.mark.parametrize(
        ("typed", "expected"),
        [
            (["fit"], ["fit", "--config", DEMO]),
            (["fit", "--model.lr", "1"], ["fit", "--config", DEMO, "--model.lr", "1"]),
            (["fit", "--data.root=x"], ["fit", "--config", DEMO, "--data.root=x"]),
            (["fit", "-c", "compression/topk"], ["fit", "--config", DEMO, "-c", TOPK]),
            (["test", "--config", "{trainer: {}}"], ["test", "--config", DEMO, "--config", "{trainer: {}}"]),
        ],
    )
    def test_demo_comes_first_where_no_model_is_named(self, typed: list[str], expected: list[str]) -> None:
        assert cli.with_shipped_configs(typed) == expected

    @pytest.mark.parametrize(
        "typed",
        [
            ["fit", "--model", "Mine"],
            ["fit", "--model=Mine"],
            ["fit", "--data.class_path", "Mine"],
            ["fit", "--config", "{model: Mine}"],
            ["fit", "--config", "own.yaml"],
            [],
            ["--help"],
            ["unknown"],
        ],
    )
    def test_demo_stays_away_otherwise(self, typed: list[str], empty_folder: Path) -> None:
        (empty_folder / "own.yaml").write_text("data: Mine")
        assert DEMO not in cli.with_shipped_configs(typed)

    def test_without_subcommands(self) -> None:
        assert cli.with_shipped_configs(["--model.lr", "1"], run=False) == ["--config", DEMO, "--model.lr", "1"]

    def test_abbreviations_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--trainer.max_epoch 3" in usage_error(capsys, ["fit", "--trainer.max_epoch", "3"])

    def test_unknown_key_in_a_file_is_named(self, capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
        (empty_folder / "own.yaml").write_text("trainer: {max_epoch: 3}")
        assert "max_epoch" in usage_error(capsys, ["fit", "--config", "own.yaml"])

    def test_missing_value(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--config: expected one argument" in usage_error(capsys, ["fit", "--config"])

    def test_missing_data_is_a_usage_error(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LC_DATA_ROOT", raising=False)
        message = usage_error(capsys, ["fit", "--config", "resnet50_imagenet", *QUICK, "--trainer.num_nodes", "1"])
        assert "<root>/train/<class>/<picture>.jpg" in message
        assert len(message.splitlines()) < 15  # no traceback

    def test_ratio_out_of_range_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        option = ["--trainer.strategy.compressor.init_args.ratio", "1.5"]
        message = usage_error(capsys, ["fit", "--config", "compression/topk", *option])
        assert "ratio" in message
        assert "1.5" in message

    def test_missing_extra_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "torchvision" else find_spec(name))
        with pytest.raises(SystemExit) as stop:
            cli.main(["fit"])
        assert stop.value.code == 'lightning-compress needs torchvision: pip install "lightning-compress[recipes]"'


class TestShippedConfigs:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_is_valid_and_takes_effect(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        config = printed_config(capsys, ["fit", "--config", name])
        assert contains(config, yaml.safe_load(Path(cli.find_config(name)).read_text())), config

    @pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("compression/")])
    def test_compression_changes_nothing_else(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with_compression = printed_config(capsys, ["fit", "--config", "resnet50_digits", "--config", name])
        without = printed_config(capsys, ["fit", "--config", "resnet50_digits"])
        strategy = with_compression["trainer"].pop("strategy")
        assert without["trainer"].pop("strategy") == "ddp"
        assert with_compression == without
        assert strategy["class_path"].rpartition(".")[2] == "CompressedStrategy"

    @pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("compression/")])
    def test_compression_can_be_built(self, name: str) -> None:
        args = ["--config", "demo", "--config", name, "--model.architecture", "resnet8", "--trainer.devices", "1"]
        trainer = cli.CompressCLI(args=args, run=False).trainer
        (chosen,) = yaml.safe_load(Path(cli.find_config(name)).read_text())["trainer"].values()
        assert type(trainer.strategy).__name__ == "CompressedStrategy"
        assert chosen["init_args"]["compressor"]["class_path"].rpartition(".")[2] in repr(trainer.strategy)

    def test_one_setting_changes_on_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        option = ["--trainer.strategy.compressor.init_args.ratio", "0.05"]
        config = printed_config(capsys, ["fit", "--config", "compression/topk", *option])
        assert config["trainer"]["strategy"]["init_args"]["compressor"]["init_args"]["ratio"] == 0.05

    def test_wrong_setting_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        option = ["--trainer.strategy.compressor.init_args.ratioo", "0.05"]
        assert "ratioo" in usage_error(capsys, ["fit", "--config", "compression/topk", *option])


class TestRuns:
    def test_short_class_names(self) -> None:
        model = ["--model", "ImageClassifier", "--model.architecture", "resnet8"]
        cli.main(["fit", *model, "--data", "ImageData", "--data.batch_size", "4", *QUICK])

    def test_own_model_with_its_own_data(self) -> None:
        cli.main(["fit", "--model", "pytorch_lightning.demos.boring_classes.BoringModel", *QUICK])

    @pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
    def test_every_subcommand_runs_the_demo(self, command: str) -> None:
        cli.main([command, "--model.architecture", "resnet8", *QUICK])

    def test_in_a_notebook(self) -> None:
        model = ["--config", "demo", "--model.architecture", "resnet8", "--trainer.strategy", "auto"]
        run = cli.CompressCLI(args=[*model, "--trainer.devices", "1"], run=False)
        assert run.model.hparams.architecture == "resnet8"
        assert run.datamodule.num_classes == 10
        assert run.trainer.max_epochs == yaml.safe_load(Path(DEMO).read_text())["trainer"]["max_epochs"]

    def test_demo_on_two_processes(self, empty_folder: Path) -> None:
        options = ["--model.architecture", "resnet8", "--model.lr", "0.1", "--trainer.max_epochs", "1"]
        command = [str(CONSOLE_SCRIPT), "fit", "--config", "demo", *options]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stderr[-3000:]
        results = empty_folder / "runs" / "demo" / "version_0"
        with (results / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        accuracy = [float(row["val/acc"]) for row in rows if row["val/acc"]]
        assert accuracy[-1] > 0.3  # chance is 0.1
        sent = [float(row["comm/bytes_sent"]) for row in rows if row["comm/bytes_sent"]]
        assert sent[-1] > 0
        assert "ratio" in run.stdout
        checkpoint = torch.load(next(results.rglob("*.ckpt")), weights_only=True)
        assert checkpoint["global_step"] == 40

        cli.main(["test", "--config", "demo", "--ckpt_path", str(next(results.rglob("*.ckpt"))), *QUICK])


def contains(whole: Any, part: Any) -> bool:
    """Whether all that ``part`` sets is so in ``whole``; class paths may be short, and dataclasses are their fields."""
    if isinstance(part, dict) and "class_path" in part and isinstance(whole, dict) and "class_path" not in whole:
        return contains(whole, part.get("init_args", {}))
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.rpartition(".")[2] == part.rpartition(".")[2]
    return bool(whole == part)

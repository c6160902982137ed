"""The README's code runs as it is printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_compress import cli
from lightning_compress.compressors.registry import get_compressor
from lightning_compress.presets import PRESETS

README = (Path(__file__).parents[1] / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    """The contents of the README's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def run_in(folder: Path, *command: str) -> str:
    """Run a command in a folder and return what it printed."""
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.parametrize("name", ["demo", "tests"])
def test_marked_commands_are_one_line_each(name: str) -> None:
    (command,) = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*)\n```$", README, flags=re.MULTILINE)
    assert command.startswith("python3 -m venv .venv && ")


@pytest.mark.parametrize("block", [text for text in code_blocks("python") if "Trainer" in text])
def test_trainer_code(block: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block)
    run_in(tmp_path, sys.executable, "train.py")
    assert list(tmp_path.rglob("*.ckpt"))  # Lightning's default checkpoint: the fit went to its end


def test_plain_ddp_code(tmp_path: Path) -> None:
    (block,) = (text for text in code_blocks("python") if "register_comm_hook" in text)
    (tmp_path / "train.py").write_text(block)
    output = run_in(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    (ratio,) = re.findall(r"^(\d+) times less than dense$", output, flags=re.MULTILINE)
    assert int(ratio) > 10


def test_command_lines_name_shipped_configs() -> None:
    lines = [
        line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("lightning-compress")
    ]
    names = [name for line in lines for name in re.findall(r"--config (\S+)", line)]
    assert len(names) >= 5
    assert set(names) <= set(cli.shipped_configs())


def test_every_shipped_config_is_mentioned() -> None:
    unmentioned = [name for name in cli.shipped_configs() if f"`{name.removeprefix('compression/')}`" not in README]
    assert not unmentioned


def test_yaml_is_the_shipped_config() -> None:
    (block,) = code_blocks("yaml")
    shipped = cli.shipped_configs()["compression/topk"]
    assert yaml.safe_load(block) == yaml.safe_load(shipped.read_text())


def test_ratios_in_the_table_are_those_of_the_result_file() -> None:
    files = set(re.findall(r"benchmarks/results/\S+_wire_bytes\w*\.json", README))
    rows = [row for file in files for row in json.loads((Path(__file__).parents[1] / file).read_text())["rows"]]
    measured = {(row["model"], row["method"]): f"{row['ratio']:.3g}" for row in rows if row["ranks"] == 2}
    table = re.findall(r"^\| `(compressed\w*)` \|.*\| (\S+) \| (\S+) \| (?:yes|no) \|$", README, flags=re.MULTILINE)
    assert len(table) == len(PRESETS)
    for method, resnet, bert in table:
        assert (resnet, bert) == (measured["resnet50", method], measured["bert_base", method]), method


def test_table_of_presets_is_complete_and_true() -> None:
    rows = re.findall(r"^\| `compressed_(\w+)` \|.*\| (yes|no) \|$", README, flags=re.MULTILINE)
    presets = {suffix.removeprefix("_"): settings["compressor"] for suffix, settings in PRESETS.items() if suffix}
    assert {name for name, _ in rows} == set(presets)
    remembers = {name: "no" if get_compressor(compressor).unbiased else "yes" for name, compressor in presets.items()}
    assert dict(rows) == remembers

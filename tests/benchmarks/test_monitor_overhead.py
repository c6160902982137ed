"""benchmarks/monitor_overhead.py: the monitor takes turns with its absence, and its ratio is that of the pairs."""

from __future__ import annotations

import os

import pytest
import pytorch_lightning as pl

from benchmarks import monitor_overhead
from benchmarks.workloads import Tiny
from tests.ranks import run_ranks
from tests.strategy.training import make_trainer


def measured(folder: str) -> tuple[list[float], list[float]]:
    make_trainer("compressed")  # sets the environment of a launcher
    assert os.environ["WORLD_SIZE"] == "1"
    pl.seed_everything(0)
    return monitor_overhead.fit(Tiny(), 2, 3, folder)


def test_every_other_block_has_the_monitor(tmp_path) -> None:
    ((steps, own),) = run_ranks(measured, 1, str(tmp_path))
    assert len(steps) == len(own) == 12
    assert [seconds > 0 for seconds in own] == 2 * (3 * [False] + 3 * [True])
    assert all(seconds > 0 for seconds in steps)
    assert all(part < whole for part, whole in zip(own, steps, strict=True))


def test_the_ratio_is_that_of_neighbouring_blocks() -> None:
    # a machine that becomes twice as slow in the middle
    steps = [1.0, 1.0, 1.1, 1.1, 2.0, 2.0, 2.2, 2.2]
    row = monitor_overhead.summarize("tiny", steps, [0.0, 0.0, 0.1, 0.1] * 2, 2)
    assert row["ratios"] == pytest.approx([1.1, 1.1])
    assert row["ratio"] == pytest.approx(1.1)
    assert row["hooks_ms"] == pytest.approx(100.0)


def test_one_pair_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        monitor_overhead.parse(["--pairs", "1"])
    assert "--pairs must be 2 or more" in capsys.readouterr().err

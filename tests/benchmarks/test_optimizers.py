"""benchmarks/optimizers.py: every optimizer takes its turns, and the rows say which."""

from __future__ import annotations

import json

import pytest

from benchmarks import optimizers


def test_rows_of_every_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    optimizers.main(["--model", "tiny", "--repeat", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["optimizer"] for row in rows] == [name for name in optimizers.OPTIMIZERS if name != optimizers.BASELINE]
    for row in rows:
        assert row["numel"] == 256 * 512 + 512 + 2 * 512 + 512 * 256 + 256
        assert row["ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["baseline_ms"], rel=0.05)


@pytest.mark.parametrize("arguments", [["--repeat", "0"], ["--threads", "0"], ["--optimizers", "sgd"]])
def test_a_wrong_argument_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        optimizers.parse(arguments)
    assert arguments[0] in capsys.readouterr().err

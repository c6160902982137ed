"""benchmarks/clip_overlap.py: its arguments, and that one model's kinds of clipping take turns on real ranks."""

from __future__ import annotations

import pytest

from benchmarks import clip_overlap
from benchmarks.step_time_rank import Interface, Run, Training, gather, measure
from benchmarks.workloads import WORKLOADS
from lightning_compress.optim import DGCSGD
from tests.ranks import run_ranks


def rows_of_a_rank() -> list[dict[str, object]]:
    training = Training(WORKLOADS["tiny"], 0, corrected=True)
    runs = [Run(name, clip_overlap._wrap(training.model, m, 0.01)) for name, m in clip_overlap.CLIPPING.items()]
    measure(training, runs, 3, Interface("lo"))
    args = clip_overlap.parse(["--ratio", "0.01"])
    rows = [clip_overlap._row(sample, args) for sample in gather(runs, training.nbytes)]
    for run in runs:
        run.wrapped.close()
    return rows


def test_kinds_of_clipping_take_turns() -> None:
    rows, _ = run_ranks(rows_of_a_rank, 2)
    assert [row["clip_norm_from"] for row in rows] == ["none", "previous_step", "this_step"]
    assert all(len(row["steps_ms"]) == 3 and row["hosts"] == 2 for row in rows)  # type: ignore[arg-type]
    assert all(sorted(row["steps_ms"])[1] == pytest.approx(row["median_ms"], abs=0.1) for row in rows)  # type: ignore[call-overload]


def test_one_step_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clip_overlap.parse(["--steps", "1"])
    assert "--steps must be 2 or more" in capsys.readouterr().err


def test_the_optimizer_is_the_one_that_dgc_needs() -> None:
    assert isinstance(Training(WORKLOADS["tiny"], 0, corrected=True)._optimizer, DGCSGD)

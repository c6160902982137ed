"""benchmarks/cold_start.py: what it starts, and what it makes of the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import break_even, cold_start, cold_start_rank
from lightning_compress import OneBit
from lightning_compress.exchange import runtime
from lightning_compress.planner.training import group_left_as_found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks must be 2 or more, got 1"),
        (["--repeats", "0"], "--repeats must be 1 or more, got 0"),
        (["--strategies", "ddp"], "invalid choice: 'ddp'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cold_start.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_repetition_begins_cold_and_ends_warm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([20.0, 12.0, 30.0, 10.0, 21.0, 11.0])
    folders = []

    def start(_strategy: str, _ranks: int, cache: Path) -> tuple[float, float]:
        warm = any(cache.iterdir())
        (cache / "kernel.nbi").touch()
        folders.append((cache, warm))
        return next(times), 0.0 if warm else 7.5

    monkeypatch.setattr(cold_start, "start", start)
    cold_start.main(["--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert [warm for _, warm in folders] == [False, True] * 3
    assert len({folder for folder, _ in folders}) == 3
    assert (row["cold_s"], row["warm_s"], row["added_s"], row["reported_s"]) == (21.0, 11.0, 10.0, 7.5)


def test_a_program_gets_the_cache_and_is_listened_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    python.write_text('#!/bin/sh\ntouch "$NUMBA_CACHE_DIR/kernel"; echo "$@: compiled the CPU kernels in 3.5 s" >&2\n')
    python.chmod(0o755)
    seconds, compiling = cold_start.start("compressed", 2, tmp_path)
    assert seconds > 0
    assert compiling == 3.5
    assert (tmp_path / "kernel").exists()
    python.write_text("#!/bin/sh\necho no such strategy >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="compressed on 2 ranks: status 1\nno such strategy"):
        cold_start.start("compressed", 2, tmp_path)


def test_the_program_trains_one_step_with_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, steps = [], []
    monkeypatch.setattr(runtime, "compile_kernels", lambda compressors, _: compiled.extend(compressors))
    monkeypatch.setattr(break_even.Training, "on_train_end", lambda self: steps.append(self.global_step), raising=False)
    monkeypatch.setattr(sys, "argv", ["cold_start_rank.py", "--strategy", "compressed_onebit", "--ranks", "1"])
    with group_left_as_found():
        cold_start_rank.main()
    assert any(isinstance(compressor, OneBit) for compressor in compiled)
    assert steps == [1]

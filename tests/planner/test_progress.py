"""The progress bar of measurements and benchmarks."""

import pytest
import rich.progress  # noqa: F401  takes its own clock before the test changes it

from lightning_compress.planner import progress


def test_progress_is_a_line_now_and_then_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 1.0, 40.0, 41.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress(3) as advance:
        for text in ("one", "two", "three"):
            advance(text)
    said = capsys.readouterr()
    assert "2/3 after 40 s: two" in said.err
    assert "one" not in said.err
    assert "three" not in said.err
    assert not said.out

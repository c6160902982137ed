"""benchmarks/report.py: result files."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from benchmarks import report


def test_a_second_result_of_the_day_does_not_replace_the_first(tmp_path: Path) -> None:
    first = report.save(tmp_path, [{"ms": 1}], ["kernels", "--compressors", "a b"])
    second = report.save(tmp_path, [{"ms": 2}], ["kernels"], note="again")
    today = date.today().isoformat()
    assert [first.name, second.name] == [f"{today}_kernels.json", f"{today}_kernels_2.json"]
    assert json.loads(first.read_text())["rows"] == [{"ms": 1}]
    assert json.loads(first.read_text())["command"] == "python benchmarks/kernels.py --compressors 'a b'"
    assert json.loads(second.read_text())["note"] == "again"


def test_the_machine_is_described_without_its_name() -> None:
    machine = report.machine()
    assert machine["usable_cores"] >= 1
    assert set(machine) == {"cpu", "usable_cores", "memory_gib", "system"}


@pytest.mark.parametrize(("number", "text"), [(0.012345, "0.0123"), (9.999, "10"), (12.34, "12.3"), (1234.5, "1234")])
def test_short_numbers_have_no_exponent(number: float, text: str) -> None:
    assert report.short(number) == text

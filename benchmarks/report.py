"""What all benchmarks share: describing machine and versions, dated result files, and tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import lightning_compress

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_LIBRARIES = ("torch", "numba", "numpy", "torchvision", "transformers", "pytorch-lightning")

Row = dict[str, Any]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``publish`` reads."""
    parser.add_argument("--json", action="store_true", help="print one list of objects instead of a table")
    parser.add_argument(
        "--save",
        nargs="?",
        const=RESULTS,
        type=Path,
        metavar="FOLDER",
        help="also write a dated result file with machine, versions and command (default: benchmarks/results)",
    )


def publish(
    args: argparse.Namespace, rows: Sequence[Row], table: Table, command: Sequence[str], **details: Any
) -> None:
    """Prints the rows as ``args`` ask for, and saves them if ``args.save`` is set.

    Args:
        args: With the options of ``add_output_options``.
        rows: Objects of the ``--json`` list.
        table: What is printed otherwise.
        command: Name of the script in ``benchmarks/`` and its arguments.
        details: Further entries of the result file.
    """
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        # a table that goes into a file must not be cut to the 80 columns that rich assumes there
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if args.save is not None:
        path = save(args.save, rows, command, **details)
        Console(stderr=True, soft_wrap=True).print(f"saved {path}")


def save(folder: Path, rows: Sequence[Row], command: Sequence[str], **details: Any) -> Path:
    """Writes ``DATE_SCRIPT.json`` (with a running number if there is one already) and returns its path."""
    script, *arguments = command
    today = date.today().isoformat()
    content = {
        "date": today,
        "command": shlex.join(["python", f"benchmarks/{script}.py", *arguments]),
        "machine": machine(),
        "versions": versions(),
        **details,
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{today}_{script}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{today}_{script}_{number}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def machine() -> Row:
    """The hardware and system that decide the figures."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "usable_cores": len(usable_cores()),
        "memory_gib": round(_memory("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this package with its commit, and of the libraries that do the work."""
    found = {"python": platform.python_version(), "lightning-compress": _own_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def usable_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes that new processes can use without swapping; 0 where the system does not say."""
    return _memory("MemAvailable")


def make_table(title: str, columns: Sequence[str], caption: str = "") -> Table:
    """A table whose first two columns are text and whose other columns are numbers."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left", no_wrap=True)
    return table


def short(number: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


@cache
def _own_version() -> str:
    """Version, and in a clone the commit, marked if the files differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=.changed"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return lightning_compress.__version__
    return f"{lightning_compress.__version__}+{commit}"


def _memory(field: str) -> int:
    return int((_field("/proc/meminfo", field) or "0").split()[0]) * 1024


def _field(path: str, name: str) -> str | None:
    """The value of a ``name: value`` line in one of Linux's files."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)

"""What a cold start adds: one training step in a new process, without and with compiled kernels on disk.

python benchmarks/cold_start.py [--strategies compressed ...] [--ranks 2] [--repeats 3] [--json] [--save]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: see step_time.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.table import Table

from benchmarks.report import ROOT, Row, add_output_options, make_table, publish
from lightning_compress.planner.progress import progress
from lightning_compress.presets import PRESETS

STRATEGIES = tuple(f"compressed{suffix}" for suffix in PRESETS)
LIMIT = 600
"""Seconds after which a training of one step is given up."""


def start(strategy: str, ranks: int, cache: Path) -> tuple[float, float]:
    """Seconds of a whole program that trains one step, and those of compiling that it reports (0 if it says nothing).

    Raises:
        RuntimeError: It failed; with what it wrote.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache)}
    # Lightning's own launcher starts the other ranks while the first one compiles already, which would hide the most of it
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "benchmarks.cold_start_rank", "--strategy", strategy, "--ranks", str(ranks)]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{strategy} on {ranks} ranks: status {done.returncode}\n{done.stderr}")
    reported = re.findall(r"compiled the CPU kernels in ([\d.]+) s", done.stdout + done.stderr)
    return seconds, max(map(float, reported), default=0.0)


def measure(strategy: str, ranks: int, repeats: int) -> Row:
    """One row: every repetition starts with an empty cache, and then again with what that has left there."""
    cold, warm, reported = [], [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            seconds, compiling = start(strategy, ranks, Path(cache))
            cold.append(round(seconds, 2))
            reported.append(compiling)
            warm.append(round(start(strategy, ranks, Path(cache))[0], 2))
    added = [without - with_ for without, with_ in zip(cold, warm, strict=True)]
    return {
        "strategy": strategy,
        "ranks": ranks,
        "cold_s": round(median(cold), 2),
        "warm_s": round(median(warm), 2),
        "added_s": round(median(added), 2),
        "reported_s": round(median(reported), 2),
        "all_cold_s": cold,
        "all_warm_s": warm,
    }


def tabulate(rows: Sequence[Row]) -> Table:
    """Cold and warm starts side by side."""
    caption = "Seconds of a whole program, imports and one step included. Reported: what it says that compiling took."
    table = make_table(
        "Cold starts", ["strategy", "ranks", "cold s", "warm s", "a cold start adds s", "reported s"], caption
    )
    for row in rows:
        numbers = (row[key] for key in ("cold_s", "warm_s", "added_s", "reported_s"))
        table.add_row(row["strategy"], str(row["ranks"]), *(f"{number:.1f}" for number in numbers))
    return table


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="cold_start.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--strategies", nargs="+", choices=STRATEGIES, default=["compressed"], help="default: compressed")
    add("--ranks", type=int, default=2, help="processes on this machine, which all compile (default: %(default)s)")
    add("--repeats", type=int, default=3, help="pairs of a cold and a warm start (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    for option, least in (("ranks", 2), ("repeats", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option} must be {least} or more, got {getattr(args, option)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; ``argv`` None takes the process's own command line.

    Raises:
        SystemExit: A wrong argument, or a training that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    rows = []
    with progress(len(args.strategies)) as advance:
        for strategy in args.strategies:
            try:
                rows.append(measure(strategy, args.ranks, args.repeats))
            except RuntimeError as error:
                raise SystemExit(f"cold_start.py: {error}") from None
            advance(strategy)
    publish(args, rows, tabulate(rows), ["cold_start", *argv])


if __name__ == "__main__":
    main()

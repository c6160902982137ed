"""Command line of the convergence tables; see the package's description."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import RUNS, Run, execute_all, missing, plan
from benchmarks.convergence.tables import SCREEN_STEPS, TABLES
from benchmarks.convergence.tasks import EMBEDDED, TASKS


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", allow_abbrev=False)
    parser.add_argument("command", choices=("run", "summary", "plot", "frontier"))
    parser.add_argument(
        "table",
        nargs="?",
        choices=TABLES,
        help="not for frontier. "
        + "; ".join(f"{name}: {table.about}" for name, table in TABLES.items()).replace("%", "%%"),
    )
    parser.add_argument("--family", choices=TASKS, help="another network and data than the table's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="only these, of any table")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--steps", type=int, help="default: the table's; frontier: 500")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, each of which uses one core (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=Path, default=RUNS, metavar="FILE", help="default: benchmarks/results/convergence.jsonl"
    )
    parser.add_argument("--markdown", action="store_true", help="summary: as a table for a page of docs/")
    args = parser.parse_args(argv)
    if args.command == "frontier":
        args.steps = SCREEN_STEPS if args.steps is None else args.steps
        if args.table or args.methods or args.seeds or args.family:
            parser.error("frontier shows all runs of a length: it takes --steps and --runs only")
        return args
    if args.table is None:
        parser.error(f"{args.command} needs a table, one of {', '.join(TABLES)}")
    table = TABLES[args.table]
    args.family = args.family or table.task
    args.methods = args.methods or list(table.methods)
    args.seeds = list(table.seeds) if args.seeds is None else args.seeds
    args.steps = table.steps if args.steps is None else args.steps
    strange = [m for m in args.methods if METHODS[m].optimizer not in TASKS[args.family].rates]
    if strange:
        parser.error(f"{args.family} has no learning rate for the optimizer of {', '.join(strange)}")
    for name in ("steps", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; ``argv`` None takes the process's own."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.command == "frontier":
        from benchmarks.convergence import frontier

        frontier.show(args.runs, args.steps)
        return
    runs: list[Run] = list(plan(args.family, args.methods, args.seeds, args.steps))
    if args.command == "run":
        try:
            execute_all(missing(runs, args.runs), args.jobs, args.runs)
        except FileNotFoundError as error:
            names = ", ".join(task.name for task in EMBEDDED)
            raise SystemExit(f"{error} Or --family: the data of {names} comes inside scikit-learn or Python.") from None
        return
    from benchmarks.convergence import summary

    if args.command == "summary":
        summary.show(args.table, TABLES[args.table], runs, args.runs, args.markdown)
    else:
        summary.plot(args.table, TABLES[args.table].about, runs, args.runs)


if __name__ == "__main__":
    main()

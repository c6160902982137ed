"""Random exchanges among real processes, each compared with the same exchange simulated in one process.

python benchmarks/stress.py [--exchanges 1000] [--ranks 2 3 4 5 6 7 8] [--seed 0] [--limit 60] [--json] [--save]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from benchmarks.report import Row, add_output_options, make_table, publish
from benchmarks.stress_rank import FORMATS, Case, Outcome, draw, serve
from lightning_compress.compressors import compressor_names, get_compressor
from lightning_compress.exchange.codec import compile_kernels
from lightning_compress.planner.progress import progress

RANKS = (2, 3, 4, 5, 6, 7, 8)
_GRACE = 10.0
"""Seconds after the collectives' own time limit in which ranks may still say what they waited for."""


def run(cases: Sequence[Case], world_size: int, limit: float, advance: Callable[[str], None]) -> list[Outcome]:
    """Carries out ``cases`` in one launch of ``world_size`` processes.

    Raises:
        RuntimeError: A rank has failed, or no exchange has ended for ``limit`` seconds; names the exchange.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning_compress", "benchmarks.stress"])
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(
                target=serve, args=(rank, world_size, cases, limit, folder, None if rank else theirs), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        theirs.close()  # ours: a rank 0 that dies without a word is noticed at once
        try:
            return listen(ours, cases, limit + _GRACE, advance)
        finally:
            for process in ranks:
                process.join(timeout=_GRACE)
                process.kill()


def listen(pipe: Connection, cases: Sequence[Case], patience: float, advance: Callable[[str], None]) -> list[Outcome]:
    """Takes what rank 0 says after each exchange.

    Raises:
        RuntimeError: It says nothing for ``patience`` seconds, or has ended.
    """
    outcomes: list[Outcome] = []
    for case in cases:
        if not pipe.poll(patience):
            raise RuntimeError(f"a deadlock: not finished after {patience:.0f} s: {case}")
        try:
            outcomes.append(pipe.recv())
        except EOFError:
            raise RuntimeError(f"a rank has failed, see above, in {case}") from None
        advance(f"{case.world_size} ranks, exchange {case.number}")
    return outcomes


def row(world_size: int, cases: Sequence[Case], outcomes: Sequence[Outcome], seconds: float) -> Row:
    """One line of the result."""
    return {
        "ranks": world_size,
        "exchanges": len(cases),
        "least_buckets": min(outcome.buckets for outcome in outcomes),
        "most_buckets": max(outcome.buckets for outcome in outcomes),
        "bucket_exchanges": sum(outcome.bucket_exchanges for outcome in outcomes),
        "equal_bits": sum(outcome.bits and not outcome.differs for outcome in outcomes),
        "equal_but_order_of_sums": sum(not outcome.bits and not outcome.differs for outcome in outcomes),
        "different": sum(bool(outcome.differs) for outcome in outcomes),
        "ways": dict(Counter(outcome.way for outcome in outcomes)),
        "seconds": round(seconds, 1),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="stress.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--exchanges", type=int, default=1000, help="of all numbers of ranks together (default: %(default)s)")
    add("--ranks", nargs="+", type=int, default=RANKS, metavar="N", help="numbers of ranks (default: 2 to 8)")
    add("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    add(
        "--limit", type=float, default=60.0, help="seconds after which an exchange is a deadlock (default: %(default)g)"
    )
    add_output_options(parser)
    args = parser.parse_args(argv)
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be 2 or more, got {min(args.ranks)}")
    if args.exchanges < len(args.ranks):
        parser.error(f"--exchanges must be at least one for each of --ranks, got {args.exchanges}")
    if args.limit <= 0:
        parser.error(f"--limit must be positive, got {args.limit}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs and prints; exits with 1 if an exchange differs from its simulation."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # of the ranks: unused parameters are looked for where there may be none
    compile_kernels(map(get_compressor, compressor_names()), FORMATS.values())  # in no exchange's time
    rows, wrong = [], []
    with progress(args.exchanges) as advance:
        for place, world_size in enumerate(args.ranks):
            count = args.exchanges // len(args.ranks) + (place < args.exchanges % len(args.ranks))
            cases = draw(count, world_size, args.seed)
            start = time.perf_counter()
            try:
                outcomes = run(cases, world_size, args.limit, advance)
            except RuntimeError as error:
                raise SystemExit(f"stress.py: {error}") from None
            rows.append(row(world_size, cases, outcomes, time.perf_counter() - start))
            wrong += [
                f"{outcome.differs}: {asdict(case)}"
                for case, outcome in zip(cases, outcomes, strict=True)
                if outcome.differs
            ]
    columns = [
        "ranks",
        "exchanges",
        "buckets",
        "bucket exchanges",
        "equal bits",
        "equal but order of sums",
    ]
    columns += ["different", "seconds"]
    caption = "Each exchange has random settings and shapes and runs for several steps; memories are compared too."
    table = make_table("Random exchanges against their simulation in one process", columns, caption)
    for r in rows:
        cells: list[Any] = [
            r["ranks"],
            r["exchanges"],
            f"{r['least_buckets']} to {r['most_buckets']}",
            r["bucket_exchanges"],
        ]
        cells += [r["equal_bits"], r["equal_but_order_of_sums"], r["different"], r["seconds"]]
        table.add_row(*map(str, cells))
    publish(args, rows, table, ["stress", *argv])
    if wrong:
        raise SystemExit("\n".join(["stress.py: not as simulated:", *wrong]))


if __name__ == "__main__":
    main()

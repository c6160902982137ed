"""Steps of ``strategy="compressed_auto"`` after its choice against bf16 DDP, in Lightning's Trainer, on emulated hosts.

python benchmarks/auto.py --models resnet50 --rates 100mbit 1gbit none --steps 9 [--json] [--save]

Needs what step_time.py needs: Linux, root and iproute2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: see step_time.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.table import Table

from benchmarks import step_time
from benchmarks.report import Row, make_table
from benchmarks.step_time import Launch

METHODS = ("bf16",)
"""What ``compressed_auto`` is compared with."""


def summarise(launch: Launch, samples: Sequence[Row]) -> list[Row]:
    """One row: both medians, the choice and its reason."""
    ms = {sample["method"]: sample["steps_ms"] for sample in samples}
    row = {
        "model": launch.model,
        "rate": launch.rate,
        "bf16_ms": round(median(ms["bf16"]), 3),
        "auto_ms": round(median(ms["compressed_auto"]), 3),
        "ratio": round(median(ms["compressed_auto"]) / median(ms["bf16"]), 4),
        "spread": round(max(step_time.spread(own) / median(own) for own in ms.values()), 4),
        "choice": samples[0]["choice"],
        "reason": samples[0]["reason"],
        "steps_ms": ms,
    }
    return [row]


def tabulate(rows: Sequence[Row]) -> Table:
    """Both medians side by side."""
    columns = ["model, rate", "choice", "bf16 DDP ms", "compressed_auto ms", "ratio", "spread"]
    table = make_table("Training steps on emulated hosts, after the choice", columns, _CAPTION)
    for row in rows:
        cells = (f"{row['bf16_ms']:.1f}", f"{row['auto_ms']:.1f}", f"{row['ratio']:.2f}", f"{row['spread']:.2f}")
        table.add_row(f"{row['model']} {row['rate']}", row["choice"], *cells)
    return table


_CAPTION = (
    "Ratio of the medians, below 1: faster than bf16 DDP, which runs before and after. Spread: the larger\n"
    "interquartile range of both, by the median; a difference below it is none."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        argv: Command line without the program's name (see ``step_time.py``); None takes the process's own.

    Raises:
        SystemExit: A wrong argument, a machine that cannot emulate hosts, or a host that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = step_time.parse([*argv, "--methods", *METHODS])
    launches = [Launch(model, rate, METHODS, args.hosts) for model in args.models for rate in args.rates]
    step_time.compare("auto", args, argv, launches, summarise, tabulate)


if __name__ == "__main__":
    step_time.ended_by_sigterm()
    main()

"""The planner's prediction against the measured step time on emulated hosts, in the same run of the same processes.

python benchmarks/prediction.py --models resnet50 --rates 100mbit 1gbit --methods fp32 bf16 compressed [--json] [--save]

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
from benchmarks.methods import REFERENCE
from benchmarks.prediction_rank import PLANNED
from benchmarks.report import Row, make_table
from benchmarks.step_time import Launch

TOLERANCE = 0.15
"""Share of a step by which a prediction may be wrong."""


def summarise(launch: Launch, samples: Sequence[Row]) -> list[Row]:
    """One row per method: the medians of measured and predicted steps, and by how much they differ."""
    return [_summary(launch, sample) for sample in samples]


def _summary(launch: Launch, sample: Row) -> Row:
    measured, prediction = median(sample["steps_ms"]), sample["prediction"]
    return {
        "model": launch.model,
        "rate": launch.rate,
        "hosts": launch.hosts,
        "method": sample["method"],
        "measured_ms": round(measured, 3),
        "predicted_ms": prediction["step_ms"],
        "low_ms": prediction["low_ms"],
        "high_ms": prediction["high_ms"],
        "error": round(prediction["step_ms"] / measured - 1, 4),
        "bytes": prediction["bytes"],
        "link": sample["link"],
        "steps_ms": sample["steps_ms"],
    }


def tabulate(rows: Sequence[Row]) -> Table:
    """Measured and predicted side by side."""
    judged = [row for row in rows if row["method"] != REFERENCE]  # whose own steps are what is measured
    good = sum(abs(row["error"]) <= TOLERANCE for row in judged)
    caption = f"{good} of {len(judged)} predictions within {TOLERANCE:.0%}; {REFERENCE} is what they are made from."
    links = dict.fromkeys(f"{row['model']}, {row['rate']}, {row['hosts']} hosts; {row['link']}" for row in rows)
    columns = ["model, rate", "method", "measured ms", "predicted ms", "interval", "error %"]
    table = make_table(
        "Training steps on emulated hosts: predicted and measured", columns, "\n".join([caption, *links])
    )
    for row in rows:
        interval = f"{row['low_ms']:.0f} .. {row['high_ms']:.0f}"
        cells = (f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}", interval, f"{100 * row['error']:+.1f}")
        table.add_row(f"{row['model']} {row['rate']}", row["method"], *cells)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Predicts, measures and prints.

    Args:
        argv: Command line without the program's name (see ``step_time.py``); None takes the process's own.

    Raises:
        SystemExit: A wrong argument, a machine that cannot emulate hosts, or a host that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = step_time.parse(argv, (REFERENCE, *PLANNED))
    if strange := sorted(set(args.methods) - {REFERENCE, *PLANNED}):
        raise SystemExit(
            f"prediction.py: nothing predicts {strange[0]}: --methods takes {', '.join((REFERENCE, *PLANNED))}."
        )
    args.methods = list(dict.fromkeys([REFERENCE, *args.methods]))
    step_time.compare("prediction", args, argv, step_time.plan_launches(args), summarise, tabulate)


if __name__ == "__main__":
    step_time.ended_by_sigterm()
    main()

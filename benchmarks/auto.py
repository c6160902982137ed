"""Steps of ``strategy="compressed_auto"`` after its choice against bf16 DDP, in Lightning's Trainer, on emulated hosts.

python benchmarks/auto.py --models resnet50 --rates 100mbit 1gbit none --steps 9 [--json] [--save]

Needs what step_time.py needs: Linux, root and iproute2.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: see step_time.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.table import Table

from benchmarks import step_time
from benchmarks.report import Row, make_table, publish
from benchmarks.step_time import Launch
from benchmarks.step_time_rank import WARM_UP
from benchmarks.workloads import WORKLOADS
from lightning_compress.planner.progress import progress


def summarise(launch: Launch, samples: Sequence[Row]) -> Row:
    """One row per network: both medians, the choice and its reason."""
    ms = {sample["method"]: sample["steps_ms"] for sample in samples}
    return {
        "model": launch.model,
        "rate": launch.rate,
        "bf16_ms": round(median(ms["bf16"]), 3),
        "auto_ms": round(median(ms["compressed_auto"]), 3),
        "ratio": round(median(ms["compressed_auto"]) / median(ms["bf16"]), 4),
        "choice": samples[0]["choice"],
        "reason": samples[0]["reason"],
        "steps_ms": ms,
    }


def tabulate(rows: Sequence[Row]) -> Table:
    """Both medians side by side."""
    columns = ["model, rate", "choice", "bf16 DDP ms", "compressed_auto ms", "ratio"]
    table = make_table("Training steps on emulated hosts, after the choice", columns, "Below 1: faster than bf16 DDP.")
    for row in rows:
        cells = (f"{row['bf16_ms']:.1f}", f"{row['auto_ms']:.1f}", f"{row['ratio']:.2f}")
        table.add_row(f"{row['model']} {row['rate']}", row["choice"], *cells)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        argv: Command line without the program's name (see ``step_time.py``); None takes the process's own.

    Raises:
        SystemExit: A wrong argument, a machine that cannot emulate hosts, or a host that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = step_time.parse([*argv, "--methods", "bf16"])
    step_time.require_hosts(args)
    launches = [Launch(model, rate, ("bf16",)) for model in args.models for rate in args.rates]
    rows: list[Row] = []
    with progress(len(launches)) as advance:
        for launch in launches:
            try:
                samples = step_time.run(launch, args, advance, "benchmarks.auto_rank")
            except RuntimeError as error:
                raise SystemExit(f"auto.py: {error}") from None
            rows.append(summarise(launch, samples))
    details = {model: WORKLOADS[model].description for model in args.models}
    publish(args, rows, tabulate(rows), ["auto", *argv], models=details, warm_up_steps=WARM_UP)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # see step_time.py
    main()

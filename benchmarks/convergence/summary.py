"""Reads the runs: means, spreads, paired differences to the first method, and plots of the curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from scipy import stats

from benchmarks.convergence.runs import Run, key, read
from benchmarks.report import RESULTS, Row, make_table

COLUMNS = ["method", "seeds", "mean %", "spread", "difference", "95 % interval", "test loss", "bits", "last bits"]


def show(table: str, about: str, runs: Sequence[Run], path: Path, markdown: bool = False) -> None:
    """Prints a table of the runs that are there; ``markdown`` prints it for a page of the documentation."""
    rows = _found(runs, path)
    if not rows:
        raise SystemExit(f"{path} has none of these runs: python -m benchmarks.convergence run {table}")
    if markdown:
        print("\n".join("| " + " | ".join(line) + " |" for line in [COLUMNS, ["---"] * len(COLUMNS), *lines(rows)]))
        return
    first = rows[0]
    caption = (
        f"{first['family']}, {first['workers']} workers x {first['batch_size']}, {first['steps']} steps; "
        f"{len(rows)} of {len(runs)} runs. Spread: standard deviation over seeds. Difference: to {first['method']}, "
        "seed by seed, in points. Bits: what a rank puts on the wire per parameter and step, the mean over the run and "
        "its last step."
    )
    printed = make_table(f"{about} ({table})", COLUMNS, caption)
    for line in lines(rows):
        printed.add_row(*line)
    Console(width=140).print(printed)


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line per method, in the order of ``rows``; the first method is the baseline of the differences."""
    by_method: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["seed"]] = row
    (baseline, *_) = by_method.values()
    result = []
    for method, of_seed in by_method.items():
        values = [row["value"] for row in of_seed.values()]
        pairs = [row["value"] - baseline[seed]["value"] for seed, row in of_seed.items() if seed in baseline]
        difference = ["-", "-"] if of_seed is baseline else [_signed(pairs), _interval(pairs)]
        losses = [row["test_loss"] for row in of_seed.values()]
        bits = [
            f"{mean(row[name] for row in of_seed.values()):.2f}"
            for name in ("bits_per_parameter", "last_bits_per_parameter")
        ]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else "-"
        result.append(
            [method, str(len(values)), f"{mean(values):.2f}", spread, *difference, f"{mean(losses):.3f}", *bits]
        )
    return result


def interval(pairs: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The confidence interval of the mean of paired differences (Student's t); needs two or more."""
    half = float(stats.t.ppf((1 + level) / 2, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))
    return mean(pairs) - half, mean(pairs) + half


def plot(table: str, about: str, runs: Sequence[Run], path: Path) -> None:
    """Writes ``convergence_TABLE.png`` beside the runs' file: accuracy over steps, the mean over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = _found(runs, path)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        curves = [row["curve"] for row in rows if row["method"] == method]
        steps = [point[0] for point in curves[0]]
        values = [[curve[i][1] for curve in curves] for i in range(len(steps))]
        axes.plot(steps, list(map(mean, values)), marker="o", markersize=3, label=f"{method} ({len(curves)})")
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.15)
    axes.set(xlabel="optimizer steps", ylabel="test accuracy, %", title=about)
    axes.legend(fontsize="small", title="method (seeds); band: smallest to largest", title_fontsize="small")
    axes.grid(alpha=0.3)
    target = (path.parent if path.parent != Path() else RESULTS) / f"convergence_{table}.png"
    figure.savefig(target, dpi=120)
    plt.close(figure)
    print(f"saved {target}")


def _found(runs: Sequence[Run], path: Path) -> list[Row]:
    """The rows of ``runs`` that are there, method by method in the order of the table."""
    rows = {key(row): row for row in read(path)}
    methods = list(dict.fromkeys(run.method for run in runs))
    wanted = sorted(runs, key=lambda run: (methods.index(run.method), run.seed))
    keys = [key(run.settings()) for run in wanted]
    return [rows[k] for k in keys if k in rows]


def _signed(pairs: Sequence[float]) -> str:
    return f"{mean(pairs):+.2f}" if pairs else "-"


def _interval(pairs: Sequence[float]) -> str:
    return "{:+.2f} to {:+.2f}".format(*interval(pairs)) if len(pairs) > 1 else "-"

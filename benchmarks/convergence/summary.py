"""Reads the runs: means, spreads, paired differences to dense, what they prove, and plots of the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from scipy import stats

from benchmarks.convergence.evidence import Margin, compare, holm, verdict
from benchmarks.convergence.runs import Run, key, read
from benchmarks.convergence.tables import Table
from benchmarks.report import RESULTS, Row, make_table

COLUMNS = ["method", "seeds", "mean %", "spread", "difference", "95 % interval", "test loss", "bits", "last bits"]
PROOF_COLUMNS = ["method", "seeds", "points", "loss %", "p", "Holm", "Wilcoxon", "verdict"]


def show(name: str, table: Table, runs: Sequence[Run], path: Path, markdown: bool = False) -> None:
    """Prints the runs that are there and what they prove; ``markdown`` prints it for a page of the documentation."""
    rows = found(runs, path)
    if not rows:
        raise SystemExit(f"{path} has none of these runs: python -m benchmarks.convergence run {name}")
    first = rows[0]
    caption = (
        f"{first['family']}, {first['workers']} workers x {first['batch_size']}, {first['steps']} steps; "
        f"{len(rows)} of {len(runs)} runs. Spread: standard deviation over seeds. Difference: to the first method of the same "
        "optimizer, seed by seed, in points. Bits: what a rank puts on the wire per parameter and step, the mean over the run "
        "and its last step."
    )
    _print(f"{table.about} ({name})", COLUMNS, lines(rows), caption, markdown)
    if table.control is not None:
        proofs, comment = prove(rows, table.control, table.margin)
        _print("What may be claimed", PROOF_COLUMNS, proofs, comment, markdown)


def _print(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], caption: str, markdown: bool) -> None:
    if markdown:
        rows = [columns, ["---"] * len(columns), *lines]
        print("\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{caption}\n")
        return
    printed = make_table(title, columns, caption)
    for line in lines:
        printed.add_row(*line)
    Console(width=140).print(printed)


def prove(rows: Sequence[Row], control: str, margin: Margin) -> tuple[list[list[str]], str]:
    """One line per method that is compared, and a comment, which says loudly if the control was not found worse."""
    by_method = grouped(rows)
    compared = {
        method: comparison
        for method in by_method
        if method != baseline_of(method, by_method)
        and (comparison := compare(by_method[baseline_of(method, by_method)], by_method[method], margin))
    }
    adjusted = holm({method: c.p for method, c in compared.items() if method != control})
    verdicts = {method: verdict(c, adjusted.get(method, c.p), margin) for method, c in compared.items()}
    result = [
        [
            *(method, str(c.seeds), f"{c.points:+.2f}", f"{100 * c.loss:+.1f}"),
            *(f"{p:.3g}" for p in (c.p, adjusted.get(method, c.p), c.wilcoxon)),
            verdicts[method],
        ]
        for method, c in compared.items()
    ]
    comment = (
        f"Non-inferior: mean accuracy less than {margin.points:g} points and mean test loss less than {100 * margin.loss:g} % "
        "worse than dense, by one-sided paired t-tests, Holm's correction over the methods without the control, level "
        f"{margin.alpha:g}. Worse: beyond the margin at the same level. Not shown: these runs cannot tell."
    )
    if verdicts.get(control) != "worse":
        found_it = verdicts.get(control, "without two paired runs")
        comment += f" THE CONTROL {control} WAS NOT FOUND WORSE ({found_it}): THESE RUNS PROVE NOTHING ABOUT THE OTHER METHODS."
    return result, comment


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method, in the order of ``rows``."""
    result: dict[str, list[Row]] = {}
    for row in rows:
        result.setdefault(row["method"], []).append(row)
    return result


def baseline_of(method: str, by_method: Mapping[str, Sequence[Row]]) -> str:
    """The first method of the same optimizer: dense, in all tables."""
    optimizer = by_method[method][0]["optimizer"]
    return next(name for name, rows in by_method.items() if rows[0]["optimizer"] == optimizer)


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line per method, in the order of ``rows``; differences are to the first method of the same optimizer."""
    by_method = grouped(rows)
    result = []
    for method, own in by_method.items():
        dense = baseline_of(method, by_method)
        pairs = differences(by_method[dense], own)
        values = [row["value"] for row in own]
        bits = [f"{mean(row[name] for row in own):.2f}" for name in ("bits_per_parameter", "last_bits_per_parameter")]
        result.append(
            [
                *(method, str(len(values)), f"{mean(values):.2f}", f"{stdev(values):.2f}" if len(values) > 1 else "-"),
                *(["-", "-"] if method == dense else [_signed(pairs), _interval(pairs)]),
                *(f"{mean(row['test_loss'] for row in own):.3f}", *bits),
            ]
        )
    return result


def differences(dense: Sequence[Row], method: Sequence[Row]) -> list[float]:
    """Points of accuracy by which a method differs from dense, for each seed that both have."""
    of_seed = {row["seed"]: row["value"] for row in dense}
    return [row["value"] - of_seed[row["seed"]] for row in method if row["seed"] in of_seed]


def interval(pairs: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The confidence interval of the mean of paired differences (Student's t); needs two or more."""
    half = float(stats.t.ppf((1 + level) / 2, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))
    return mean(pairs) - half, mean(pairs) + half


def plot(table: str, about: str, runs: Sequence[Run], path: Path) -> None:
    """Writes ``convergence_TABLE.png`` beside the runs' file: accuracy over steps, the mean over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = found(runs, path)
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


def found(runs: Sequence[Run], path: Path) -> list[Row]:
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

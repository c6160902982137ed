"""Bits against accuracy: which methods are not beaten in both, and what that means for the time to an accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.convergence.evidence import NO_LOSS
from benchmarks.convergence.methods import SEARCH
from benchmarks.convergence.runs import read
from benchmarks.convergence.summary import baseline_of, differences, grouped
from benchmarks.report import RESULTS, Row

MODELS = {
    "resnet8_fashion_mnist": "resnet50",
    "vgg_fashion_mnist": "vgg16",
    "tiny_bert_python_docs": "bert_base",
}
"""Whose measured step times stand for a family's."""
STEP_TIMES = {
    "dense": "fp32",
    "quantize_4": "compressed",
    "topk_0.01": "compressed_topk",
    "centered_0.06": "compressed_centered",
    "powersgd_1": "powersgd",
    **{name: f"compressed_{name}" for name in ("onebit", "ternary", "topk_0.001")},
}
"""Names in ``benchmarks/step_time.py`` by names of exchanges, where both are the same exchange."""
RATES = ("100mbit", "1gbit", "10gbit")
COLUMNS = ["method", "seeds", "bits", "last bits", "times less", "points to dense", "test loss to dense", "not beaten"]


@dataclass(frozen=True)
class Point:
    """A method in one panel.

    Attributes:
        method: Name.
        seeds: Runs that have a dense one beside them.
        bits: On the wire per parameter and step, everything counted, mean over the run.
        last_bits: The same in its last step.
        dense_bits: What dense sends.
        points: Mean difference of accuracy to dense.
        loss: Relative difference of the mean test loss to dense.
    """

    method: str
    seeds: int
    bits: float
    last_bits: float
    dense_bits: float
    points: float
    loss: float


Panel = tuple[str, str]
"""Family and optimizer."""


def panels(rows: Sequence[Row], steps: int) -> dict[Panel, list[Row]]:
    """The runs of that length, without those that search learning rates, by family and optimizer; dense comes first."""
    result: dict[Panel, list[Row]] = {}
    wanted = [row for row in rows if row["steps"] == steps and row["method"] not in SEARCH]
    for row in sorted(wanted, key=lambda row: not row["method"].endswith("dense")):
        result.setdefault((row["family"], row["optimizer"]), []).append(row)
    return {panel: own for panel, own in result.items() if own[0]["method"].endswith("dense")}


def points(rows: Sequence[Row]) -> list[Point]:
    """The methods of a panel that share seeds with dense, by falling bits."""
    by_method = grouped(rows)
    dense = by_method[baseline_of(rows[0]["method"], by_method)]
    result = []
    for method, own in by_method.items():
        seeds = {row["seed"] for row in own} & {row["seed"] for row in dense}
        if not seeds:
            continue
        ours, theirs = ([row for row in some if row["seed"] in seeds] for some in (own, dense))
        bits, last_bits, loss = (
            _mean(ours, key) for key in ("bits_per_parameter", "last_bits_per_parameter", "test_loss")
        )
        result.append(
            Point(
                *(method, len(seeds), bits, last_bits, _mean(theirs, "bits_per_parameter")),
                *(mean(differences(theirs, ours)), loss / _mean(theirs, "test_loss") - 1),
            )
        )
    return sorted(result, key=lambda point: -point.bits)


def _mean(rows: Sequence[Row], key: str) -> float:
    return mean(row[key] for row in rows)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: every method with fewer bits is less accurate. By rising bits."""
    result: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, -point.points)):
        if not result or point.points > result[-1].points:
            result.append(point)
    return result


def show(path: Path, steps: int) -> None:
    """Prints one markdown table per panel, and those of the times, and plots all panels into one figure."""
    chosen = panels(read(path), steps)
    if not chosen:
        raise SystemExit(
            f"{path} has no dense runs of {steps} steps: python -m benchmarks.convergence run screen_resnet"
        )
    for (family, optimizer), rows in chosen.items():
        found = points(rows)
        best = front(found)
        _print(
            f"{family}, {optimizer}, {steps} steps",
            COLUMNS,
            [
                [
                    *(p.method, str(p.seeds), f"{p.bits:.3g}", f"{p.last_bits:.3g}", f"{p.dense_bits / p.bits:.0f}"),
                    *(f"{p.points:+.2f}", f"{100 * p.loss:+.1f} %", "yes" if p in best else ""),
                ]
                for p in found
            ],
        )
        _show_times(family, rows)
    print(f"saved {plot(chosen, steps, path)}")


def _print(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    print(f"\n**{title}**\n")
    print("\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *lines]))


def _show_times(family: str, rows: Sequence[Row]) -> None:
    """Hours to an accuracy; what is assumed stands below the table."""
    target = mean(row["value"] for row in grouped(rows)[rows[0]["method"]]) - NO_LOSS.points
    model = MODELS.get(family, family)
    times = step_times(model)
    lines = [line for method in grouped(rows).values() if (line := _times(method, target, times))]
    rates = [rate for rate in RATES if any(key[0] == rate for key in times)]
    if not lines or len(rows[0]["curve"]) < 2:
        return
    title = f"Time to {target:.2f} %: dense's mean at the end less {NO_LOSS.points:g} points"
    _print(title, ["method", "steps", *(f"hours at {rate}" for rate in rates)], lines)
    print(
        f"\nIf a network took the steps of {family} here (mean over seeds, linear between evaluations, '-' if that "
        f"never gets there) and the time per step that was measured of {model} on two emulated hosts (dense steps: fp32's). "
        "Empty: not measured."
    )


def _times(rows: Sequence[Row], target: float, times: dict[tuple[str, str], float]) -> list[str] | None:
    """A line of the table of times; None without measured step times."""
    exchange = _exchange(rows[0]["method"])
    rates = [rate for rate in RATES if any(key[0] == rate for key in times)]
    if not any((rate, STEP_TIMES.get(exchange, "")) in times for rate in rates):
        return None
    needed = steps_to([[step, mean(own)] for step, own in _values(rows).items()], target)
    if needed is None:
        return [rows[0]["method"], "-", *("-" for _ in rates)]
    dense = rows[0]["exchange"].get("start_step", 0)
    hours = []
    for rate in rates:
        ours, fp32 = times.get((rate, STEP_TIMES[exchange])), times.get((rate, "fp32"))
        if ours is None or fp32 is None:
            hours.append("")
        else:
            hours.append(f"{(min(needed, dense) * fp32 + max(0, needed - dense) * ours) / 3.6e6:.2f}")
    return [rows[0]["method"], f"{needed:.0f}", *hours]


def _values(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Accuracies by step."""
    result: dict[int, list[float]] = {}
    for row in rows:
        for step, value, *_ in row["curve"]:
            result.setdefault(step, []).append(value)
    return result


def _exchange(method: str) -> str:
    """The exchange of a method, without its optimizer and dense steps."""
    name = method.removeprefix("clan_").removeprefix("adamw_").removeprefix("lans_")
    return name.partition("_dense_")[0]


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps at which a curve of [step, accuracy, ...] first reaches an accuracy, linear in between; None if it never does."""
    before = (0.0, 0.0)
    for step, value, *_ in curve:
        if value >= target:
            rise = value - before[1]
            return step if rise <= 0 or before[0] == 0 else before[0] + (step - before[0]) * (target - before[1]) / rise
        before = (step, value)
    return None


def step_times(model: str, folder: Path = RESULTS) -> dict[tuple[str, str], float]:
    """Measured milliseconds of a step by rate and method, from the newest file of each."""
    return {
        (row["rate"], row["method"]): row["median_ms"]
        for path in sorted(folder.glob("*_step_time*.json"))
        for row in json.loads(path.read_text())["rows"]
        if row["model"] == model
    }


TICKS = (-50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2)


def plot(chosen: dict[Panel, list[Row]], steps: int, path: Path) -> Path:
    """Writes ``frontier_STEPS.png`` beside the runs' file: one panel per family and optimizer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(8 * columns, 6 * lines), layout="constrained", squeeze=False)
    for axis in axes.flat[len(chosen) :]:
        axis.axis("off")
    for axis, ((family, optimizer), rows) in zip(axes.flat, chosen.items(), strict=False):
        found = points(rows)
        best = front(found)
        axis.axhspan(-NO_LOSS.points, NO_LOSS.points, color="0.93")
        axis.step([p.bits for p in best], [p.points for p in best], where="post", color="0.6", linewidth=1)
        for name, own in _kinds(found):
            axis.scatter([p.bits for p in own], [p.points for p in own], s=18, label=name)
        for p in found:
            axis.annotate(f"{p.method} ({p.seeds})", (p.bits, p.points), (3, 2), textcoords="offset points", fontsize=6)
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=1.0)
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.set(xlabel="bits on the wire per parameter and step", ylabel="points of accuracy to dense")
        axis.set_title(
            f"{family}, {optimizer}, {steps} steps (seeds); grey: {NO_LOSS.points:g} points", fontsize="medium"
        )
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", loc="upper left")
    target = path.parent / f"frontier_{steps}.png"
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


def _kinds(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """Points by where their code comes from."""
    rest = list(points)
    for kind, names in (
        ("dense", ("dense",)),
        ("PowerSGD", ("powersgd",)),
        ("this project's codes", ("quantize", "ternary", "centered")),
    ):
        own = [p for p in rest if _exchange(p.method).startswith(names)]
        rest = [p for p in rest if p not in own]
        yield kind, own
    yield "the papers' codes", rest

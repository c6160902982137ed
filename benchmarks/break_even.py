"""Up to which bandwidth each preset pays: one measured model and device, a predicted step for every bandwidth.

python benchmarks/break_even.py --models resnet50 vgg16 bert_base --hosts 2 16 [--plot FOLDER] [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pytorch_lightning as pl
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.step_time import MODELS
from benchmarks.workloads import WORKLOADS, Batch, Workload
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.costs import BucketCost, measure_costs
from lightning_compress.planner.link import GivenLink, host_cost
from lightning_compress.planner.methods import Method, method_names
from lightning_compress.planner.predict import predict
from lightning_compress.planner.profile import Profile
from lightning_compress.planner.progress import progress
from lightning_compress.planner.training import WARM_UP, Ranks, group_left_as_found, measure_training

BASELINES = ("fp32", "bf16")
GAIN = 0.03
"""Share of a step that a preset must save to pay."""
RATES = tuple(10 ** (decade / 10) for decade in range(10, 56))
"""Bandwidths in Mb/s: ten per decade, 10 Mb/s to 316 Gb/s."""

Curves = Mapping[str, Sequence[float]]
"""Seconds of a step by method, for every rate."""


class Training(pl.LightningModule):
    """A workload as a LightningModule."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.net, self._workload = workload.model(), workload

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """The workload's loss."""
        return self._workload.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The workload's optimizer."""
        return self._workload.optimizer(self.parameters())


def curves(profile: Profile, costs: Mapping[str, list[BucketCost]], hosts: int, latency: float, host: float) -> Curves:
    """The predicted steps of every method at every rate."""
    links = [GivenLink(rate * 1e6 / 8, latency, hosts, host) for rate in RATES]
    return {
        name: [predict(Method.named(name), profile, cost, link).seconds for link in links]
        for name, cost in costs.items()
    }


def pays_up_to(method: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The highest rate in Mb/s at which a method saves GAIN of the baseline's step; None: at no rate."""
    pays = [rate for rate, ours, theirs in zip(RATES, method, baseline, strict=True) if ours < (1 - GAIN) * theirs]
    return max(pays, default=None)


def rows_of(model: str, hosts: int, steps: Curves) -> list[Row]:
    """One row per preset."""
    return [
        {
            "model": model,
            "hosts": hosts,
            "method": name,
            **{f"mbit_over_{base}": _rounded(pays_up_to(steps[name], steps[base])) for base in BASELINES},
        }
        for name in steps
        if name not in BASELINES
    ]


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else float(f"{rate:.3g}")


def draw(model: str, hosts: int, steps: Curves, methods: Sequence[str], path: Path) -> None:
    """Step time against bandwidth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in methods:
        axes.loglog(RATES, [1e3 * s for s in steps[name]], label=name, linestyle="--" if name in BASELINES else "-")
    axes.set(xlabel="Mb/s", ylabel="predicted step, ms", title=f"{model} on {hosts} hosts")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def tabulate(rows: Sequence[Row]) -> Table:
    """Up to which bandwidth each preset pays."""
    columns = ["model, hosts", "method", *(f"pays over {base} up to Mb/s" for base in BASELINES)]
    table = make_table("Break-even, predicted", columns, f"To pay is to save {GAIN:.0%} of a step. -: at no bandwidth.")
    for row in rows:
        rates = (row[f"mbit_over_{base}"] for base in BASELINES)
        table.add_row(f"{row['model']} {row['hosts']}", row["method"], *("-" if r is None else short(r) for r in rates))
    return table


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="break_even.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=MODELS, help="default: %(default)s")
    add("--hosts", nargs="+", type=int, default=(2, 16), help="numbers of hosts (default: 2 16)")
    add("--methods", nargs="+", choices=method_names(), default=method_names(), help="default: all")
    add("--latency", type=float, default=100.0, help="of a message, microseconds (default: %(default)s)")
    add("--steps", type=int, default=7, help="measured training steps (default: %(default)s)")
    add("--plot", type=Path, metavar="FOLDER", help="draw step time against bandwidth into FOLDER")
    add_output_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, predicts and prints.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    names = [*BASELINES, *(name for name in args.methods if name not in BASELINES)]
    rows: list[Row] = []
    host = host_cost()
    measured = {}
    work = len(args.models) * (WARM_UP + args.steps + 4 * len(names) * len(args.hosts))
    with progress(work) as advance, group_left_as_found():
        for model in args.models:
            torch.manual_seed(0)
            training = Training(WORKLOADS[model])
            batch = WORKLOADS[model].batch(torch.Generator().manual_seed(0))
            trainer = {"accelerator": "cpu"}
            profile = measure_training(training, batch, args.steps, Ranks(), {}, trainer, advance)
            measured[model] = {"compute_ms": round(1e3 * profile.at(0.5).total, 3), "buckets": len(profile.buckets)}
            for hosts in args.hosts:
                nodes = Nodes.alone(hosts)
                costs = {
                    name: measure_costs(Method.named(name), training, profile, 0, nodes, advance) for name in names
                }
                steps = curves(profile, costs, hosts, args.latency * 1e-6, host)
                rows += rows_of(model, hosts, steps)
                if args.plot:
                    draw(model, hosts, steps, names, args.plot / f"break_even_{model}_{hosts}.png")
    details = {model: {"workload": WORKLOADS[model].description, **measured[model]} for model in args.models}
    publish(args, rows, tabulate(rows), ["break_even", *argv], models=details)


if __name__ == "__main__":
    main()

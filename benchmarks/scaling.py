"""Bytes and time of the exchange alone: measured on 2, 4 and 8 emulated hosts, predicted by the planner up to 1,024.

python benchmarks/scaling.py [--models resnet50] [--rates 1gbit] [--hosts 2 4 8] [--plot FOLDER] [--json] [--save]
python benchmarks/scaling.py --predict-only    needs neither root nor Linux

To measure needs what step_time.py needs: Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a script: see step_time.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.table import Table
from torch import nn

from benchmarks import step_time
from benchmarks.methods import REFERENCE
from benchmarks.prediction_rank import PLANNED, planned
from benchmarks.report import Row, add_output_options, available_memory, make_table, publish
from benchmarks.step_time import Launch, link_ms
from benchmarks.step_time_rank import WARM_UP
from benchmarks.wire_bytes import ddp_buckets
from benchmarks.workloads import WORKLOADS
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.costs import measure_costs
from lightning_compress.planner.link import GivenLink, host_cost
from lightning_compress.planner.predict import predict
from lightning_compress.planner.profile import Bucket, Profile, StepTimes
from lightning_compress.planner.progress import progress

METHODS = (REFERENCE, "fp32", "bf16", "compressed", "compressed_onebit", "compressed_topk")
BASE_MEMORY = 2**29
"""Bytes of a host besides what grows with the model: nothing is computed, so there are no activations."""
_DDP_BUCKET_MB = 25.0
_PLACE = ("model", "rate", "method", "hosts")
Place = tuple[Any, ...]
"""What a row is about: the values of ``_PLACE``."""


def place_of(launch: Launch, samples: Sequence[Row]) -> list[Row]:
    """The samples, each with what was measured."""
    return [{"model": launch.model, "rate": launch.rate, "hosts": launch.hosts, **sample} for sample in samples]


def summarise(samples: Sequence[Row]) -> list[Row]:
    """One row per model, rate, method and number of hosts: what was measured, and what the exchange says that it has sent."""
    places: dict[Place, list[Row]] = {}
    for sample in samples:  # noop is in all launches of a place, where they do not fit into memory together
        places.setdefault(_place(sample), []).append(sample)
    return [_summary(place, found) for place, found in places.items()]


def _summary(place: Place, samples: Sequence[Row]) -> Row:
    steps, nbytes = ([value for one in samples for value in one[key]] for key in ("steps_ms", "steps_bytes"))
    return {
        **dict(zip(_PLACE, place, strict=True)),
        "median_ms": round(median(steps), 3),
        "spread_ms": round(step_time.spread(steps), 3),
        "bytes_per_rank": round(sum(nbytes) / len(nbytes)),
        "planned_bytes": samples[0]["predicted_bytes"],
        "steps_ms": steps,
    }


def _place(row: Row) -> Place:
    return tuple(row[key] for key in _PLACE)


def computing_nothing(model: nn.Module, cores: int) -> Profile:
    """The profile of a step in which all of DDP's buckets are ready at once, on ``cores`` cores."""
    parameters = dict(model.named_parameters())
    buckets = tuple(
        Bucket(names, sum(parameters[name].numel() for name in names), parameters[names[0]].dtype)
        for names in ddp_buckets(model, _DDP_BUCKET_MB)
    )
    step = StepTimes(0.0, 0.0, 0.0, (0.0,) * len(buckets))
    return Profile(buckets, (step,), torch.device("cpu"), cores)


def extrapolate(
    name: str,
    rates: Sequence[str],
    methods: Sequence[str],
    hosts: Sequence[int],
    link: Callable[[float, int], GivenLink],
    cores: int,
    advance: Callable[[str], None],
) -> list[Row]:
    """The planner's figures for every method, number of hosts and rate.

    Codes are measured on this machine, one rank's part for each number of hosts; the network is arithmetic.

    Args:
        name: Of the workload.
        rates: Bandwidths.
        methods: Exchanges of ``step_time.py``.
        hosts: Numbers of hosts.
        link: The link of a bandwidth in bytes per second among so many hosts.
        cores: Of each host.
        advance: Told of each repetition.
    """
    torch.manual_seed(0)
    model = WORKLOADS[name].model()
    profile = computing_nothing(model, cores)
    rows = []
    for method in methods:
        for count in hosts:
            costs = measure_costs(planned(method), model, profile, 0, Nodes.alone(count), advance)
            for rate in rates:
                found = predict(planned(method), profile, costs, link(1e3 / link_ms(1, rate), count))
                row = {"predicted_ms": round(1e3 * found.seconds, 3), "predicted_bytes": found.nbytes}
                rows.append({"model": name, "rate": rate, "method": method, "hosts": count, **row})
    return rows


def join(measured: Sequence[Row], predicted: Sequence[Row]) -> list[Row]:
    """One row per model, rate, method and number of hosts; what was not measured or not predicted is None in it."""
    keys = dict.fromkeys(key for row in (*measured, *predicted) for key in row)
    rows: dict[Place, Row] = {}
    for row in (*measured, *predicted):
        rows.setdefault(_place(row), dict.fromkeys(keys)).update(row)
    order = dict.fromkeys(_place(row)[:3] for row in (*measured, *predicted))
    return [rows[key] for group in order for key in sorted(rows, key=lambda key: key[3]) if key[:3] == group]


def tabulate(rows: Sequence[Row]) -> Table:
    """Measured and predicted figures side by side."""
    columns = ["model, rate", "method", "hosts", "median ms", "spread ms", "predicted ms", "link ms"]
    columns += ["MB sent", "MB planned", "MB predicted"]
    table = make_table("The exchange alone, by the number of hosts", columns, _CAPTION)
    previous = None
    for row in rows:
        group = (row["model"], row["rate"], row["method"])
        if group != previous and previous is not None:
            table.add_section()
        previous = group
        nbytes = row.get("bytes_per_rank") or row.get("predicted_bytes") or 0
        milliseconds = (row.get(key) for key in ("median_ms", "spread_ms", "predicted_ms"))
        megabytes = (row.get(key) for key in ("bytes_per_rank", "planned_bytes", "predicted_bytes"))
        table.add_row(
            f"{row['model']} {row['rate']}",
            row["method"],
            str(row["hosts"]),
            *("" if ms is None else f"{ms:.1f}" for ms in milliseconds),
            f"{link_ms(nbytes, row['rate']):.1f}",
            *("" if count is None else f"{count / 1e6:.3f}" for count in megabytes),
        )
    return table


_CAPTION = (
    "Of each rank and step. Measured: median and interquartile range of steps that compute next to nothing (noop: what is\n"
    "left without an exchange), bytes by the kernel's counters. Emulated hosts share this machine's cores: with more hosts\n"
    "than cores the measured time is that of the processors, not of the network. Predicted: by the planner, for hosts\n"
    "that have their cores to themselves, on a network that gives each of them its bandwidth whatever the others do; empty\n"
    "where it has no model of a method."
)


def draw(rows: Sequence[Row], model: str, rate: str, path: Path) -> None:
    """Bytes and time against the number of hosts: lines are predicted, marks measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    here = [row for row in rows if (row["model"], row["rate"]) == (model, rate) and row["method"] != REFERENCE]
    for number, method in enumerate(dict.fromkeys(row["method"] for row in here)):
        for axes, line, marks, unit in (
            (left, "predicted_bytes", "bytes_per_rank", 1e-6),
            (right, "predicted_ms", "median_ms", 1),
        ):
            for key, style in ((line, "-"), (marks, "o")):
                points = [(row["hosts"], row[key] * unit) for row in here if row["method"] == method and row.get(key)]
                label = method if style == "-" else None
                axes.loglog(*zip(*points, strict=True), style, color=f"C{number}", label=label) if points else None
    left.set(xlabel="hosts", ylabel="MB that each rank sends", title=f"{model}, {rate}")
    right.set(xlabel="hosts", ylabel="ms of the exchange alone", title="lines predicted, marks measured")
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(prog="scaling.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--hosts", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="emulated hosts (default: 2 4 8)")
    add("--up-to", type=int, default=1024, metavar="N", help="hosts to predict for: 2, 4, 8 ... (default: %(default)s)")
    add("--latency", type=float, default=100.0, help="of a message, microseconds, predicted (default: %(default)s)")
    add("--predict-only", action="store_true", help="measure codes, but no exchange: needs neither root nor Linux")
    add("--plot", type=Path, metavar="FOLDER", help="draw bytes and time against the number of hosts into FOLDER")
    step_time.add_launch_options(parser, ["resnet50"], ["1gbit"], METHODS)
    add_output_options(parser)
    args = parser.parse_args(argv)
    step_time.check_launch_options(parser, args)
    if problem := _problem(args):
        parser.error(problem)
    args.hosts = sorted(set(args.hosts))
    args.broadcast_buffers = False
    return args


def _problem(args: argparse.Namespace) -> str | None:
    if min(*args.hosts, args.up_to) < 2:
        return f"--hosts and --up-to must be 2 or more, got {min(*args.hosts, args.up_to)}"
    if args.latency < 0:
        return f"--latency must be 0 or more, got {args.latency}"
    if args.predict_only and "none" in args.rates:
        return "--rates none: a prediction needs a bandwidth, such as 1gbit"
    return None


def plan_launches(args: argparse.Namespace) -> list[Launch]:
    """What is to be started, so that it fits into memory.

    Raises:
        SystemExit: It does not.
    """
    memory = round(0.9 * available_memory())
    try:
        return [
            Launch(model, rate, group, hosts)
            for model in args.models
            for rate in args.rates
            for hosts in args.hosts
            for group in step_time.share_out(args.methods, model, hosts, memory, BASE_MEMORY)
        ]
    except MemoryError as error:
        raise SystemExit(f"scaling.py: {error}") from None


def predictions(args: argparse.Namespace) -> list[Row]:
    """The planner's rows for all that ``args`` name and the planner knows."""
    hosts = [2**power for power in range(1, args.up_to.bit_length())]
    rates = [rate for rate in args.rates if rate != "none"]
    methods = [method for method in args.methods if method in PLANNED]
    cost, cores = host_cost(), args.cores or len(step_time.usable_cores())

    def link(bandwidth: float, count: int) -> GivenLink:
        return GivenLink(bandwidth, args.latency * 1e-6, count, cost)

    rows: list[Row] = []
    with progress(len(args.models) * len(methods) * len(hosts) * 4) as advance:
        for model in args.models:
            rows += extrapolate(model, rates, methods, hosts, link, cores, advance)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, predicts and prints.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Raises:
        SystemExit: A wrong argument, a machine that cannot emulate hosts, or a host that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    measured: list[Row] = []
    if not args.predict_only:
        step_time.require_hosts()
        measured = summarise(step_time.collect("scaling", args, plan_launches(args), place_of))
    rows = join(measured, predictions(args))
    if args.plot:
        for model in args.models:
            for rate in args.rates:
                draw(rows, model, rate, args.plot / f"scaling_{model}_{rate}.png")
    details: Mapping[str, str] = {model: WORKLOADS[model].description for model in args.models}
    paper = {"latency_us": args.latency, "cores_of_host": args.cores}
    publish(args, rows, tabulate(rows), ["scaling", *argv], models=details, warm_up_steps=WARM_UP, predicted=paper)


if __name__ == "__main__":
    step_time.ended_by_sigterm()
    main()

"""Step time and bytes per step of real networks on emulated hosts, under every gradient exchange.

python benchmarks/step_time.py --models resnet50 --rates 1gbit --methods noop fp32 bf16 compressed [--json] [--save]

Needs Linux, root and iproute2 (see benchmarks/hosts.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from benchmarks.methods import METHODS, REFERENCE, corrects_momentum, make_exchange, memory_factor, ring_nbytes
from benchmarks.report import (
    ROOT,
    Row,
    add_output_options,
    available_memory,
    make_table,
    publish,
    short,
    usable_cores,
)
from benchmarks.step_time_rank import WARM_UP
from benchmarks.workloads import WORKLOADS, gradient_nbytes
from lightning_compress.planner.progress import progress

HOSTS = ROOT / "benchmarks" / "hosts.sh"
MODELS = ("resnet50", "vgg16", "bert_base")
RATES = ("100mbit", "1gbit")
TIMED_OUT = 124
"""Exit status of hosts.sh when the time is up."""
BASE_MEMORY = 2 * 2**30
"""Bytes of a host besides what grows with the model: interpreter, libraries, activations."""
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""For glibc, under every method: freed tensors stay in the process. Else every step asks the system for gigabytes of fresh
pages, which on a virtual machine that gives free pages back to its host makes steps longer, at random."""


@dataclass(frozen=True)
class Launch:
    """One group of processes: the methods that take turns in it."""

    model: str
    rate: str
    methods: tuple[str, ...]
    hosts: int = 2

    def training_steps(self, steps: int) -> int:
        """Training steps that it takes."""
        return len(self.methods) * (WARM_UP + steps)


def share_out(
    methods: Sequence[str], model: str, hosts: int, memory: int, base: int = BASE_MEMORY
) -> list[tuple[str, ...]]:
    """Groups the methods so that each fits into ``memory`` and uses one optimizer; the no-op hook, if asked for, is in all.

    Args:
        methods: In the order of the table.
        model: The workload.
        hosts: Number of hosts.
        memory: Bytes for all hosts together; 0: unknown, everything goes into one group.
        base: Bytes of a host besides what grows with the model.

    Raises:
        MemoryError: Not even one method fits.
    """
    nbytes = gradient_nbytes(WORKLOADS[model])
    fixed = base + (2 + WORKLOADS[model].optimizer_states) * nbytes  # weights, gradients and optimizer

    def need(group: Sequence[str]) -> float:
        return hosts * (fixed + nbytes * sum(map(memory_factor, group)))

    shared = [method for method in methods if method == REFERENCE]
    groups = [shared]
    for method in methods:
        if method == REFERENCE:
            continue
        alone = [*shared, method]
        if memory and need(alone) > memory:
            gib = f"{need(alone) / 2**30:.1f} GiB of memory, {memory / 2**30:.1f} GiB may be used"
            raise MemoryError(f"{model} with {' and '.join(alone)} on {hosts} hosts needs about {gib}")
        if corrects_momentum(method):  # another optimizer: not in one process with the others
            groups.insert(0, alone)
        elif not memory or need([*groups[-1], method]) <= memory:
            groups[-1] = [*groups[-1], method]
        else:
            groups.append(alone)
    groups = [group for group in groups if group != shared] or [shared]
    return [tuple(group) for group in groups]


def run(
    launch: Launch, args: argparse.Namespace, advance: Callable[[str], None], program: str = "benchmarks.step_time_rank"
) -> list[Row]:
    """Starts the hosts of one launch and returns what ``program`` found (see ``step_time_rank.gather``).

    Raises:
        RuntimeError: A host failed; what it wrote has been shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.json"
        hosts = [str(HOSTS), "-n", str(launch.hosts), "-r", launch.rate, "-t", str(args.limit), "--"]
        rank = [sys.executable, "-m", program, "--model", launch.model, "--steps", str(args.steps)]
        rank += ["--cores", str(args.cores), "--output", str(output), "--methods", *launch.methods]
        rank += ["--broadcast-buffers"] * args.broadcast_buffers
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        threads = {"OMP_NUM_THREADS": str(max(1, args.cores))}
        environment = {**os.environ, **KEEP_MEMORY, "PYTHONPATH": path, **threads}
        process = subprocess.Popen([*hosts, *rank], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() in launch.methods:
                    advance(f"{launch.model} {launch.rate} {line.strip()}")
            code = process.wait()
        finally:
            process.terminate()  # does nothing to one that has ended; otherwise hosts.sh takes everything down
            process.wait()
        if code:
            what = f"{launch.model} at {launch.rate} on {launch.hosts} hosts with {', '.join(launch.methods)}"
            took_too_long = f"not finished after --limit {args.limit} s"
            raise RuntimeError(f"{what}: {took_too_long if code == TIMED_OUT else f'status {code}, see above'}")
        rows: list[Row] = json.loads(output.read_text())
        return rows


def summarise(model: str, rate: str, args: argparse.Namespace, samples: Sequence[Row]) -> list[Row]:
    """One row per method from the samples of all launches of (model, rate)."""
    methods = dict.fromkeys(sample["method"] for sample in samples)
    return [_summary(model, rate, args, [s for s in samples if s["method"] == method]) for method in methods]


def _summary(model: str, rate: str, args: argparse.Namespace, samples: Sequence[Row]) -> Row:
    steps = [ms for sample in samples for ms in sample["steps_ms"]]
    nbytes = [count for sample in samples for count in sample["steps_bytes"]]
    return {
        "model": model,
        "rate": rate,
        "hosts": args.hosts,
        "method": samples[0]["method"],
        "median_ms": round(median(steps), 3),
        "spread_ms": round(spread(steps), 3),
        "bytes_per_step": round(sum(nbytes) / len(nbytes)),
        "predicted_bytes": samples[0]["predicted_bytes"],
        "dense_bytes": ring_nbytes(samples[0]["gradient_bytes"], args.hosts),
        "broadcast_buffers": args.broadcast_buffers,
        "steps_ms": steps,
    }


def spread(values: Sequence[float]) -> float:
    """The interquartile range: half of all steps lie within it."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third - first


def link_ms(nbytes: float, rate: str) -> float:
    """Milliseconds that ``nbytes`` take on a link: the floor of any exchange that sends them."""
    if rate == "none":
        return 0.0
    bits_per_ms = int(rate[:-4]) * {"mbit": 1e3, "gbit": 1e6}[rate[-4:]]
    return nbytes * 8 / bits_per_ms


def tabulate(rows: Sequence[Row]) -> Table:
    """All rows; ratios are those of the medians."""
    medians = {(row["model"], row["rate"], row["method"]): row["median_ms"] for row in rows}
    baselines = [name for name in (REFERENCE, "fp32", "bf16") if any(row["method"] == name for row in rows)]
    columns = ["model, rate", "method", "median ms", "spread ms", *(f"/ {name}" for name in baselines)]
    columns += ["link ms", "MB sent", "MB predicted", "dense / sent"]
    table = make_table(f"Training steps on {rows[0]['hosts']} emulated hosts, random data", columns, _CAPTION)
    previous = None
    for row in rows:
        place = (row["model"], row["rate"])
        if place != previous and previous is not None:
            table.add_section()
        ratios = (medians.get((*place, name)) for name in baselines)
        table.add_row(
            " ".join(place) if place != previous else "",
            row["method"],
            f"{row['median_ms']:.1f}",
            f"{row['spread_ms']:.1f}",
            *(f"{row['median_ms'] / ratio:.2f}" if ratio else "" for ratio in ratios),
            f"{link_ms(row['bytes_per_step'], row['rate']):.1f}",
            f"{row['bytes_per_step'] / 1e6:.3f}",
            "" if row["predicted_bytes"] is None else f"{row['predicted_bytes'] / 1e6:.3f}",
            short(row["dense_bytes"] / row["bytes_per_step"]) if row["predicted_bytes"] != 0 else "",
        )
        previous = place
    return table


_CAPTION = (
    "Median and interquartile range over the steps, each as slow as its slowest host. Bytes per host and step\n"
    "by the kernel's counters; link ms: their time at the link's rate."
)


def parse(argv: Sequence[str], methods: Sequence[str] = METHODS) -> argparse.Namespace:
    """Reads and checks the command line; ``methods`` are compared where it names none."""
    parser = argparse.ArgumentParser(prog="step_time.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hosts", type=int, default=2, help="emulated hosts (default: %(default)s)")
    parser.add_argument(
        "--broadcast-buffers", action="store_true", help="let DDP broadcast batch norm's statistics in every step"
    )
    add_launch_options(parser, MODELS, RATES, available(methods))
    add_output_options(parser)
    args = parser.parse_args(argv)
    check_launch_options(parser, args)
    if args.hosts < 2:
        parser.error(f"--hosts must be 2 or more, got {args.hosts}")
    return args


def add_launch_options(
    parser: argparse.ArgumentParser, models: Sequence[str], rates: Sequence[str], methods: Sequence[str]
) -> None:
    """Adds what every benchmark on emulated hosts can be asked for, with these defaults."""
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=WORKLOADS,
        default=models,
        help=f"default: {' '.join(models)}; tiny tries the harness out",
    )
    add("--rates", nargs="+", default=rates, metavar="RATE", help=f"Nmbit, Ngbit or none (default: {' '.join(rates)})")
    add("--methods", nargs="+", choices=METHODS, default=methods, help=f"default: {' '.join(methods)}")
    add("--steps", type=int, default=5, help="measured steps of each method (default: %(default)s)")
    add("--cores", type=int, default=1, help="cores of each host, 0: all of the machine's (default: %(default)s)")
    add("--limit", type=int, default=7200, help="seconds after which a launch is ended (default: %(default)s)")


def check_launch_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Takes out what was named twice, and ends the program where a value makes no sense."""
    args.models, args.rates, args.methods = (list(dict.fromkeys(x)) for x in (args.models, args.rates, args.methods))
    if problem := _problem(args):
        parser.error(problem)


def _problem(args: argparse.Namespace) -> str | None:
    for rate in args.rates:
        if not re.fullmatch(r"[1-9]\d*[mg]bit|none", rate):
            return f"--rates: a rate is Nmbit, Ngbit (whole numbers) or none, not {rate!r}"
    for option, least in (("steps", 1), ("cores", 0), ("limit", 1)):
        if getattr(args, option) < least:
            return f"--{option} must be {least} or more, got {getattr(args, option)}"
    for method in args.methods:
        if reason := refusal(method):
            return f"--methods {method}: {reason}"
    return None


def refusal(method: str) -> str | None:
    """Why this version cannot make ``method``, or None."""
    try:
        if method.startswith("compressed"):
            make_exchange(method)
    except ValueError as error:
        return str(error)
    return None


def available(methods: Sequence[str]) -> list[str]:
    """Those that this version can make."""
    return [method for method in methods if refusal(method) is None]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Raises:
        SystemExit: A wrong argument, a machine that cannot emulate hosts, or a host that failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    require_hosts()
    launches = plan_launches(args)
    say_if_crowded(launches, args.cores)
    rows, failures = _measure(launches, args)
    if rows:
        details = {model: WORKLOADS[model].description for model in args.models}
        publish(args, rows, tabulate(rows), ["step_time", *argv], models=details, warm_up_steps=WARM_UP)
    if failures:
        raise SystemExit("\n".join(["step_time.py: not measured:", *failures]))


def compare(
    script: str,
    args: argparse.Namespace,
    argv: Sequence[str],
    launches: Sequence[Launch],
    summarise: Callable[[Launch, Sequence[Row]], list[Row]],
    tabulate: Callable[[Sequence[Row]], Table],
) -> None:
    """The frame of the other benchmarks on emulated hosts: runs ``SCRIPT_rank.py`` for every launch, and prints.

    Args:
        script: Name of the benchmark.
        args: Its command line, read by ``parse``.
        argv: The same as it was typed.
        launches: What is to be started.
        summarise: Makes the rows of a launch.
        tabulate: Makes the table of all rows.

    Raises:
        SystemExit: A machine that cannot emulate hosts, or a host that failed.
    """
    require_hosts()
    rows = collect(script, args, launches, summarise)
    details = {model: WORKLOADS[model].description for model in args.models}
    publish(args, rows, tabulate(rows), [script, *argv], models=details, warm_up_steps=WARM_UP)


def collect(
    script: str,
    args: argparse.Namespace,
    launches: Sequence[Launch],
    summarise: Callable[[Launch, Sequence[Row]], list[Row]],
) -> list[Row]:
    """Runs ``SCRIPT_rank.py`` for every launch and returns all rows; see ``compare``."""
    say_if_crowded(launches, args.cores)
    rows: list[Row] = []
    with progress(sum(launch.training_steps(args.steps) for launch in launches)) as advance:
        for launch in launches:
            try:
                rows += summarise(launch, run(launch, args, advance, f"benchmarks.{script}_rank"))
            except RuntimeError as error:
                raise SystemExit(f"{script}.py: {error}") from None
    return rows


def ended_by_sigterm() -> None:
    """By default SIGTERM would end this process without its ``finally``, and the hosts would go on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def require_hosts() -> None:
    """Ends the program on a machine that cannot emulate hosts."""
    if (code := subprocess.run([str(HOSTS), "--check"], check=False).returncode) != 0:
        raise SystemExit(code)  # the message is out


def plan_launches(args: argparse.Namespace) -> list[Launch]:
    """What is to be started, so that it fits into memory."""
    memory = round(0.9 * available_memory())
    try:
        return [
            Launch(model, rate, group, args.hosts)
            for model in args.models
            for rate in args.rates
            for group in share_out(args.methods, model, args.hosts, memory)
        ]
    except MemoryError as error:
        raise SystemExit(f"step_time.py: {error}") from None


def _measure(launches: Sequence[Launch], args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The rows of what could be measured, and what went wrong with the rest: a failure does not cost an hour's work."""
    samples: dict[tuple[str, str], list[Row]] = {}
    failures = []
    with progress(sum(launch.training_steps(args.steps) for launch in launches)) as advance:
        for launch in launches:
            try:
                samples.setdefault((launch.model, launch.rate), []).extend(run(launch, args, advance))
            except RuntimeError as error:
                failures.append(str(error))
    return [row for place, found in samples.items() for row in summarise(*place, args, found)], failures


def say_if_crowded(launches: Sequence[Launch], cores_of_host: int) -> None:
    """Hosts that share a core are slower than real ones; the figures must not be read as if they were not."""
    cores, hosts = len(usable_cores()), max(launch.hosts for launch in launches)
    if hosts * cores_of_host > cores:
        message = f"note: {hosts} hosts of {cores_of_host} core(s) share {cores} cores; real hosts would not"
        Console(stderr=True, soft_wrap=True).print(message)


if __name__ == "__main__":
    ended_by_sigterm()
    main()

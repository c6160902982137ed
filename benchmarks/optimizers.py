"""Time of an optimizer step on a model's parameters, against torch.optim.AdamW (foreach and fused).

python benchmarks/optimizers.py [--model bert_base] [--optimizers lans ...] [--repeat N] [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn

from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.workloads import WORKLOADS
from lightning_compress.optim import LANS, CompressedAdam
from lightning_compress.planner.progress import progress

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BASELINE = "adamw_foreach"
OPTIMIZERS: dict[str, Make] = {
    BASELINE: lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "lans": LANS,
    "lans_unnormalized": lambda parameters: LANS(parameters, normalize_grad=False),
    "compressed_adam": CompressedAdam,
    "compressed_adam_adamw": lambda parameters: CompressedAdam(parameters, update="adam"),
}
WARM_UP = 2
"""Steps before measuring: they allocate the state and touch its pages."""


def measure(name: str, parameters: list[nn.Parameter], repeat: int) -> dict[str, list[float]]:
    """Milliseconds of every step of an optimizer and of the baseline, in turns: a drift of the machine hits both.

    Args:
        name: From ``OPTIMIZERS``.
        parameters: With gradients.
        repeat: Measured steps.
    """
    optimizers = {which: OPTIMIZERS[which](parameters) for which in (BASELINE, name)}
    times: dict[str, list[float]] = {which: [] for which in optimizers}
    for _ in range(WARM_UP + repeat):
        for which, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[which].append((time.perf_counter() - start) * 1e3)
    return {which: of_one[WARM_UP:] for which, of_one in times.items()}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="optimizers.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", choices=WORKLOADS, default="bert_base", help="default: %(default)s")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=7, help="measured steps (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    for option in ("threads", "repeat"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} must be 1 or more, got {getattr(args, option)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; ``argv`` None takes the process's own command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", "CompressedAdam runs dense")
    parameters = list(WORKLOADS[args.model].model().parameters())
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
    results: dict[str, dict[str, list[float]]] = {}
    others = [name for name in args.optimizers if name != BASELINE]
    with progress(len(others)) as advance:
        for name in others:
            results[name] = measure(name, parameters, args.repeat)
            advance(name)
    numel = sum(p.numel() for p in parameters)
    title = f"{args.model}: {numel:,} parameters in {len(parameters)} tensors, {args.threads} thread"
    columns = ["optimizer", "", "least ms", f"{BASELINE} ms", "ratio", "median ratio"]
    table = make_table(title, columns, "Ratio of the least times; the two take turns, step by step.")
    for name, times in results.items():
        mine, base = times[name], times[BASELINE]
        cells = (min(mine), min(base), min(mine) / min(base), median(mine) / median(base))
        table.add_row(name, "step", *map(short, cells))
    raw = [{"optimizer": name, "ms": times[name], "baseline_ms": times[BASELINE]} for name, times in results.items()]
    rows = [row(args, name, numel, times) for name, times in results.items()]
    publish(args, rows, table, ["optimizers", *argv], repetitions=raw)


def row(args: argparse.Namespace, name: str, numel: int, times: dict[str, list[float]]) -> Row:
    """One line of the result."""
    return {
        "model": args.model,
        "optimizer": name,
        "numel": numel,
        "device": "cpu",
        "threads": args.threads,
        "ms": round(min(times[name]), 3),
        "baseline_ms": round(min(times[BASELINE]), 3),
        "ratio": round(min(times[name]) / min(times[BASELINE]), 3),
    }


if __name__ == "__main__":
    main()

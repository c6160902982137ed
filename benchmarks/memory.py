"""Peak memory that an exchange takes beside model, gradients and optimizer, against the formula of docs/benchmarks.md.

python benchmarks/memory.py [--models resnet50 ...] [--methods compressed ...] [--hosts 2] [--loss-scaler] [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import SETTINGS, make_exchange
from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.wire_bytes import STEP, ddp_buckets
from benchmarks.workloads import WORKLOADS
from lightning_compress.exchange.codec import compile_kernels
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import GatherAll, Steps, TwoWay
from lightning_compress.kernels import table as col
from lightning_compress.kernels.table import PRESENT
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.planner.costs import answer
from lightning_compress.planner.progress import progress

_LINE = 8 * col.COLUMNS
"""Bytes of a block's line in a table."""
_PIECE = 2**21
"""Bytes of the means that an owner has decoded and not yet encoded."""
_COPIES = 3
"""Of the largest tensor, that momentum correction makes while it advances a velocity."""
PARTS = ("residuals", "velocities", "payloads", "tables", "passing")
"""What the formula adds up."""


def measured(
    model: nn.Module, settings: ExchangeSettings, world_size: int, bucket_mb: float = 25.0, loss_scaler: bool = False
) -> int:
    """Peak bytes of one rank's exchange when all buckets are under way at once, as on a slow link.

    Arrays are counted where they are allocated, numpy's by ``tracemalloc`` and torch's by its profiler; the two peaks are
    added. The gradients themselves are not counted, nor what the collectives take inside gloo.
    """
    buckets = ddp_buckets(model, bucket_mb)
    parameters = dict(model.named_parameters())
    buffers = [torch.cat([torch.randn(parameters[name].numel()) for name in names]) for names in buckets]
    compile_kernels([settings.compressor, settings.dense_compressor], [torch.float32])  # loading them is no part of it
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.no_grad():
        nodes = Nodes.alone(world_size)
        exchange = RankExchange(settings, model, 0, nodes, ExchangeStats(), loss_scaler, steps_per_epoch=1)
        running: list[Steps] = []
        for names, buffer in zip(buckets, buffers, strict=True):
            status = torch.full((len(names),), PRESENT, dtype=torch.uint8)
            running.append(exchange.steps(buffer, names, status, STEP, 1.0))
        while collectives := [c for c in [next(steps, None) for steps in running] if c is not None]:
            for collective in collectives:
                answer(collective, 0, world_size)
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return numpy_peak + _torch_peak(profiler)


def _torch_peak(profiler: profile) -> int:
    """The most that was allocated at once, from the profiler's list of allocations."""
    live = most = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def formula(
    model: nn.Module, settings: ExchangeSettings, world_size: int, bucket_mb: float = 25.0, loss_scaler: bool = False
) -> dict[str, int]:
    """The documented parts, in bytes, for a model of float32 parameters."""
    exchange = RankExchange(settings, model, 0, Nodes.alone(world_size), ExchangeStats(), steps_per_epoch=1)
    settings, sizes = exchange.settings, exchange.plan.worker_sizes()
    if settings.topology is None:
        return dict.fromkeys(PARTS, 0)
    elements, copies, corrected = sum(sizes.values()), 1 + loss_scaler, isinstance(settings.memory, MomentumCorrection)
    two_way = settings.topology is TwoWay
    owners = elements / world_size if two_way and not settings.compressor.unbiased else 0
    payload, blocks, largest = _payload_and_blocks(exchange, ddp_buckets(model, bucket_mb))
    times = 3 + 1 / world_size if two_way else 1 + world_size if settings.topology is GatherAll else 1
    tables = 3 + 1 / world_size if two_way else 2
    return {
        "residuals": round(4 * copies * ((elements if settings.memory else 0) + owners)),
        "velocities": 4 * copies * sum(exchange.plan.velocity_sizes().values()) * corrected,
        "payloads": round(times * payload),
        "tables": round((_LINE * tables + 16) * blocks),
        "passing": 4 * (largest + _COPIES * max(sizes.values())) * corrected + _PIECE * two_way,
    }


def _payload_and_blocks(exchange: RankExchange, buckets: Iterable[tuple[str, ...]]) -> tuple[int, int, int]:
    """Bytes of one rank's payload, number of blocks, and elements of the largest bucket."""
    nowhere = dict.fromkeys(exchange.parameters, 0)
    payload = blocks = largest = 0
    for names in buckets:
        plan = exchange.plan.bucket(names, nowhere, nowhere)
        payload += sum(plan.section_nbytes)
        blocks += sum(len(part.table) for part in plan.parts)
        largest = max(largest, sum(span.numel for span in plan.spans))
    return payload, blocks, largest


def row(name: str, model: nn.Module, method: str, args: argparse.Namespace) -> Row:
    """One line of the result."""
    settings = make_exchange(method).settings
    parts = formula(model, settings, args.hosts, args.bucket_mb, args.loss_scaler)
    found, expected = measured(model, settings, args.hosts, args.bucket_mb, args.loss_scaler), sum(parts.values())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return {
        "model": name,
        "method": method,
        "hosts": args.hosts,
        "loss_scaler": args.loss_scaler,
        "gradient_bytes": gradients,
        "measured_bytes": found,
        "formula_bytes": expected,
        "formula_to_measured": round(expected / found, 3),
        **{f"{part}_bytes": nbytes for part, nbytes in parts.items()},
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="memory.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    models = [name for name in WORKLOADS if name != "tiny"]
    add("--models", nargs="+", choices=WORKLOADS, default=models, help="default: %(default)s")
    add("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    add("--hosts", type=int, default=2, help="ranks that exchange (default: %(default)s)")
    add("--loss-scaler", action="store_true", help="as under a loss scaler, where memories exist twice")
    add("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.hosts < 2:
        parser.error(f"--hosts must be 2 or more, got {args.hosts}")
    if args.bucket_mb <= 0:
        parser.error(f"--bucket-mb must be positive, got {args.bucket_mb}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; ``argv`` None takes the process's own command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    rows: list[Row] = []
    with progress(len(args.models) * len(args.methods)) as advance:
        for name in args.models:
            model = WORKLOADS[name].model()
            for method in args.methods:
                rows.append(row(name, model, method, args))
                advance(f"{name}, {method}")
    columns = ["model", "method", "measured", "/ gradients", "formula", "/ measured", *PARTS]
    caption = "Peak of one rank with all buckets under way at once. Gradients, and what gloo takes, are not counted."
    table = make_table(f"MB that the exchange takes on {args.hosts} ranks", columns, caption)
    for r in rows:
        found, parts = r["measured_bytes"], (r[f"{part}_bytes"] / 1e6 for part in PARTS)
        numbers = (found / 1e6, found / r["gradient_bytes"], r["formula_bytes"] / 1e6, r["formula_to_measured"], *parts)
        table.add_row(r["model"], r["method"], *map(short, numbers))
    publish(args, rows, table, ["memory", *argv])


if __name__ == "__main__":
    main()

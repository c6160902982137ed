"""Bytes that a rank puts on the wire in one step, everything counted: from the exchange's own plans, without any network.

python benchmarks/wire_bytes.py [--models resnet50 ...] [--methods compressed_dgc ...] [--hosts 2 8] [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.methods import SETTINGS, make_exchange, ring_nbytes
from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.workloads import WORKLOADS
from lightning_compress.exchange.collectives import AllReduce
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.kernels.table import ABSENT, PARAMETER
from lightning_compress.planner.progress import progress

METHODS = tuple(SETTINGS)
STEP = 10**9
"""A step after every warm-up: the bytes of the long run."""
_MB = 1 << 20


@dataclass
class Wire:
    """Bytes of one step.

    Attributes:
        sent: What a rank puts on the wire, the mean over the ranks.
        exchange: How payloads travel.
        coded: Codes of the large tensors in one rank's payload.
        small: Codes of the small ones.
        headers: What says which parameters take part.
    """

    sent: int
    exchange: str
    coded: int
    small: int
    headers: int


def count(model: nn.Module, settings: ExchangeSettings, world_size: int, bucket_mb: float = 25.0) -> Wire:
    """Counts a step of ``model`` on ``world_size`` ranks in buckets as DDP makes them.

    Each rank's own exchange is asked, one after the other, for the collectives it issues. No parameter takes part, so
    nothing is computed; sizes do not depend on values.
    """
    buckets = ddp_buckets(model, bucket_mb)
    stats = [ExchangeStats() for _ in range(world_size)]
    for rank in range(world_size):
        exchange = RankExchange(settings, model, rank, world_size, stats[rank], steps_per_epoch=1)
        for names in buckets:
            _issue(exchange, names, stats[rank])
    sent = round(sum(each.as_dict()["bytes_sent"] for each in stats) / world_size)
    topology = exchange.settings.topology
    return Wire(sent, topology.name if topology else "all_reduce", *_payload(exchange, buckets))


def ddp_buckets(model: nn.Module, bucket_mb: float) -> list[tuple[str, ...]]:
    """Names of every bucket's parameters: the first of 1 MiB, the others of ``bucket_mb``, last layers first."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    limits = [_MB, int(bucket_mb * _MB)]
    assigned, _ = dist._compute_bucket_assignment_by_size([p for _, p in named], limits)
    return [tuple(named[index][0] for index in bucket) for bucket in assigned]


def _issue(exchange: RankExchange, names: tuple[str, ...], stats: ExchangeStats) -> None:
    parameters = [exchange.parameters[name] for name in names]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    status = torch.full((len(names),), ABSENT, dtype=torch.uint8)
    for collective in exchange.steps(buffer, names, status, STEP, 1.0):
        stats.count_wire(collective, exchange.rank, exchange.world_size)
        if not isinstance(collective, AllReduce):
            collective.receive.zero_()  # as if everybody had sent "absent"


def _payload(exchange: RankExchange, buckets: Iterable[tuple[str, ...]]) -> tuple[int, int, int]:
    """Bytes of coded blocks, of small tensors and of headers in one rank's payload."""
    nowhere = dict.fromkeys(exchange.parameters, 0)
    coded = small = headers = 0
    for names in buckets:
        plan = exchange.plan.bucket(names, nowhere, nowhere)
        for part in plan.parts:
            nbytes = int(part.code_nbytes().sum())
            if plan.spans[int(part.table[0, PARAMETER])].dense:
                small += nbytes
            else:
                coded += nbytes
        headers += plan.header_nbytes * plan.owners
    return coded, small, headers


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="wire_bytes.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    models = [name for name in WORKLOADS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=models, help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=[2, 8], metavar="N", help="numbers of ranks (default: 2 8)"
    )
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if min(args.hosts) < 2:
        parser.error(f"--hosts must be 2 or more, got {min(args.hosts)}")
    if args.bucket_mb <= 0:
        parser.error(f"--bucket-mb must be positive, got {args.bucket_mb}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Counts and prints; ``argv`` None takes the process's own command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    rows: list[Row] = []
    with progress(len(args.models) * len(args.methods) * len(args.hosts)) as advance:
        for name in args.models:
            model = WORKLOADS[name].model()
            for method in args.methods:
                for world_size in args.hosts:
                    rows.append(row(name, model, method, world_size, args.bucket_mb))
                    advance(f"{name}, {method}, {world_size} ranks")
    columns = ["model", "method", "ranks", "exchange", "bytes per step", "times less", "than fp16", "small tensors"]
    caption = "Of one rank. Times less than a ring all-reduce of fp32, and of fp16. Small tensors: their share of the payload."
    table = make_table("Bytes on the wire, everything counted", columns, caption)
    for r in rows:
        cells = (
            r["method"],
            str(r["ranks"]),
            r["exchange"],
            f"{r['bytes_per_step']:,}",
            short(r["ratio"]),
            short(r["ratio_to_fp16"]),
        )
        table.add_row(r["model"], *cells, f"{100 * r['small_bytes'] / r['payload_bytes']:.0f} %")
    publish(args, rows, table, ["wire_bytes", *argv])


def row(name: str, model: nn.Module, method: str, world_size: int, bucket_mb: float) -> Row:
    """One line of the result."""
    wire = count(model, make_exchange(method).settings, world_size, bucket_mb)
    dense = ring_nbytes(sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad), world_size)
    return {
        "model": name,
        "method": method,
        "ranks": world_size,
        "exchange": wire.exchange,
        "bytes_per_step": wire.sent,
        "dense_bytes": dense,
        "ratio": round(dense / wire.sent, 2),
        "ratio_to_fp16": round(dense / 2 / wire.sent, 2),
        "payload_bytes": wire.coded + wire.small + wire.headers,
        "coded_bytes": wire.coded,
        "small_bytes": wire.small,
        "header_bytes": wire.headers,
    }


if __name__ == "__main__":
    main()

"""Bytes that a rank puts on the wire in one step, everything counted: from the exchange's own plans, without any network.

python benchmarks/wire_bytes.py [--models resnet50 ...] [--methods compressed_dgc ...] [--hosts 2 8] [--ranks-per-host 8]
    [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch.distributed as dist
from torch import nn

from benchmarks.methods import SETTINGS, corrects_momentum, make_exchange, ring_nbytes
from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.workloads import WORKLOADS
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.kernels.table import PARAMETER
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
        between: The part of it that leaves the host.
        exchange: How payloads travel.
        coded: Codes of the large tensors in one rank's payload.
        small: Codes of the small ones.
        headers: What says which parameters take part.
    """

    sent: int
    between: int
    exchange: str
    coded: int
    small: int
    headers: int


def count(
    model: nn.Module, settings: ExchangeSettings, world_size: int, bucket_mb: float = 25.0, ranks_per_host: int = 1
) -> Wire:
    """Counts a step of ``model`` on ``world_size`` ranks in buckets as DDP makes them.

    Each rank's own exchange is asked, one after the other, for the collectives it plans: sizes do not depend on values.
    """
    buckets = ddp_buckets(model, bucket_mb)
    nodes = Nodes.of([rank // ranks_per_host for rank in range(world_size)])
    stats = [ExchangeStats() for _ in range(world_size)]
    for rank in range(world_size):
        exchange = RankExchange(settings, model, rank, nodes, stats[rank], steps_per_epoch=1)
        for names in buckets:
            for collective in exchange.planned(names, STEP):
                stats[rank].count_wire(collective, *nodes.position(collective.level, rank))
    sent, between = (
        round(sum(each.as_dict()[key] for each in stats) / world_size) for key in ("bytes_sent", "bytes_between_nodes")
    )
    topology = exchange.settings.topology
    name = topology.name if topology else "all_reduce"
    if exchange.settings.hierarchical:
        name = f"hierarchical_{name}"
    return Wire(sent, between, name, *_payload(exchange, buckets))


def ddp_buckets(model: nn.Module, bucket_mb: float) -> list[tuple[str, ...]]:
    """Names of every bucket's parameters: the first of 1 MiB, the others of ``bucket_mb``, last layers first."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    limits = [_MB, int(bucket_mb * _MB)]
    assigned, _ = dist._compute_bucket_assignment_by_size([p for _, p in named], limits)
    return [tuple(named[index][0] for index in bucket) for bucket in assigned]


def _payload(exchange: RankExchange, buckets: Iterable[tuple[str, ...]]) -> tuple[int, int, int]:
    """Bytes of coded blocks, of small tensors and of headers in one rank's payload."""
    nowhere = dict.fromkeys(exchange.parameters, 0)
    coded = small = headers = 0
    for names in buckets:
        plan = exchange.plan.bucket(names, nowhere, nowhere)
        for part in (part for part in plan.parts if len(part.table)):
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
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all that can")
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=[2, 8], metavar="N", help="numbers of hosts (default: 2 8)"
    )
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="K", help="more than 1: the hierarchical exchange (default: 1)"
    )
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if min(args.hosts) < 2:
        parser.error(f"--hosts must be 2 or more, got {min(args.hosts)}")
    if args.ranks_per_host < 1:
        parser.error(f"--ranks-per-host must be 1 or more, got {args.ranks_per_host}")
    possible = [method for method in METHODS if args.ranks_per_host == 1 or not corrects_momentum(method)]
    args.methods = args.methods or possible
    if not set(args.methods) <= set(possible):
        flat_only = ", ".join(method for method in args.methods if method not in possible)
        parser.error(f"{flat_only} needs --ranks-per-host 1: momentum correction keeps every rank's own velocity")
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
                for hosts in args.hosts:
                    rows.append(row(name, model, method, hosts, args.ranks_per_host, args.bucket_mb))
                    advance(f"{name}, {method}, {hosts} hosts")
    columns = ["model", "method", "ranks", "exchange", "bytes per step", "between hosts"]
    columns += ["times less", "than fp16", "small tensors"]
    caption = (
        "Of one rank. Times less between hosts than a ring all-reduce of fp32, and of fp16, among the ranks with the same "
        "place on every host. Small tensors: their share of the payload."
    )
    table = make_table("Bytes on the wire, everything counted", columns, caption)
    for r in rows:
        cells = (
            r["method"],
            str(r["ranks"]),
            r["exchange"],
            f"{r['bytes_per_step']:,}",
            f"{r['bytes_between_hosts']:,}",
            short(r["ratio_between_hosts"]),
            short(r["ratio_to_fp16"]),
        )
        table.add_row(r["model"], *cells, f"{100 * r['small_bytes'] / r['payload_bytes']:.0f} %")
    publish(args, rows, table, ["wire_bytes", *argv])


def row(name: str, model: nn.Module, method: str, hosts: int, ranks_per_host: int, bucket_mb: float) -> Row:
    """One line of the result."""
    world_size = hosts * ranks_per_host
    settings = make_exchange(method).settings
    wire = count(model, replace(settings, hierarchical=ranks_per_host > 1), world_size, bucket_mb, ranks_per_host)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    dense = ring_nbytes(gradients, world_size)
    # each place on the hosts has a ring of its own for its share
    dense_between = ring_nbytes(gradients, hosts) / ranks_per_host
    return {
        "model": name,
        "method": method,
        "ranks": world_size,
        "exchange": wire.exchange,
        "bytes_per_step": wire.sent,
        "dense_bytes": dense,
        "ratio": round(dense / wire.sent, 2),
        "ranks_per_host": ranks_per_host,
        "bytes_between_hosts": wire.between,
        "ratio_between_hosts": round(dense_between / wire.between, 2),
        "ratio_to_fp16": round(dense_between / 2 / wire.between, 2),
        "payload_bytes": wire.coded + wire.small + wire.headers,
        "coded_bytes": wire.coded,
        "small_bytes": wire.small,
        "header_bytes": wire.headers,
    }


if __name__ == "__main__":
    main()

"""What exact local clipping costs a step: with it, no bucket of DGC is sent before the backward has ended.

benchmarks/hosts.sh -n 2 -r 1gbit -- python benchmarks/clip_overlap.py [--ratio 0.001] [--steps 20] [--json] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.methods import Wrapped
from benchmarks.report import Row, add_output_options, make_table, publish, short
from benchmarks.step_time_rank import Interface, Run, Training, gather, measure, take_cores
from benchmarks.workloads import ResNet50
from lightning_compress import MomentumCorrection, TopK, register_comm_hook

CLIPPING = {
    "none": MomentumCorrection(0.9),
    "previous_step": MomentumCorrection(0.9, clip_norm=1.0, clip_norm_from="previous_step"),
    "this_step": MomentumCorrection(0.9, clip_norm=1.0),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="clip_overlap.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ratio", type=float, default=0.001, help="density (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each kind (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="of each host (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be 2 or more, got {args.steps}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, as one of the hosts; rank 0 prints."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    rank = int(os.environ["RANK"])
    take_cores(rank, args.cores)
    torch.set_num_threads(max(1, args.cores))
    dist.init_process_group("gloo")
    training = Training(ResNet50(), rank, corrected=True)
    runs = [Run(name, _wrap(training.model, memory, args.ratio)) for name, memory in CLIPPING.items()]
    measure(training, runs, args.steps, Interface(os.environ["GLOO_SOCKET_IFNAME"]))
    samples = gather(runs, training.nbytes)
    if rank == 0:
        _show(args, [_row(sample, args) for sample in samples], argv)
    for run in runs:
        run.wrapped.close()
    dist.barrier()  # nobody leaves while others still read from it
    dist.destroy_process_group()


def _wrap(module: nn.Module, memory: MomentumCorrection, ratio: float) -> Wrapped:
    ddp = DistributedDataParallel(module, init_sync=False, broadcast_buffers=False)
    return Wrapped(ddp, register_comm_hook(ddp, TopK(ratio), memory))


def _row(sample: Row, args: argparse.Namespace) -> Row:
    ms = sample["steps_ms"]
    low, _, high = quantiles(ms, n=4)
    return {
        "clip_norm_from": sample["method"],
        "model": "resnet50",
        "ratio": args.ratio,
        "hosts": dist.get_world_size(),
        "median_ms": round(median(ms), 1),
        "spread_ms": round(high - low, 1),
        "bytes_per_step": sum(sample["steps_bytes"]) // len(ms),
        "steps_ms": ms,
    }


def _show(args: argparse.Namespace, rows: Sequence[Row], argv: Sequence[str]) -> None:
    columns = ["clip_norm_from", "median ms", "spread ms", "against none"]
    table = make_table(f"{ResNet50.description}, DGC at {args.ratio:g}, {rows[0]['hosts']} hosts", columns)
    for row in rows:
        cells = (
            short(row["median_ms"]),
            short(row["spread_ms"]),
            f"{row['median_ms'] / rows[0]['median_ms'] - 1:+.1%}",
        )
        table.add_row(row["clip_norm_from"], *cells)
    publish(args, rows, table, ["clip_overlap", *argv])


if __name__ == "__main__":
    main()

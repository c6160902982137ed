"""One host of ``step_time.py``: trains a model under several methods in turns and measures every step.

Started by ``hosts.sh`` on every host. Rank 0 prints the method of each finished step, and writes all samples to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.methods import METHODS, Wrapped, corrects_momentum, wrap
from benchmarks.report import Row
from benchmarks.workloads import WORKLOADS, Batch, Workload
from lightning_compress.optim import DGCSGD

WARM_UP = 3
"""Steps of each method before measuring: DDP rebuilds its buckets after the first, PowerSGD starts with the third."""
_TIMEOUT = timedelta(minutes=20)


@dataclass
class Run:
    """A method, its wrapper, and what was measured."""

    method: str
    wrapped: Wrapped
    ms: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class Training:
    """One model, its optimizer and its data, trained through whatever wrapper is given.

    Args:
        workload: What to train.
        rank: This host; each has its own data.
        corrected: Whether momentum is applied before the exchange: the optimizer is then ``DGCSGD``.
    """

    def __init__(self, workload: Workload, rank: int, corrected: bool = False) -> None:
        torch.manual_seed(0)  # the same weights everywhere
        self.model: nn.Module = workload.model()
        self.nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        self._workload = workload
        parameters = self.model.parameters()
        self._optimizer = DGCSGD(parameters, 0.0, 0.9, 1e-4) if corrected else workload.optimizer(parameters)
        generator = torch.Generator().manual_seed(rank)
        self._batches: Iterator[Batch] = cycle([workload.batch(generator) for _ in range(4)])

    def step(self, wrapped: Wrapped) -> float:
        """One optimizer step; returns its milliseconds."""
        start = time.perf_counter()
        self.forward(wrapped.ddp).backward()
        self.update()
        return (time.perf_counter() - start) * 1e3

    def forward(self, model: nn.Module) -> torch.Tensor:
        """The loss of the next batch."""
        self._optimizer.zero_grad(set_to_none=True)
        return self._workload.loss(model, next(self._batches))

    def update(self) -> None:
        """The optimizer's part of a step."""
        self._optimizer.step()


class Interface:
    """The bytes that this host has sent, as the kernel counts them: with headers and acknowledgements.

    Args:
        name: The network interface.
    """

    def __init__(self, name: str) -> None:
        self._counter = Path("/sys/class/net") / name / "statistics" / "tx_bytes"

    def sent(self) -> int:
        """Bytes since the interface exists."""
        return int(self._counter.read_text())


def measure(training: Training, runs: Sequence[Run], steps: int, interface: Interface) -> None:
    """Warms every run up, then lets them take turns, one step each, so that a drift of the machine hits all alike."""
    for run in runs:
        for _ in range(WARM_UP):
            training.step(run.wrapped)
            _report(run)
    for round_ in range(steps):
        first = round_ % len(runs)  # whoever comes first is not always the same
        for run in (*runs[first:], *runs[:first]):
            dist.barrier()
            before = interface.sent()
            run.ms.append(training.step(run.wrapped))
            dist.barrier()  # all that was sent for this step has now left: it has arrived
            run.nbytes.append(interface.sent() - before)
            _report(run)


def gather(runs: Sequence[Run], gradient_nbytes: int) -> list[Row]:
    """For every run its samples over all hosts: the slowest host's time of each step, and the mean of their bytes."""
    rows = []
    for run in runs:
        mine = (run.ms, run.nbytes, run.wrapped.predicted_bytes(run.method, gradient_nbytes))
        everyone: list[tuple[list[float], list[int], int | None]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        predicted = [p for _, _, p in everyone if p is not None]
        rows.append(
            {
                "method": run.method,
                "steps_ms": [round(max(step), 3) for step in zip(*(ms for ms, _, _ in everyone), strict=True)],
                "steps_bytes": [_mean(step) for step in zip(*(nbytes for _, nbytes, _ in everyone), strict=True)],
                "predicted_bytes": _mean(predicted) if predicted else None,
                "gradient_bytes": gradient_nbytes,
            }
        )
    return rows


def main(kind: type[Training] = Training) -> None:
    """Measures, as one of the hosts.

    Args:
        kind: What a step consists of.
    """
    args = join()
    training = kind(WORKLOADS[args.model], dist.get_rank(), any(map(corrects_momentum, args.methods)))
    runs = [Run(method, wrap(training.model, method, args.broadcast_buffers)) for method in args.methods]
    measure(training, runs, args.steps, Interface(os.environ["GLOO_SOCKET_IFNAME"]))
    leave(runs, gather(runs, training.nbytes), args.output)


def join() -> argparse.Namespace:
    """Reads the command line, takes this host's cores, and meets the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--methods", choices=METHODS, nargs="+", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--broadcast-buffers", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    take_cores(rank, args.cores)
    torch.set_num_threads(max(1, args.cores))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    return args


def leave(runs: Sequence[Run], rows: Sequence[Row], output: Path) -> None:
    """Writes the results on rank 0, and ends."""
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows))
    for run in runs:
        run.wrapped.close()
    dist.barrier()  # nobody leaves while others still read from it
    dist.destroy_process_group()


def take_cores(rank: int, count: int) -> None:
    """Gives this host cores of its own, all its threads included; 0 leaves the choice to the system."""
    if count:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {usable[(rank * count + i) % len(usable)] for i in range(count)})


def _report(run: Run) -> None:
    if dist.get_rank() == 0:
        print(run.method, flush=True)


def _mean(values: Sequence[int]) -> int:
    return round(sum(values) / len(values))


if __name__ == "__main__":
    main()

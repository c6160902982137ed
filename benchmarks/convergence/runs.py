"""One training run, and the file that remembers which have been made."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.tasks import TASKS
from benchmarks.report import RESULTS, Row, versions
from lightning_compress.planner.progress import progress
from lightning_compress.recipes.optimization import warmup_cosine
from lightning_compress.testing import simulate

RUNS = RESULTS / "convergence.jsonl"
WORKERS = 4
EVALUATE_EVERY = 500


@dataclass(frozen=True)
class Run:
    """What identifies a run.

    Attributes:
        family: Task.
        method: Name from ``METHODS``.
        seed: Of initial weights and batches.
        steps: Length; the learning rate falls to zero along a cosine.
    """

    family: str
    method: str
    seed: int
    steps: int

    def lr(self) -> float:
        """Peak learning rate: the method's own, or the task's for it or for its optimizer."""
        method, rates = METHODS[self.method], TASKS[self.family].rates
        return method.lr or rates.get(self.method, rates[method.optimizer])

    def settings(self) -> Row:
        """Everything that decides the outcome, as it stands in the file."""
        method = METHODS[self.method]
        warmup = f"warm-up {method.warmup:g}, " if method.warmup else ""
        return {
            "family": self.family,
            "optimizer": method.optimizer,
            "method": self.method,
            "seed": self.seed,
            "steps": self.steps,
            "workers": WORKERS,
            "batch_size": TASKS[self.family].batch_size,
            "lr": self.lr(),
            "lr_schedule": f"{warmup}cosine to 0",
            "exchange": {key: _plain(value) for key, value in method.make_exchange(self.steps).items()},
        }


def execute(run: Run) -> Row:
    """Trains and evaluates.

    Returns:
        The settings; metric and its final value; test_loss; the curve as [step, value, loss] every 500 steps;
        bits_per_parameter: what a rank puts on the wire per parameter and step with this number of workers, everything
        counted, mean over the run, and last_bits_per_parameter of its last step.
    """
    torch.set_num_threads(1)
    task, method, start = TASKS[run.family], METHODS[run.method], time.process_time()
    model = task.model(run.seed)
    optimizer = method.make_optimizer(model.parameters(), run.lr())
    warmup_steps = round(method.warmup * run.steps)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup_steps, run.steps))
    exchange = method.simulator(model, WORKERS, **method.make_exchange(run.steps), optimizer=optimizer)
    curve: list[list[float]] = []

    def on_step(done: int) -> None:
        schedule.step()
        if done % EVALUATE_EVERY == 0 or done == run.steps:
            accuracy, loss = task.evaluate(model)
            curve.append([done, round(accuracy, 3), round(loss, 5)])

    simulate(
        model, optimizer, task.loss, task.batches(run.seed, run.steps, WORKERS, task.batch_size), exchange, on_step
    )
    stats, parameters = exchange.stats(), sum(p.numel() for p in model.parameters())
    return {
        **run.settings(),
        "metric": task.metric,
        "value": curve[-1][1],
        "test_loss": curve[-1][2],
        "bits_per_parameter": round(8 * stats["bytes_sent"] / (parameters * run.steps), 4),
        "last_bits_per_parameter": round(8 * stats["last"]["bytes_sent"] / parameters, 4),
        "curve": curve,
        "cpu_seconds": round(time.process_time() - start),
        "versions": versions(),
    }


def missing(runs: Sequence[Run], path: Path = RUNS) -> list[Run]:
    """The runs that are not in the file.

    Raises:
        ValueError: A run is there with other settings, so the name means something else by now.
    """
    found = {key(row): row for row in read(path)}
    for run in runs:
        settings = run.settings()
        row = found.get(key(settings), settings)
        differing = [key for key, value in settings.items() if row.get(key) != value]
        if differing:
            raise ValueError(
                f"{path}: {run} was made with another {differing[0]} ({row.get(differing[0])}, now {settings[differing[0]]}): "
                "give the method another name, or remove those lines."
            )
    return [run for run in runs if key(run.settings()) not in found]


def execute_all(runs: Sequence[Run], jobs: int, path: Path = RUNS) -> None:
    """Makes runs in ``jobs`` processes and appends each to the file as it ends; what is interrupted is only that run."""
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited: the processes share the cores
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, progress(len(runs)) as advance:
        waiting = {pool.submit(execute, run): run for run in runs}
        for future in as_completed(waiting):
            row = future.result()
            append(row, path)
            advance(f"{row['method']}, seed {row['seed']}: {row['value']:.2f}")


def read(path: Path = RUNS) -> list[Row]:
    """All runs of the file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def append(row: Row, path: Path = RUNS) -> None:
    """Adds a line; several commands may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def plan(family: str, methods: Sequence[str], seeds: Sequence[int], steps: int) -> Iterator[Run]:
    """The runs of a table: its first two methods with all seeds come before the rest, which go seed by seed."""
    for seed in seeds:
        yield from (Run(family, method, seed, steps) for method in methods[:2])
    for seed in seeds:
        yield from (Run(family, method, seed, steps) for method in methods[2:])


def key(row: Row) -> tuple[Any, ...]:
    """What tells runs apart in the file."""
    return tuple(row[name] for name in ("family", "optimizer", "method", "seed", "steps"))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)

"""What CompressionMonitor costs a training step: blocks of steps with and without it take turns in one fit.

torchrun --nproc-per-node 2 benchmarks/monitor_overhead.py [--pairs 10] [--block 50] [--json] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.report import Row, add_output_options, make_table, publish
from benchmarks.workloads import WORKLOADS, Workload
from lightning_compress import CompressionMonitor

_WARM_UP = 5
"""Steps before the first block: DDP rebuilds its buckets, kernels are compiled."""


class Alternating(CompressionMonitor):
    """A monitor that is there in every other block of steps, and times every step and its own part of it."""

    def __init__(self, block: int) -> None:
        # one sample and one logged step in every block, as with the Trainer's and the monitor's defaults
        super().__init__(summary=False, sample_every_n_steps=block)
        self._block, self._batches, self._own = block, 0, 0.0
        self.steps: list[float] = []
        self.own: list[float] = []

    @property
    def on(self) -> bool:
        """Whether this step has a monitor."""
        return max(0, self._batches - _WARM_UP) // self._block % 2 == 1

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        now = time.perf_counter()
        if self._batches:
            # from start to start: what Lightning's loggers do with the figures is part of it
            self.steps.append(now - self._start)
            self.own.append(self._own)
        self._start, self._own = now, 0.0

    @override
    def on_before_optimizer_step(self, *args: Any) -> None:
        self._timed(super().on_before_optimizer_step, *args)

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self._timed(super().on_train_batch_end, *args)
        self._batches += 1

    def _timed(self, hook: Any, *args: Any) -> None:
        if self.on:
            start = time.perf_counter()
            hook(*args)
            self._own += time.perf_counter() - start


class Module(pl.LightningModule):
    """A workload of the benchmarks as Lightning runs it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload, self.model = workload, workload.model()

    @override
    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.workload.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.model.parameters())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="monitor_overhead.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", choices=WORKLOADS, default="resnet50", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=10, help="blocks with and without (default: %(default)s)")
    parser.add_argument("--block", type=int, default=50, help="steps of a block (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.block < 1:
        parser.error(f"--pairs must be 2 or more and --block 1 or more, got {args.pairs} and {args.block}")
    return args


def fit(workload: Workload, pairs: int, block: int, folder: str | Path) -> tuple[list[float], list[float]]:
    """Seconds of every measured step, and those of the monitor's own hooks in it."""
    monitor = Alternating(block)
    steps = _WARM_UP + 2 * pairs * block + 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="compressed",
        max_steps=steps,
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=block,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(workload), DataLoader([workload.batch(torch.Generator())] * steps, batch_size=None))
    return monitor.steps[_WARM_UP:], monitor.own[_WARM_UP:]


def summarize(model: str, steps: Sequence[float], own: Sequence[float], block: int) -> Row:
    """One line of the result: blocks in turn, the first without a monitor."""
    blocks = [mean(steps[i : i + block]) for i in range(0, len(steps), block)]
    ratios = [with_it / without for without, with_it in zip(blocks[::2], blocks[1::2], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "model": model,
        "block": block,
        "pairs": len(ratios),
        "step_ms": round(1e3 * median(blocks[::2]), 2),
        "ratio": round(median(ratios), 4),
        "ratio_spread": round(high - low, 4),
        # its own hooks alone, which the noise of whole steps does not reach
        "hooks_ms": round(2e3 * sum(own) / len(own), 4),
        "hooks_share": round(2 * sum(own) / len(own) / median(blocks[::2]), 6),
        "ratios": ratios,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, as one of the ranks; rank 0 prints."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        row = summarize(args.model, *fit(WORKLOADS[args.model], args.pairs, args.block, folder), args.block)
    if int(os.environ["RANK"]) == 0:
        columns = ["model", "block", "step ms", "with / without", "spread", "hooks ms", "hooks / step"]
        table = make_table("CompressionMonitor's share of a training step", columns)
        table.add_row(
            row["model"], str(row["block"]), *(f"{row[k]:.4g}" for k in ("step_ms", "ratio", "ratio_spread", "hooks_ms")),
            f"{row['hooks_share']:.3%}",
        )  # fmt: skip
        publish(args, [row], table, ["monitor_overhead", *argv])


if __name__ == "__main__":
    main()

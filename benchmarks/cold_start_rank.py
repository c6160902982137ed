"""One training step in Lightning's Trainer, as the program of ``cold_start.py``; every rank of it runs this."""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import lightning_compress  # noqa: F401  # registers the strategies
from benchmarks.break_even import Training
from benchmarks.workloads import WORKLOADS


def main() -> None:
    """Trains one step of the smallest workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    args = parser.parse_args()
    workload = WORKLOADS["tiny"]
    batches = [workload.batch(torch.Generator().manual_seed(seed)) for seed in range(2)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=args.ranks, strategy=args.strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Training(workload), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

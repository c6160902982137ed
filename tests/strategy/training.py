"""A small LightningModule and Trainers that find the ranks of ``run_ranks`` as they would find torchrun's."""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.exchange.training import content
from tests.models import loss_of, make_model

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Classifier(pl.LightningModule):
    """The small model of the other tests, on fixed random data."""

    def __init__(self, batches: int = 8) -> None:
        super().__init__()
        self.model, self.batches = make_model(), batches
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss_of(self.model, batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        count = self.batches * 4 * 2
        images = torch.randn(count, 100, generator=generator)
        labels = torch.randint(10, (count,), generator=generator)
        return DataLoader(TensorDataset(images, labels), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    devices = options.get("devices", dist.get_world_size())
    node, local = divmod(dist.get_rank(), devices)
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(devices), GROUP_RANK=str(node))
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return pl.Trainer(
        **{**QUIET, "accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": 1, **options}
    )


def fitted(strategy: Any, model: pl.LightningModule | None = None, **options: Any) -> tuple[pl.Trainer, str]:
    """A Trainer that has fitted, and a digest of the parameters it has ended with."""
    model = Classifier() if model is None else model
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    return trainer, content(model.parameters())

"""Callbacks that freeze, average or search: what Lightning does to a model while it is trained."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import EMAWeightAveraging, LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.plugins.environments import SLURMEnvironment

from lightning_compress import CompressedStrategy
from tests.exchange.training import content, residuals
from tests.ranks import run_ranks
from tests.strategy.training import Classifier, fitted, make_trainer


class Find(LearningRateFinder):
    """Searches, and then puts the learning rate back."""

    def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before = content(pl_module.parameters()), residuals(trainer.strategy.exchange)
        super().lr_find(trainer, pl_module)
        after = residuals(trainer.strategy.exchange)
        assert trainer.strategy.exchange.stats()["steps"] == 6  # it did train
        assert before[0] == content(pl_module.parameters())
        assert not before[1]
        assert not any(residual.any() for residual in after.values())
        assert trainer.strategy.exchange.state_dict()["step"] == 0
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05


class Searched(Classifier):
    lr = 0.05


def whole_life() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def fit(name: str, strategy: Any, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
        model = Searched()
        trainer = make_trainer(strategy, callbacks=callbacks, **options)
        trainer.fit(model)
        found[name] = content(model.parameters())
        return trainer

    exchange = fit(
        "plain", CompressedStrategy(verify_every=1), [], default_root_dir=tempfile.mkdtemp()
    ).strategy.exchange
    state, buffers = content(residuals(exchange).values()), exchange.stats()
    found["buffer bytes"] = buffers["buffer_bytes"], buffers["last"]["buffer_bytes"]
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    trainer = fit("searched", CompressedStrategy(), [Find(num_training_steps=6)], default_root_dir=folder)
    found["searched, same residuals"] = content(residuals(trainer.strategy.exchange).values()) == state
    averages = {
        "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
    }
    for name, average in averages.items():
        fit(f"ddp {name}", "ddp", [average()], max_epochs=3)
        fit(f"none {name}", CompressedStrategy("none"), [average()], max_epochs=3)
        fit(f"compressed {name}", CompressedStrategy(verify_every=1), [average()], max_epochs=3)
    with pytest.raises(
        ValueError, match="SyncBatchNorm layers only work with GPU"
    ):  # DDP's own word: it reaches the layers
        fit("sync", "compressed", [], sync_batchnorm=True)
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        SLURM_NTASKS=ranks, SLURM_JOB_NAME="train", SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0"
    )
    os.environ.update(SLURM_JOB_ID="1", SLURM_NTASKS_PER_NODE=ranks, SLURM_NODELIST="localhost")
    slurm = [SLURMEnvironment(auto_requeue=False)]
    trainer = fit("slurm", "compressed", [], plugins=slurm)
    found["slurm's world"] = trainer.world_size, trainer.global_rank == dist.get_rank()
    return found


def test_callbacks_and_environments() -> None:
    first, second = run_ranks(whole_life, 2)
    assert first == second
    assert first["searched"] == first["plain"] == first["slurm"]
    assert first["searched, same residuals"]
    assert first["slurm's world"] == (2, True)
    batch_norm = 4 * (300 + 300) + 8  # mean, variance, counter; at each of 8 forwards
    assert first["buffer bytes"] == (8 * batch_norm, batch_norm)
    for name in ("swa", "ema"):
        assert first[f"none {name}"] == first[f"ddp {name}"]
        assert first[f"compressed {name}"] != first[f"ddp {name}"]


class Freezing(pl.Callback):
    """Trains the last layer, then all, then all but the first."""

    def __init__(self) -> None:
        self.moved: list[list[bool]] = []
        self.owed: list[set[str]] = []

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        pass

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.model[:4].requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.model[:4].requires_grad_(trainer.current_epoch > 0)
        module.model[0].requires_grad_(trainer.current_epoch == 1)
        self.before = [content(part.parameters()) for part in module.model[::2]]

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        parts = module.model[::2]
        self.moved.append([content(p.parameters()) != b for p, b in zip(parts, self.before, strict=True)])
        self.owed.append({name.split()[1] for name in residuals(trainer.strategy.exchange)})


def fit_freezing(ddp: dict[str, Any]) -> tuple[Any, ...]:
    freezing, model = Freezing(), Classifier(3)
    trainer = make_trainer(CompressedStrategy(verify_every=1, **ddp), max_epochs=3, callbacks=[freezing])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    dropped = [str(w.message) for w in caught if "dropped" in str(w.message)]
    return (
        freezing.moved,
        freezing.owed,
        trainer.strategy.exchange.stats()["steps"],
        content(model.parameters()),
        dropped,
    )


@pytest.mark.parametrize("ddp", [{}, {"static_graph": True, "gradient_as_bucket_view": True}], ids=str)
def test_parameters_that_are_frozen_and_unfrozen_are_followed(ddp: dict[str, Any]) -> None:
    # under stock DDP the ranks drift apart from the second epoch on, and the third is an error
    first, second = run_ranks(fit_freezing, 2, ddp)
    assert first[:-1] == second[:-1]
    assert second[-1] == []  # said by rank 0
    moved, owed, steps, _, dropped = first
    # model[0], [2], [4] (an activation), [6]... has the Linear layers at 0, 2 and 5
    assert moved == [[False, False, False], [True, True, False], [False, True, False]]
    head, middle, bottom = ({f"model.{i}.{kind}" for kind in ("weight", "bias")} for i in (5, 2, 0))
    assert owed == [
        head,
        head | middle | bottom | {"model.3.weight", "model.3.bias"},
        head | middle | {"model.3.weight", "model.3.bias"},
    ]
    assert len(dropped) == 1
    assert "model.0.bias, model.0.weight" in dropped[0]
    assert steps == 9


class FreezesItself(Classifier):
    """Freezes all but the last layer, in the constructor or in ``configure_optimizers``, which DDP's wrapping precedes."""

    def __init__(self, early: bool) -> None:
        super().__init__(3)
        if early:
            self.freeze_most()

    def freeze_most(self) -> None:
        self.model[:4].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.freeze_most()
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


def fit_self_freezing(find_unused: bool) -> list[tuple[Any, ...]]:
    found = []
    for early in (True, False):
        strategy = CompressedStrategy(verify_every=1, find_unused_parameters=find_unused)
        trainer, parameters = fitted(strategy, FreezesItself(early))
        found.append((parameters, trainer.strategy.exchange.stats()["steps"], sorted(residuals(strategy.exchange))))
    return found


@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_that_configure_optimizers_freezes_are_as_if_frozen_before(find_unused: bool) -> None:
    first, second = run_ranks(fit_self_freezing, 2, find_unused)
    assert first[0][0] == first[1][0] == second[0][0]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][1] == 3

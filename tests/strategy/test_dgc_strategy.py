"""Deep Gradient Compression under Lightning's Trainer, on two real ranks."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_compress import CompressedStrategy, CompressionMonitor, DensityWarmup, MomentumCorrection, TopK
from lightning_compress.optim import DGCSGD
from lightning_compress.recipes import ImageClassifier, ImageData
from tests.models import loss_of, make_model
from tests.ranks import run_ranks

LR = 0.05


class Classifier(pl.LightningModule):
    """The small model of the other tests, on fixed random data."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], batches: int) -> None:
        super().__init__()
        self.model = make_model()
        self.optimizer, self.batches = optimizer, batches

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        count = self.batches * 4 * 2
        images = torch.randn(count, 100, generator=generator)
        labels = torch.randint(10, (count,), generator=generator)
        return DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)


class Endless(IterableDataset[tuple[Tensor, int]]):
    """Data whose length nobody knows."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield torch.ones(100), 1


class Streaming(Classifier):
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(Endless(), batch_size=4)


class Densities(pl.Callback):
    """Notes the density of every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        stats = trainer.strategy.exchange.stats()
        if stats["steps"] > len(self.seen):
            self.seen.append(stats["density"])


def dgc_sgd(parameters: Any) -> torch.optim.Optimizer:
    return DGCSGD(parameters, LR, momentum=0.9, weight_decay=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def make_strategy(
    schedule: DensityWarmup | None, correction: MomentumCorrection | None = None, **more: Any
) -> CompressedStrategy:
    return CompressedStrategy(TopK(0.02), correction or MomentumCorrection(0.9), schedule=schedule, **more)


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer that finds the ranks of ``run_ranks`` as it would find torchrun's."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, **{**quiet, **options})


def fit(
    schedule: DensityWarmup | None,
    correction: MomentumCorrection | None,
    batches: int,
    checkpoint: str | None = None,
    resume: bool = False,
    save_state: str = "exact",
    **options: Any,
) -> dict[str, Any]:
    """One rank's training: densities, warnings, parameters, and figures. Writes ``checkpoint`` after epoch 1, or resumes."""
    densities = Densities()
    callbacks: list[pl.Callback] = [densities, CompressionMonitor(summary=False)]
    if checkpoint is not None and not resume:
        callbacks.append(SaveAfterFirstEpoch(checkpoint))
    strategy = make_strategy(schedule, correction, save_state=save_state)
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    model = Classifier(dgc_sgd, batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=checkpoint if resume else None)
    return {
        "densities": densities.seen,
        "warnings": [str(w.message) for w in caught],
        "logged": float(trainer.callback_metrics["comm/density"]),
        "steps": strategy.exchange.stats()["steps"],
        "global_step": trainer.global_step,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
    }


class SaveAfterFirstEpoch(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("batches", "accumulate", "steps"), [(4, 1, 4), (8, 2, 4), (5, 2, 3)])
def test_stages_of_epochs_last_their_optimizer_steps(batches: int, accumulate: int, steps: int) -> None:
    warmup = DensityWarmup((0.5, 0.25))
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    for rank in run_ranks(run_fit, 2, warmup, None, batches, options):
        assert rank["densities"] == [0.5] * steps + [0.25] * steps + [0.02] * steps
        assert rank["steps"] == rank["global_step"] == 3 * steps
        assert rank["logged"] == pytest.approx(0.02)


def run_fit(schedule: Any, correction: Any, batches: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit(schedule, correction, batches, **options)


def test_ranks_stay_equal_and_the_live_density_is_logged() -> None:
    options = {"max_steps": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.0}  # 0 is off
    one, other = run_ranks(
        run_fit, 2, DensityWarmup((0.5, 0.25), steps=2), MomentumCorrection(0.9, clip_norm=0.5), 8, options
    )
    assert one["logged"] == other["logged"] == 0.25
    for name, value in one["state"].items():
        if "running" not in name:  # batch statistics are each rank's own
            assert torch.equal(value, other["state"][name]), name


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (DensityWarmup((0.5, 0.25)), "takes 8 optimizer steps and the run has 6"),
        (DensityWarmup((0.5, 0.25), steps=5), "takes 10 optimizer steps and the run has 6"),
        (DensityWarmup((0.5, 0.25), steps=3), None),
    ],
)
def test_a_warmup_longer_than_the_run_is_said_by_rank_0(schedule: DensityWarmup, said: str | None) -> None:
    ranks = run_ranks(run_fit, 2, schedule, None, 4, {"max_steps": 6})
    found = [[text for text in rank["warnings"] if "density warm-up" in text] for rank in ranks]
    assert found[1] == []
    assert len(found[0]) == (said is not None)
    assert all(said in text for text in found[0] if said)


def test_data_of_unknown_length_needs_a_warmup_in_steps() -> None:
    assert run_ranks(stream, 2) == [[0.5, 0.25, 0.02]] * 2


def choose() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning").addHandler(handler)  # what is logged there is shown
    make_trainer("compressed_dgc", max_steps=1).fit(Classifier(dgc_sgd, 1))
    return [text for text in said if "exchange='auto'" in text]


def test_rank_0_says_which_exchange_was_chosen() -> None:
    (text,), silence = run_ranks(choose, 2)
    assert "all_gather on 2 ranks" in text
    assert silence == []


def stream() -> list[float]:
    with pytest.raises(
        ValueError, match=r"length of this train_dataloader is unknown: give DensityWarmup\(steps=...\)"
    ):
        make_trainer(make_strategy(DensityWarmup()), max_steps=3).fit(Streaming(dgc_sgd, 0))
    densities = Densities()
    trainer = make_trainer(make_strategy(DensityWarmup((0.5, 0.25), steps=1)), max_steps=3, callbacks=[densities])
    trainer.fit(Streaming(dgc_sgd, 0))
    return densities.seen


@pytest.mark.parametrize(
    "correction",
    [
        MomentumCorrection(0.9),
        MomentumCorrection(0.9, clip_norm=0.5),
        MomentumCorrection(0.9, clip_norm=0.5, clip_norm_from="previous_step"),
    ],
)
def test_resuming_inside_the_warmup_is_bit_identical(correction: MomentumCorrection, tmp_path: Path) -> None:
    ranks = run_ranks(unbroken_and_resumed, 2, correction, str(tmp_path / "middle.ckpt"))
    for unbroken, resumed, forgetful in ranks:
        # an epoch has 4 steps, a stage 3: the checkpoint falls inside the second stage
        assert unbroken["densities"] == [0.5] * 3 + [0.25] * 3 + [0.125] * 3 + [0.02] * 3
        assert resumed["densities"] == unbroken["densities"][4:]
        assert all(torch.equal(unbroken["state"][name], value) for name, value in resumed["state"].items())
        assert not all(torch.equal(unbroken["state"][name], value) for name, value in forgetful["state"].items())


def unbroken_and_resumed(correction: MomentumCorrection, path: str) -> tuple[dict[str, Any], ...]:
    warmup = DensityWarmup((0.5, 0.25, 0.125), steps=3)
    unbroken = fit(warmup, correction, 4, path, max_epochs=3)
    resumed = fit(warmup, correction, 4, path, resume=True, max_epochs=3)
    forgetful = fit(warmup, correction, 4, path, resume=True, save_state="none", max_epochs=3)
    return unbroken, resumed, forgetful


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (sgd, {}, r"twice under MomentumCorrection: use lightning_compress.optim.DGCSGD\(momentum=0.9"),
        (adam, {}, "which Adam would treat as gradients: use lightning_compress.optim.DGCSGD"),
        (
            dgc_sgd,
            {"gradient_clip_val": 0.7},
            r"use MomentumCorrection\(clip_norm=0.7\) and leave gradient_clip_val out",
        ),
    ],
)
def test_what_acts_on_gradients_is_refused_before_the_first_step(optimizer: Any, options: Any, message: str) -> None:
    assert all(run_ranks(refused, 2, optimizer, options, message))


def refused(optimizer: Any, options: dict[str, Any], message: str) -> bool:
    trainer = make_trainer("compressed_dgc", max_steps=1, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Classifier(optimizer, 2))
    return trainer.global_step == 0


@pytest.mark.parametrize("optimizer", ["sgd", "dgc_sgd"])
def test_the_recipe_needs_its_optimizer(optimizer: str) -> None:
    assert all(run_ranks(fit_recipe, 2, optimizer))


def fit_recipe(optimizer: Any) -> bool:
    trainer = make_trainer("compressed_dgc", max_steps=2, limit_val_batches=0)
    model, data = ImageClassifier("resnet8", optimizer=optimizer), ImageData(image_size=8)
    if optimizer == "dgc_sgd":
        trainer.fit(model, data)
        return trainer.global_step == 2
    with pytest.raises(ValueError, match="DGCSGD"):
        trainer.fit(model, data)
    return trainer.global_step == 0


@pytest.mark.slow
def test_the_preset_by_name_in_spawned_processes(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    callbacks = [CompressionMonitor(summary=False)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="compressed_dgc_spawn", max_epochs=2, callbacks=callbacks, **quiet
    )
    model = Classifier(dgc_sgd, 3)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.fit(model)
    assert float(trainer.callback_metrics["comm/density"]) == 0.0625  # the second stage of the paper's warm-up
    assert float(trainer.callback_metrics["comm/ratio"]) > 5
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

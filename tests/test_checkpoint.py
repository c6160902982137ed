"""Residuals in Lightning's own checkpoints: no user code, any number of ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressedStrategy
from tests.models import Batch, loss_of, make_batches, make_model
from tests.ranks import run_ranks


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def data() -> DataLoader[Any]:
    images, labels = zip(*[batches[0] for batches in make_batches(1, 12)], strict=True)
    return DataLoader(TensorDataset(torch.cat(images), torch.cat(labels)), batch_size=16, shuffle=False)


def fit(folder: str, epochs: int, resume: str | None, settings: dict[str, Any], saves: bool = True) -> Any:
    """Trains as a process that torchrun has started; returns the weights and this rank's state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
        WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0",
    )  # fmt: skip
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=world_size,
        max_epochs=epochs,
        strategy=CompressedStrategy(**settings),
        callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0)] if saves else [],
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, data(), ckpt_path=resume)
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    return module.state_dict(), trainer.strategy.exchange.state_dict()


@pytest.mark.parametrize(
    "settings", [{}, {"exchange": "all_gather", "compressor": "topk"}], ids=["two_way", "all_gather"]
)
def test_resuming_from_a_model_checkpoint_is_bit_identical(tmp_path: Path, settings: dict[str, Any]) -> None:
    unbroken = run_ranks(fit, 2, str(tmp_path / "a"), 4, None, settings)
    run_ranks(fit, 2, str(tmp_path / "b"), 2, None, settings)
    resumed = run_ranks(fit, 2, str(tmp_path / "c"), 4, str(tmp_path / "b" / "last.ckpt"), settings)
    for (expected, state), (model, other) in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(value, model[name]) for name, value in expected.items() if "running" not in name)
        assert all(torch.equal(r[0], other["worker"][name][0]) for name, r in state["worker"].items())
    # saved after fit, when the strategy is torn down
    late, last = (torch.load(tmp_path / "a" / f"{name}.ckpt", weights_only=True) for name in ("after", "last"))
    for name, residuals in last["lightning_compress"]["worker"].items():
        for rank, residual in enumerate(residuals):
            assert residual.abs().sum() > 0
            assert torch.equal(residual, late["lightning_compress"]["worker"][name][rank])
            assert torch.equal(residual, unbroken[rank][1]["worker"][name][0])


def test_resuming_on_more_ranks_warns_once_with_both_numbers(tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path / "a"), 1, None, {})
    last = str(tmp_path / "a" / "last.ckpt")
    warned = run_ranks(fit_and_collect_warnings, 3, str(tmp_path / "b"), 2, last, {})
    counts = [sum("of 2 ranks are redistributed over 3" in message for message in of_rank) for of_rank in warned]
    assert counts == [1, 0, 0]


def fit_and_collect_warnings(*arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(*arguments)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(("mode", "ranks"), [("exact", 2), ("mean", 1), ("none", 0)])
def test_what_a_checkpoint_holds(tmp_path: Path, mode: str, ranks: int) -> None:
    run_ranks(fit, 2, str(tmp_path), 1, None, {"save_state": mode})
    state = torch.load(tmp_path / "last.ckpt", weights_only=True).get("lightning_compress")
    if mode == "none":
        assert state is None
    else:
        assert {len(residuals) for residuals in state["worker"].values()} == {ranks}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="save_state='all'"):
        CompressedStrategy(save_state="all")  # type: ignore[arg-type]

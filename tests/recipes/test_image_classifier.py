"""The networks of the recipes, their optimizer and schedule, and that they learn."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from lightning_compress.optim import DGCSGD
from lightning_compress.recipes import ImageClassifier, ImageData
from lightning_compress.recipes.networks import build_network
from lightning_compress.recipes.optimization import warmup_cosine, warmup_linear


def quiet_trainer(folder: Path, **options: Any) -> pl.Trainer:
    """A Trainer on one CPU process that leaves nothing behind."""
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **{**settings, **options})


@pytest.mark.parametrize(
    ("architecture", "num_classes", "parameters"),
    [
        ("resnet8", 10, 78_042),
        ("resnet50", 10, 23_528_522),
        ("resnet50", 1000, 25_557_032),
        ("vgg16", 10, 134_301_514),
        ("vgg16_bn", 1000, 138_365_992),
        ("vgg16_small", 10, 14_990_922),
    ],
)
def test_parameter_counts(architecture: Any, num_classes: int, parameters: int) -> None:
    with torch.device("meta"):
        network = build_network(architecture, num_classes)
        logits = network(torch.empty(2, 3, 32, 32))
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert logits.shape == (2, num_classes)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match="choose one of resnet8, resnet50, vgg16, vgg16_bn, vgg16_small"):
        build_network("resnet51", 10)  # type: ignore[arg-type]


def test_residual_blocks_of_resnet50_start_as_identity() -> None:
    network = build_network("resnet50", 10)
    assert all(not block.bn3.weight.any() for block in network.layer1)


def test_warmup_cosine() -> None:
    factors = [warmup_cosine(step, 4, 12) for step in range(14)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.5)  # half-way down
    assert factors[12:] == pytest.approx([0.0, 0.0])
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_warmup_linear() -> None:
    factors = [warmup_linear(step, 4, 12) for step in range(14)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8:] == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0, 0.0])


def test_no_warmup_starts_at_the_full_rate() -> None:
    assert warmup_cosine(0, 0, 10) == 1.0


def test_weight_decay_spares_norms_and_biases(tmp_path: Path) -> None:
    model = ImageClassifier("resnet8", weight_decay=0.1)
    quiet_trainer(tmp_path, max_steps=1).fit(model, ImageData())
    decayed, spared = model.optimizers().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in spared["params"]} == {1}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_schedule_ends_at_zero_with_the_run(tmp_path: Path) -> None:
    model = ImageClassifier("resnet8", lr=0.3, warmup=0.5)
    trainer = quiet_trainer(tmp_path, max_steps=10, limit_val_batches=0)
    rates = []

    class Spy(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer.callbacks.append(Spy())
    trainer.fit(model, ImageData())
    assert rates[:5] == pytest.approx([0.06, 0.12, 0.18, 0.24, 0.3])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)


def test_endless_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set max_epochs or max_steps"):
        quiet_trainer(tmp_path, max_epochs=-1).fit(ImageClassifier("resnet8"), ImageData())


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_warmup_out_of_range(warmup: float) -> None:
    with pytest.raises(ValueError, match=f"warmup={warmup} must be a share"):
        ImageClassifier("resnet8", warmup=warmup)


def test_optimizer_is_chosen_by_name(tmp_path: Path) -> None:
    model = ImageClassifier("resnet8", optimizer="dgc_sgd", momentum=0.8, nesterov=True)
    quiet_trainer(tmp_path, max_steps=1).fit(model, ImageData())
    optimizer = model.trainer.optimizers[0]
    assert isinstance(optimizer, DGCSGD)
    assert all((group["momentum"], group["nesterov"]) == (0.8, True) for group in optimizer.param_groups)
    with pytest.raises(ValueError, match="optimizer='adam' is unknown; choose one of sgd, dgc_sgd"):
        ImageClassifier("resnet8", optimizer="adam")  # type: ignore[arg-type]


def test_head_narrower_than_the_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_classes=9 of the model is too small: the data has 10"):
        quiet_trainer(tmp_path, max_steps=1).fit(ImageClassifier("resnet8", num_classes=9), ImageData())


def test_validation_logs_the_true_mean(tmp_path: Path) -> None:
    pl.seed_everything(0)
    model, data = ImageClassifier("resnet8"), ImageData(batch_size=100)
    trainer = quiet_trainer(tmp_path)
    (logged,) = trainer.validate(model, data, verbose=False)
    batches = [data.on_after_batch_transfer(batch, 0) for batch in data.val_dataloader()]
    with torch.inference_mode():
        logits = torch.cat([model.eval()(images) for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    assert logged["val/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert logged["val/acc"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert torch.equal(torch.cat(trainer.predict(model, data)), logits.argmax(1))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_batches_come_in_the_precision_of_the_model(tmp_path: Path, precision: Any) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=1, precision=precision)
    trainer.fit(ImageClassifier("resnet8"), ImageData(batch_size=4))
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_learns_digits(tmp_path: Path) -> None:
    pl.seed_everything(0, workers=True)
    trainer = quiet_trainer(tmp_path, max_steps=100)
    model, data = ImageClassifier("resnet8", lr=0.1), ImageData(image_size=8, batch_size=64)
    trainer.fit(model, data)
    (logged,) = trainer.test(model, data, verbose=False)
    assert logged["test/acc"] > 0.9  # chance is 0.1
    assert logged["test/loss"] < 0.4

"""BERT's recipes: their size, loss, optimizer, and the way from pre-training to fine-tuning."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_compress import cli
from lightning_compress.recipes import BertClassifier, BertMaskedLM, BertQuestionAnswering, MLMData, TextClassData
from lightning_compress.recipes.tokens import load_tokenizer

CONSOLE_SCRIPT = Path(sys.executable).with_name("lightning-compress")
SENTENCES = ("cat sat on my mat", "dogs ran after red balls", "rain fell over old towns")


def write_text(folder: Path) -> Path:
    """100 documents, each of the words of one of three sentences, in random order."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(SENTENCES[number % 3].split(), 80)) for number in range(100)]
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    return folder


def mlm_data(folder: Path, **settings: Any) -> MLMData:
    options: dict[str, Any] = {"vocab_size": 120, "seq_len": 32, "held_out": 0.1, "batch_size": 16, **settings}
    return MLMData("files", str(write_text(folder / "text")), cache_dir=str(folder / "cache"), **options)


def quiet_trainer(folder: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings |= {"num_sanity_val_steps": 0, "default_root_dir": folder, **options}
    return pl.Trainer(accelerator="cpu", devices=1, **settings)


def tiny(**settings: Any) -> BertMaskedLM:
    return BertMaskedLM("tiny", **{"vocab_size": 120, "dropout": 0.0, "lr": 3e-3, **settings})


class Beginning(pl.Callback):
    """The weights with which training begins."""

    weights: dict[str, torch.Tensor]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (BertMaskedLM, 109_514_298),
        (BertClassifier, 109_483_778),
        (BertQuestionAnswering, 108_893_186),
        (lambda: BertMaskedLM("tiny", vocab_size=4096), 1_007_744),
    ],
)
def test_parameter_counts(model: Callable[[], pl.LightningModule], parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in model().parameters()) == parameters


def test_loss_is_that_of_transformers() -> None:
    pl.seed_everything(0)
    model = tiny().eval()
    shown = torch.randint(5, 120, (3, 10))
    labels = torch.where(torch.rand(3, 10) < 0.3, torch.randint(5, 120, (3, 10)), -100)
    loss = model.training_step((shown, labels), 0)
    assert loss.item() == pytest.approx(model.network(input_ids=shown, labels=labels).loss.item(), rel=1e-5)


def test_optimizer_and_schedule(tmp_path: Path) -> None:
    model = tiny(lr=0.01, warmup=0.25, weight_decay=0.1)
    trainer = quiet_trainer(tmp_path, max_steps=8, limit_val_batches=0)
    rates = []

    class Spy(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer.callbacks.append(Spy())  # type: ignore[attr-defined]
    trainer.fit(model, mlm_data(tmp_path))
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01 * 5 / 6, 0.01 * 4 / 6, 0.005, 0.01 * 2 / 6, 0.01 / 6])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = trainer.optimizers[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.999), 1e-6)
    assert {names[id(p)] for p in spared["params"]} == {
        name for name in names.values() if name.endswith("bias") or "LayerNorm" in name
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match="size='huge' is unknown; choose one of base, tiny"):
        BertMaskedLM("huge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer='sgd' is unknown; choose one of adamw"):
        tiny(optimizer="sgd")
    with pytest.raises(ValueError, match=r"warmup=1\.0 must be a share"):
        tiny(warmup=1.0)


def test_model_smaller_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size=50 of the model is too small: the data needs"):
        quiet_trainer(tmp_path, max_steps=1).fit(tiny(vocab_size=50), mlm_data(tmp_path))
    long = mlm_data(tmp_path, seq_len=513, batch_size=1, held_out=0.3)
    with pytest.raises(ValueError, match="seq_len of the data must be at most 512"):
        quiet_trainer(tmp_path, max_steps=1).fit(tiny(), long)


def test_from_pre_training_to_fine_tuning(tmp_path: Path) -> None:
    pl.seed_everything(0)
    model, data = tiny(), mlm_data(tmp_path)
    trainer = quiet_trainer(tmp_path, max_steps=120)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/loss"] < 2.2  # the entropy is log 5 = 1.6; without context it is log 15 = 2.7
    assert trainer.callback_metrics["val/acc"] > 0.1
    checkpoint = tmp_path / "phase1.ckpt"
    trainer.save_checkpoint(checkpoint)
    assert load_tokenizer(str(checkpoint)).get_vocab() == data.tokenizer.get_vocab()
    trained = {name: value.clone() for name, value in model.state_dict().items()}

    phase2 = tiny(init_from=str(checkpoint), lr=1e-9)
    quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(
        phase2, mlm_data(tmp_path, tokenizer=str(checkpoint), seq_len=64)
    )
    torch.testing.assert_close(phase2.state_dict(), trained, rtol=0, atol=1e-7)

    for split in ("train", "dev"):
        rows = [f"{sentence}\t{label}" for label, sentence in enumerate(SENTENCES)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    options: dict[str, Any] = {"root": str(tmp_path), "batch_size": 3, "cache_dir": str(tmp_path / "cache")}
    labelled = TextClassData("tsv", tokenizer=str(checkpoint), **options)
    fine = BertClassifier(3, "tiny", 120, dropout=0.0, lr=1e-3, init_from=str(checkpoint))
    beginning = Beginning()
    trainer = quiet_trainer(tmp_path, max_epochs=40, callbacks=[beginning])
    trainer.fit(fine, labelled)
    loaded = beginning.weights
    encoder = [name for name in loaded if name.startswith("network.bert.") and ".pooler." not in name]
    assert len(encoder) > 30
    assert all(torch.equal(loaded[name], trained[name]) for name in encoder)
    assert trainer.callback_metrics["val/acc"] == 1.0

    with pytest.raises(ValueError, match="vocabulary is not that of init_from: set the data's `tokenizer` to"):
        quiet_trainer(tmp_path).fit(fine, TextClassData("tsv", vocab_size=60, **options))
    wider = BertClassifier(3, "tiny", 130, init_from=str(checkpoint))
    with pytest.raises(
        ValueError, match=r"set size and vocab_size .*word_embeddings\.weight \[120, 128\] there, \[130"
    ):
        quiet_trainer(tmp_path).fit(wider, labelled)
    with pytest.raises(ValueError, match="num_classes=2 of the model is too small: the data has 3"):
        quiet_trainer(tmp_path).fit(BertClassifier(2, "tiny", 120), labelled)


def test_begins_with_a_folder_of_transformers(tmp_path: Path) -> None:
    theirs, beginning = tiny(), Beginning()
    theirs.network.save_pretrained(tmp_path / "saved")
    ours = tiny(init_from=str(tmp_path / "saved"))
    quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0, callbacks=[beginning]).fit(ours, mlm_data(tmp_path))
    torch.testing.assert_close(beginning.weights, theirs.state_dict(), rtol=0, atol=0)
    missing = tiny(init_from=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere' is neither a checkpoint nor a folder of save_pretrained"):
        quiet_trainer(tmp_path, max_steps=1).fit(missing, mlm_data(tmp_path))


def test_small_config_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    options = ["--data.source", "files", "--data.root", "text", "--data.vocab_size", "120", "--data.held_out", "0.1"]
    options += ["--model.vocab_size", "120", "--trainer.max_steps", "40", "--trainer.val_check_interval", "40"]
    command = [str(CONSOLE_SCRIPT), "fit", "--config", "bert_tiny", *options]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    results = tmp_path / "runs" / "bert_tiny" / "version_0"
    with (results / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert max(float(row["comm/ratio"]) for row in rows if row["comm/ratio"]) > 5
    assert run.stderr.count("Preparing the text, once") + run.stdout.count("Preparing the text, once") == 1

    checkpoint = str(next(results.rglob("*.ckpt")))
    (tmp_path / "train.tsv").write_text("sentence\tlabel\ncat sat\tcat\ndogs ran\tdog\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ndogs\tdog\n")
    options = ["--data.source", "tsv", "--data.root", ".", "--data.batch_size", "2", "--data.tokenizer", checkpoint]
    options += ["--model.init_from", checkpoint, "--model.vocab_size", "120", "--trainer.fast_dev_run", "1"]
    options += ["--trainer.devices", "1", "--trainer.strategy", "auto", "--trainer.callbacks", "null"]
    cli.main(["fit", "--config", "bert_tiny_classification", *options])

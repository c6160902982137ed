"""Which tokens are hidden, and the sequences that MLMData makes of text."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_compress.recipes import BertMaskedLM, MLMData
from lightning_compress.recipes.masking import IGNORED, Masking
from lightning_compress.recipes.tokens import train_tokenizer

TINY: dict[str, Any] = {"size": "tiny", "vocab_size": 300, "dropout": 0.0}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """200 documents of 20 words each, all different."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "nu") for b in ("p", "r", "st", "nd", "lk")]
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(words, 20)) for _ in range(200)]
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    return folder


@pytest.fixture
def data(corpus: Path, tmp_path: Path) -> MLMData:
    return prepared(corpus, tmp_path)


def prepared(corpus: Path, tmp_path: Path, **settings: Any) -> MLMData:
    options: dict[str, Any] = {"vocab_size": 300, "seq_len": 16, "held_out": 0.1, "batch_size": 4, **settings}
    data = MLMData("files", str(corpus), cache_dir=str(tmp_path / "cache"), **options)
    data.prepare_data()
    return data


def test_masking_follows_the_paper() -> None:
    tokenizer = train_tokenizer(["ab cd ef gh ij kl mn op qr st"] * 9, 60)
    masking = Masking(tokenizer, 0.15)
    size = tokenizer.get_vocab_size()
    rows = torch.randint(5, size, (500, 64), generator=torch.Generator().manual_seed(0))
    rows[:, 0], rows[:, 20], rows[:, 63] = 2, 3, 3  # [CLS], and [SEP] in the middle and at the end
    shown, labels = masking(rows, [(0, number) for number in range(500)])
    chosen = labels != IGNORED
    assert (chosen.sum(dim=1) == round(0.15 * 62)).all()
    assert not chosen[:, [0, 20, 63]].any()
    assert torch.equal(labels[chosen], rows[chosen])
    assert torch.equal(shown[~chosen], rows[~chosen])
    masked = (shown == masking.mask)[chosen].double().mean()
    kept = (shown == rows)[chosen].double().mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1 - 0.1 / (size - 5)) < 0.02
    assert (shown[chosen & (shown != masking.mask)] >= 5).all()  # never a special token
    assert len(Counter(shown[chosen & (shown != rows)].tolist())) == size - 4  # any other, and [MASK]


def test_masking_hides_one_token_of_short_sequences_and_none_of_special_ones() -> None:
    masking = Masking(train_tokenizer(["ab cd"], 20), 0.15)
    _, labels = masking(torch.tensor([[2, 7, 3, 3], [2, 3, 3, 3]]), [(0, 0), (0, 1)])
    assert labels.tolist() == [[-100, 7, -100, -100], [-100] * 4]


class TestSequences:
    def test_documents_follow_one_another(self, corpus: Path, data: MLMData) -> None:
        text = (corpus / "corpus.txt").read_text()
        tokens = np.concatenate([data.train[number][1][1:-1] for number in range(len(data.train))])
        documents = np.split(tokens, np.flatnonzero(tokens == 3) + 1)[:-1]
        found = [data.tokenizer.decode(document.tolist()) for document in documents]
        assert len(found) > 150
        assert all(document in text for document in found)
        _, sequence = data.train[3]
        assert (sequence.dtype, sequence.shape) == (torch.int64, (16,))
        assert (sequence[0], sequence[-1]) == (2, 3)

    def test_whole_documents_are_held_out(self, data: MLMData) -> None:
        about = json.loads((data.folder / "about.json").read_text())
        assert about["train"]["documents"] + about["validation"]["documents"] == 200
        assert 8 <= about["validation"]["documents"] <= 35
        assert about["train"]["tokens"] * 2 == (data.folder / "train.tokens").stat().st_size  # 16 bits each
        assert len(data.train) == about["train"]["tokens"] // 14
        assert len(about["train"]["sha256"]) == 64

    def test_cache_is_used_again_unless_the_text_changes(self, corpus: Path, tmp_path: Path, data: MLMData) -> None:
        written = (data.folder / "train.tokens").stat().st_mtime_ns
        again = prepared(corpus, tmp_path, seq_len=32)
        assert (again.folder, (again.folder / "train.tokens").stat().st_mtime_ns) == (data.folder, written)
        assert prepared(corpus, tmp_path, vocab_size=200).folder != data.folder
        (corpus / "more.txt").write_text("bap ker")
        assert prepared(corpus, tmp_path).folder != data.folder

    def test_pickles_without_the_tokens(self, data: MLMData) -> None:
        expected = data.train[1][1]
        assert torch.equal(pickle.loads(pickle.dumps(data)).train[1][1], expected)  # as ddp_spawn does
        assert len(pickle.dumps(data.train)) < 500
        assert torch.equal(pickle.loads(pickle.dumps(data.train))[1][1], expected)

    def test_tokenizer_from_a_folder(self, corpus: Path, tmp_path: Path, data: MLMData) -> None:
        other = prepared(corpus, tmp_path, tokenizer=str(data.folder), held_out=0.5)
        assert other.folder != data.folder
        assert other.tokenizer.to_str() == data.tokenizer.to_str()


def hidden(data: MLMData, batch: Any) -> Tensor:
    return data.on_before_batch_transfer(batch, 0)[1] != IGNORED


class Recorder(pl.Callback):
    """What the model saw, by stage and epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[Any]]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.seen.append(("train", trainer.current_epoch, batch[0].tolist()))

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int, _: int = 0) -> None:
        self.seen.append(("validation", trainer.current_epoch, batch[0].tolist()))


def fit(model: BertMaskedLM, data: MLMData, folder: Path, ckpt_path: str | None = None, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    trainer = pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **settings)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def test_each_epoch_hides_other_tokens_and_validation_the_same(corpus: Path, tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        pl.seed_everything(0)
        recorder = Recorder()
        data = prepared(corpus, tmp_path, batch_size=300)
        # All sequences are one batch: what differs between epochs is the order and what is hidden.
        data.batch_size = len(data.train)
        fit(BertMaskedLM(**TINY), data, tmp_path, max_epochs=2, callbacks=[recorder], num_sanity_val_steps=0)
        runs.append(recorder.seen)
    assert runs[0] == runs[1]
    (_, _, first), (_, _, validation), (_, _, second), (_, _, validation_again) = runs[0]
    assert sorted(map(tuple, first)) != sorted(map(tuple, second))
    assert validation == validation_again
    other = prepared(corpus, tmp_path, seed=1)
    batch = next(iter(other.val_dataloader()))  # type: ignore[arg-type]
    assert not torch.equal(hidden(other, batch), hidden(prepared(corpus, tmp_path), batch))


def test_sequence_is_masked_alike_wherever_it_stands(data: MLMData) -> None:
    numbers, tokens = next(iter(data.val_dataloader()))  # type: ignore[arg-type]
    forward = data.on_before_batch_transfer((numbers, tokens), 0)
    backward = data.on_before_batch_transfer((numbers.flip(0), tokens.flip(0)), 0)
    assert all(torch.equal(one, other.flip(0)) for one, other in zip(forward, backward, strict=True))


def test_settings_out_of_range(corpus: Path, tmp_path: Path) -> None:
    for name, value in (("seq_len", 2), ("mask_share", 0.0), ("held_out", 1.0), ("batch_size", 0)):
        with pytest.raises(ValueError, match=f"{name}={value} must be"):
            prepared(corpus, tmp_path, **{name: value})
    with pytest.raises(
        ValueError, match="source='web' is unknown; choose one of docstrings, python_docs, files, datasets"
    ):
        MLMData("web")  # type: ignore[arg-type]


def test_too_little_text(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size=9999 x 1 processes is more than the \d+ sequences of 16 tokens"):
        prepared(corpus, tmp_path, batch_size=9999).setup("fit")
    with pytest.raises(ValueError, match=r"held_out=0\.01 of the documents make no sequence of 512 tokens: raise it"):
        prepared(corpus, tmp_path, held_out=0.01, seq_len=512).setup("validate")
    assert prepared(corpus, tmp_path, held_out=0.0).val_dataloader() == []


def test_vocabulary_of_the_checkpoint_must_be_the_same(corpus: Path, tmp_path: Path, data: MLMData) -> None:
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="another vocabulary: set `tokenizer` to the checkpoint"):
        prepared(corpus, tmp_path, vocab_size=120).load_state_dict(data.state_dict())

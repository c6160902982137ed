"""Sequences of running text for :class:`~lightning_compress.recipes.BertMaskedLM`."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from . import text
from .cache import cache_folder, make_once
from .loading import check_one_batch_per_process, check_positive, make_loader
from .masking import Masking
from .tokens import CHECKPOINT_KEY, TOKENIZER_FILE, fingerprint, load_tokenizer, special_ids, train_tokenizer

Source = Literal["docstrings", "python_docs", "files", "datasets"]
Batch = tuple[Tensor, Tensor]


class MLMData(LightningDataModule):
    """Text from local files, a saved Hugging Face dataset, Python's documentation or installed packages. No download.

    The text is turned into tokens once, in ``prepare_data``, and kept in a cache; later runs map those files into memory.
    Documents follow one another, a [SEP] between them, and are cut into sequences without padding. Which tokens a
    sequence hides depends on the seed, the epoch and the sequence only, so it is another choice in every epoch, the same on
    any number of ranks, and the same again after a resume; in validation it is always the same.
    """

    def __init__(
        self,
        source: Source = "docstrings",
        root: str | None = None,
        pattern: str = "**/*.txt",
        separator: text.Separator = "blank_line",
        packages: Sequence[str] = ("torch",),
        tokenizer: str | None = None,
        vocab_size: int = 30_522,
        seq_len: int = 128,
        mask_share: float = 0.15,
        held_out: float = 0.01,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        """Check the settings and find the text, without reading it yet.

        Args:
            source: ``"docstrings"`` of installed packages; ``"python_docs"`` is Debian's package python3-doc; ``"files"`` are
                plain UTF-8 files below ``root``; ``"datasets"`` is a folder that Hugging Face's ``Dataset.save_to_disk``
                wrote, with a column "text" (needs ``pip install datasets``).
            root: Folder of ``"files"`` and ``"datasets"``; else the environment variable LC_DATA_ROOT is asked.
            pattern: Which files below ``root``, for ``"files"``.
            separator: What ends a document in ``"files"``: ``"blank_line"`` (BERT's own format) or ``"file"``.
            packages: Names of the packages, for ``"docstrings"``.
            tokenizer: A folder with ``tokenizer.json`` or ``vocab.txt``, or the checkpoint of a model that was trained with
                such data. By default a lower-case WordPiece vocabulary is learnt from the documents to train on.
            vocab_size: Most tokens of a vocabulary that is learnt; 30,522 is BERT's.
            seq_len: Tokens of a sequence, [CLS] and [SEP] included.
            mask_share: Share of the tokens that are to be guessed, in (0, 1).
            held_out: Share of the documents that are validated on, chosen by a hash of their content, in [0, 1). 0: no
                validation.
            batch_size: Sequences per process and step: the total batch is this times the number of processes.
            num_workers: Loader processes beside each training process. Reading mapped memory needs none.
            seed: Chooses what is hidden.
            cache_dir: Where tokenizer and tokens are kept, by default ``~/.cache/lightning-compress``.

        Raises:
            ValueError: If a number is out of range or the source is unknown.
            FileNotFoundError: If the text is not there, with what to put where.
        """
        super().__init__()
        check_positive(batch_size=batch_size, vocab_size=vocab_size)
        if seq_len < 3:
            raise ValueError(f"seq_len={seq_len} must be at least 3: [CLS], a token and [SEP]")
        if not 0 < mask_share < 1:
            raise ValueError(f"mask_share={mask_share} must be in (0, 1)")
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out={held_out} must be a share of the documents, in [0, 1)")
        self.seq_len, self.mask_share, self.held_out = seq_len, mask_share, held_out
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self._vocab_size = vocab_size
        # Looked for here, in the one process that builds everything: later it would fail on each rank separately.
        self.corpus = _find(source, root, pattern, separator, packages)
        self._given = None if tokenizer is None else load_tokenizer(tokenizer)
        origin = vocab_size if self._given is None else fingerprint(self._given)
        self.folder = cache_folder(
            cache_dir, kind="mlm", text=self.corpus.stamp, separator=separator, held_out=held_out, tokenizer=origin
        )

    @override
    def prepare_data(self) -> None:
        """Turn the text into tokens, unless an earlier run has."""
        make_once(self.folder, self._make)

    @override
    def setup(self, stage: str) -> None:
        """Check that there is enough text.

        Raises:
            ValueError: If training has less than one batch per process, or validation less than one sequence.
        """
        if stage == "fit":
            check_one_batch_per_process(self, self.batch_size, len(self.train), f"sequences of {self.seq_len} tokens")
        if self.held_out and not len(self.validation):
            raise ValueError(
                f"held_out={self.held_out} of the documents make no sequence of {self.seq_len} tokens: raise it, or 0 for none"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after ``prepare_data``."""
        return load_tokenizer(str(self.folder))

    @cached_property
    def train(self) -> "Sequences":
        """The sequences to train on, after ``prepare_data``."""
        return self._sequences("train")

    @cached_property
    def validation(self) -> "Sequences":
        """The sequences of the documents held out, after ``prepare_data``."""
        return self._sequences("validation")

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled batches, all of the same size so that every rank takes the same number of steps."""
        return make_loader(self.train, self.batch_size, self.num_workers, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """Return the held-out sequences."""
        return make_loader(self.validation, self.batch_size, self.num_workers) if self.held_out else []

    @override
    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Turn numbers and tokens of sequences into what the model sees and what it has to guess.

        In the training process, since loader processes do not learn which epoch it is.
        """
        numbers, tokens = batch
        training = self.trainer is not None and self.trainer.training
        epoch = self.trainer.current_epoch + 1 if training else 0  # type: ignore[union-attr]
        return self._masking(tokens, [(self.seed, epoch, number) for number in numbers.tolist()])

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the tokenizer: with it, a checkpoint can be used without this text."""
        return {CHECKPOINT_KEY: self.tokenizer.to_str()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that training resumes with the same tokenizer.

        Raises:
            ValueError: If it is another.
        """
        if Tokenizer.from_str(state_dict[CHECKPOINT_KEY]).get_vocab() != self.tokenizer.get_vocab():
            raise ValueError("the checkpoint was trained with another vocabulary: set `tokenizer` to the checkpoint")

    @cached_property
    def _masking(self) -> Masking:
        return Masking(self.tokenizer, self.mask_share)

    def _sequences(self, split: str) -> "Sequences":
        ids = special_ids(self.tokenizer)
        return Sequences(self.folder / f"{split}.tokens", self.seq_len, ids.cls, ids.sep)

    def _make(self, folder: Path) -> None:
        texts = self._documents(held_out=False)
        tokenizer = train_tokenizer(texts, self._vocab_size) if self._given is None else self._given
        tokenizer.save(str(folder / TOKENIZER_FILE))
        about = {
            split: write_tokens(self._documents(held_out), tokenizer, folder / f"{split}.tokens")
            for split, held_out in (("train", False), ("validation", True))
        }
        (folder / "about.json").write_text(json.dumps(about, indent=2))

    def _documents(self, held_out: bool) -> Iterator[str]:
        return (one for one in self.corpus.documents() if text.is_held_out(one, self.held_out) == held_out)


class Sequences(Dataset[tuple[int, Tensor]]):
    """A file of tokens cut into sequences, each item its number and ``int64[seq_len]``; the file is mapped, not read."""

    def __init__(self, path: Path, seq_len: int, cls: int, sep: int) -> None:
        """Open nothing yet.

        Args:
            path: Of what :func:`write_tokens` wrote.
            seq_len: Tokens of a sequence, [CLS] and [SEP] included.
            cls: Number of [CLS].
            sep: Number of [SEP].
        """
        self.path = path
        self.seq_len = seq_len
        self.cls, self.sep = cls, sep

    def __len__(self) -> int:
        return self.path.stat().st_size // np.dtype(np.uint16).itemsize // (self.seq_len - 2)

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        length = self.seq_len - 2
        sequence = np.empty(self.seq_len, dtype=np.int64)
        sequence[0], sequence[-1] = self.cls, self.sep
        sequence[1:-1] = self._tokens[number * length : (number + 1) * length]
        return number, torch.from_numpy(sequence)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}  # pickled, the map is a copy

    @cached_property
    def _tokens(self) -> NDArray[np.uint16]:
        return np.memmap(self.path, dtype=np.uint16, mode="r")


def write_tokens(documents: Iterable[str], tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Write the tokens of documents as uint16, a [SEP] after each document.

    Returns:
        The number of documents and tokens, and the SHA-256 of the text.
    """
    sep = special_ids(tokenizer).sep
    digest = hashlib.sha256()
    counts = {"documents": 0, "tokens": 0}
    documents = iter(documents)
    with path.open("wb") as file:
        while some := list(islice(documents, 256)):  # the tokenizer works on them in parallel
            for document, encoding in zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True):
                digest.update(document.encode())
                tokens = np.array([*encoding.ids, sep], dtype=np.uint16)
                tokens.tofile(file)
                counts["documents"] += 1
                counts["tokens"] += len(tokens)
    return {**counts, "sha256": digest.hexdigest()}


def _find(
    source: Source, root: str | None, pattern: str, separator: text.Separator, packages: Sequence[str]
) -> text.Corpus:
    if source == "docstrings":
        return text.docstrings(packages)
    if source == "python_docs":
        return text.python_docs()
    if source == "files":
        return text.text_files(root, pattern, separator)
    if source == "datasets":
        return text.saved_dataset(root)
    raise ValueError(f"source={source!r} is unknown; choose one of {', '.join(get_args(Source))}")

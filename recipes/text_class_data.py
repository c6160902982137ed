"""Texts with labels for :class:`~lightning_compress.recipes.BertClassifier`."""

import csv
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from pytorch_lightning import LightningDataModule
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from . import text as sources
from .cache import cache_folder, make_once
from .loading import check_files, check_one_batch_per_process, check_positive, find_folder, make_loader
from .tokens import TOKENIZER_FILE, fingerprint, load_tokenizer, padded, special_ids, train_tokenizer

Source = Literal["docstrings", "tsv", "jsonl"]
HELD_OUT = 0.1
"""Share of the modules whose docstrings are validated on."""


class Example(NamedTuple):
    """A text, perhaps the second of a pair, and a label."""

    text: str
    pair: str | None
    label: str


class TextClassData(LightningDataModule):
    """Texts from GLUE-like files, or docstrings whose package is to be guessed. Nothing is ever downloaded."""

    def __init__(
        self,
        source: Source = "docstrings",
        root: str | None = None,
        text_column: str = "sentence",
        pair_column: str | None = None,
        label_column: str = "label",
        packages: Sequence[str] = ("numpy", "pytorch_lightning", "sklearn", "torchmetrics"),
        tokenizer: str | None = None,
        vocab_size: int = 30_522,
        seq_len: int = 128,
        batch_size: int = 32,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        """Check the settings and find the texts, without reading them yet.

        Args:
            source: ``"tsv"`` reads ``root/train.tsv`` and ``root/dev.tsv``, whose first lines name the columns (GLUE's
                format); ``"jsonl"`` reads ``root/train.jsonl`` and ``root/dev.jsonl`` with an object on each line.
                ``"docstrings"`` takes those of installed packages, labelled by package, whole modules held out.
            root: Folder of ``"tsv"`` and ``"jsonl"``; else the environment variable LC_DATA_ROOT is asked.
            text_column: Name of the column or key with the text.
            pair_column: Name of that with a second text, if there are pairs.
            label_column: Name of that with the label: any text; labels are numbered in alphabetical order.
            packages: Names of the packages, for ``"docstrings"``.
            tokenizer: A folder with ``tokenizer.json`` or ``vocab.txt``, or the checkpoint of a pre-trained model. By
                default a vocabulary is learnt from the texts to train on.
            vocab_size: Most tokens of a vocabulary that is learnt.
            seq_len: Longer texts are cut off, [CLS] and [SEP] included.
            batch_size: Texts per process and step: the total batch is this times the number of processes.
            num_workers: Loader processes beside each training process.
            cache_dir: Where a learnt vocabulary and docstrings are kept, by default ``~/.cache/lightning-compress``.

        Raises:
            ValueError: If a number is out of range or the source is unknown.
            FileNotFoundError: If the texts are not there, with what to put where.
        """
        super().__init__()
        check_positive(batch_size=batch_size, vocab_size=vocab_size, seq_len=seq_len)
        if source not in get_args(Source):
            raise ValueError(f"source={source!r} is unknown; choose one of {', '.join(get_args(Source))}")
        self.source, self.packages = source, packages
        self.columns = (text_column, pair_column, label_column)
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        self._vocab_size = vocab_size
        # Looked for here, in the one process that builds everything: later it would fail on each rank separately.
        if source == "docstrings":
            self.columns, stamp = ("text", None, "label"), sources.docstrings(packages).stamp
        else:
            names = (f"train.{source}", f"dev.{source}")
            self._root = find_folder(root, " and ".join(names))
            check_files(self._root, *names)
            stamp = sources.stamp(self._root / name for name in names)
        self._given = None if tokenizer is None else load_tokenizer(tokenizer)
        origin = vocab_size if self._given is None else fingerprint(self._given)
        self.folder = cache_folder(cache_dir, kind="class", text=stamp, columns=self.columns, tokenizer=origin)
        if source == "docstrings":
            self._root = self.folder

    @override
    def prepare_data(self) -> None:
        """Collect docstrings and learn a vocabulary, unless an earlier run has."""
        make_once(self.folder, self._make)

    @override
    def setup(self, stage: str) -> None:
        """Read the texts.

        Raises:
            ValueError: If a label or a column is missing, or training has less than one batch per process.
        """
        unknown = sorted({one.label for one in self.validation} - set(self.labels))
        if unknown:
            raise ValueError(f"labels in dev that are not in train: {', '.join(unknown[:10])}")
        if stage == "fit":
            check_one_batch_per_process(self, self.batch_size, len(self.train), "texts")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after ``prepare_data``."""
        return load_tokenizer(str(self.folder))

    @cached_property
    def train(self) -> list[Example]:
        """The texts to train on, after ``prepare_data``."""
        return self._read(self._root, "train")

    @cached_property
    def validation(self) -> list[Example]:
        """The texts to validate on, after ``prepare_data``."""
        return self._read(self._root, "dev")

    @cached_property
    def labels(self) -> dict[str, int]:
        """The number of every label."""
        return {label: number for number, label in enumerate(sorted({one.label for one in self.train}))}

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.labels)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches, all of the same size so that every rank takes the same number of steps."""
        return self._loader(self.train, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Return the texts to validate on."""
        return self._loader(self.validation)

    def _loader(self, examples: list[Example], **options: Any) -> DataLoader[Any]:
        return make_loader(examples, self.batch_size, self.num_workers, collate_fn=self._batch, **options)  # type: ignore[arg-type]

    def _batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        texts = [one.text if one.pair is None else (one.text, one.pair) for one in examples]
        codes = self._cutting_tokenizer.encode_batch(texts)
        inputs = padded(
            [code.ids for code in codes], [code.type_ids for code in codes], special_ids(self.tokenizer).pad
        )
        return {**inputs, "labels": torch.tensor([self.labels[one.label] for one in examples])}

    @cached_property
    def _cutting_tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.enable_truncation(self.seq_len)
        return tokenizer

    def _make(self, folder: Path) -> None:
        root = self._root
        if self.source == "docstrings":
            root = folder
            write_docstrings(self.packages, folder)
        texts = (text for one in self._read(root, "train") for text in (one.text, one.pair) if text is not None)
        tokenizer = train_tokenizer(texts, self._vocab_size) if self._given is None else self._given
        tokenizer.save(str(folder / TOKENIZER_FILE))

    def _read(self, root: Path, split: str) -> list[Example]:
        kind = "tsv" if self.source == "tsv" else "jsonl"
        path = root / f"{split}.{kind}"
        rows = read_tsv(path) if kind == "tsv" else read_jsonl(path)
        text, pair, label = self.columns
        examples = []
        for number, row in rows:
            try:
                one = Example(row[text], None if pair is None else row[pair], str(row[label]))
            except KeyError as error:
                raise ValueError(
                    f"{path} has no column {error}: set text_column, pair_column and label_column"
                ) from None
            empty = [column for column in self.columns if column is not None and row[column] is None]
            if empty or not isinstance(one.text, str) or not isinstance(one.pair, str | None):
                raise ValueError(f"{path}, line {number}: no text in column {(*empty, text)[0]!r}")
            examples.append(one)
        return examples


def read_tsv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read lines of tab-separated columns; the first line names them. Quotes are characters like others, as in GLUE.

    Yields:
        The number of each line and its columns; None in those that it lacks.
    """
    reader = csv.DictReader(sources.lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in reader:
        yield reader.line_num, row


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the number of each line and the JSON object on it."""
    for number, line in enumerate(sources.lines(path), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: no JSON object")
        yield number, row


def write_docstrings(packages: Sequence[str], folder: Path) -> None:
    """Write the docstrings of packages as ``train.jsonl`` and ``dev.jsonl`` with the keys "text" and "label"."""
    lines: dict[bool, list[str]] = {False: [], True: []}
    for package in packages:
        for texts in sources.module_docstrings(package):
            held_out = sources.is_held_out("\n\n".join(texts), HELD_OUT)
            lines[held_out] += [json.dumps({"text": text, "label": package}) for text in texts]
    (folder / "train.jsonl").write_text("\n".join(lines[False]) + "\n")
    (folder / "dev.jsonl").write_text("\n".join(lines[True]) + "\n")

"""What is learned: a network, its data, and the same batches for every method of a seed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_compress.recipes import ImageData
from lightning_compress.recipes.data import Source
from lightning_compress.recipes.images import to_network_input
from lightning_compress.recipes.networks import build_network

Batch = tuple[Tensor, Tensor]
Documents = list[tuple[str, str]]


class SmallVGG(nn.Module):
    """A VGG in small: two convolutions, and 97 % of 206,922 parameters in one fully connected tensor; dropout, no norm.

    It takes the first of the three equal channels that the recipes make of grey images.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images [batch, 3, 28, 28]."""
        logits: Tensor = self.classifier(self.features(images[:, :1]).flatten(1))
        return logits


def resnet8(num_classes: int) -> nn.Module:
    """The recipes' ResNet-8 of width 16."""
    return build_network("resnet8", num_classes)


@dataclass(eq=False)
class Images:
    """A network on small grey images.

    Initial weights and batches depend on the seed alone, so the runs of one seed are paired. So does dropout, as nothing else
    draws from torch's global generator.

    Attributes:
        name: In the results.
        network: From the number of classes.
        rates: Peak learning rate by optimizer; a method's name before it, where the search has found another for it.
        source: Of ``ImageData``.
        pixels: Side of the network's input.
    """

    name: str
    network: Callable[[int], nn.Module]
    rates: dict[str, float]
    source: Source = "fashion_mnist"
    pixels: int = 28
    batch_size: int = 32
    metric: ClassVar[str] = "test_accuracy"

    @cached_property
    def _data(self) -> ImageData:
        return ImageData(self.source)

    def model(self, seed: int) -> nn.Module:
        """A network with the seed's initial weights."""
        torch.manual_seed(seed)
        return self.network(self._data.num_classes)

    def batches(self, seed: int, steps: int, workers: int, batch_size: int) -> Iterator[list[Batch]]:
        """For every step one batch per worker: epochs over shuffled training images, without what is left over."""
        images, labels = self._data.sets.train.tensors  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(seed)
        per_step = workers * batch_size
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < per_step:
                order = torch.randperm(len(images), generator=generator)
            taken, order = order[:per_step], order[per_step:]
            yield [(self._input(images[part]), labels[part]) for part in taken.split(batch_size)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of a batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy in per cent and mean loss on all test images; batch norm uses the running statistics of worker 0."""
        images, labels = self._data.sets.held_out.tensors  # type: ignore[attr-defined]
        training = model.training
        model.eval()
        correct, loss = 0, 0.0
        for part, wanted in zip(images.split(500), labels.split(500), strict=True):
            logits = model(self._input(part))
            correct += int((logits.argmax(1) == wanted).sum())
            loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
        model.train(training)
        return 100 * correct / len(labels), loss / len(labels)

    def _input(self, images: Tensor) -> Tensor:
        return to_network_input(images, self._data.sets, self.pixels, torch.float32)


PYTHON_DOCS = Path("/usr/share/doc/python3-doc/html/_sources")


def python_docs() -> Documents:
    """Python's documentation, 11 MB of English and code, by file name.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    files = sorted(PYTHON_DOCS.rglob("*.rst.txt"))
    if not files:
        raise FileNotFoundError(f"{PYTHON_DOCS} has no *.rst.txt: apt-get install python3-doc puts them there.")
    return [(str(file.relative_to(PYTHON_DOCS)), file.read_text(errors="replace")) for file in files]


def pydoc_topics() -> Documents:
    """The half megabyte of it that comes inside Python, by topic."""
    from pydoc_data.topics import topics

    return sorted(topics.items())


@dataclass(eq=False)
class MaskedWords:
    """A tiny BERT (2 layers of 128) that learns masked words.

    Words, numbers and signs are tokens; a tenth of the documents, chosen by the hash of their name, is held out. Initial
    weights, sequences and masks depend on the seed alone, so the runs of one seed are paired. No dropout: the runs are short.

    Attributes:
        name: In the results.
        documents: Reads the names and texts.
        rates: As in ``Images``.
    """

    name: str
    documents: Callable[[], Documents]
    rates: dict[str, float]
    metric: ClassVar[str] = "masked_word_accuracy"
    batch_size: ClassVar[int] = 8
    words: ClassVar[int] = 4096
    length: ClassVar[int] = 64

    def model(self, seed: int) -> nn.Module:
        """A network with the seed's initial weights."""
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(seed)
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(
            BertConfig(vocab_size=self.words, max_position_embeddings=self.length, **sizes, **dropout)
        )

    def batches(self, seed: int, steps: int, workers: int, batch_size: int) -> Iterator[list[Batch]]:
        """For every step one batch per worker: sequences from random places of the training files."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield [self._batch(self._tokens[0], batch_size, generator) for _ in range(workers)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of the words of a batch that are asked for."""
        return F.cross_entropy(*self._asked(model, batch))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Share in per cent of masked words that are guessed, and mean loss, on 1024 held-out sequences."""
        generator = torch.Generator().manual_seed(0)
        correct, count, loss = 0, 0, 0.0
        for _ in range(32):
            logits, wanted = self._asked(model, self._batch(self._tokens[1], 32, generator))
            correct += int((logits.argmax(1) == wanted).sum())
            loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
        return 100 * correct / count, loss / count

    @staticmethod
    def _asked(model: Any, batch: Batch) -> Batch:
        """Logits and words at the places that are asked for; logits of all others would be most of a step's cost."""
        tokens, labels = batch
        asked = labels >= 0
        return model.cls(model.bert(input_ids=tokens).last_hidden_state[asked]), labels[asked]

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """The training and the held-out texts as numbers of words; 0 is a rare word, 1 the mask."""
        texts: tuple[list[str], list[str]] = ([], [])
        for name, text in self.documents():
            held_out = sha256(name.encode()).digest()[0] % 10 == 0
            texts[held_out].extend(re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower()))
        common = sorted(Counter(texts[0]).items(), key=lambda item: (-item[1], item[0]))[: self.words - 2]
        number = {word: i for i, (word, _) in enumerate(common, start=2)}
        train, held_out = (torch.tensor([number.get(word, 0) for word in text]) for text in texts)
        return train, held_out

    def _batch(self, text: Tensor, size: int, generator: torch.Generator) -> Batch:
        """BERT's masking: of 15 % of the words, 80 % are masked, 10 % replaced, 10 % left."""
        starts = torch.randint(len(text) - self.length, (size, 1), generator=generator)
        labels = text[starts + torch.arange(self.length)]
        drawn, random = (torch.rand(labels.shape, generator=generator) for _ in range(2))
        others = torch.randint(2, self.words, labels.shape, generator=generator)
        tokens = torch.where(random < 0.8, 1, torch.where(random < 0.9, others, labels))
        asked = drawn < 0.15
        return torch.where(asked, tokens, labels), torch.where(asked, labels, -100)


Task = Images | MaskedWords
_BERT_RATES = {"lans": 0.01, "adamw": 7e-4}
"""Found by the table ``clan_lr``: LANS is best at one rate dense and compressed; with 1 bit AdamW learns at no higher one,
where dense gains a quarter of a point."""
EMBEDDED: tuple[Task, ...] = (
    Images("resnet8_digits", resnet8, {"sgd": 0.1}, "digits", pixels=8),
    Images("vgg_digits", SmallVGG, {"sgd": 0.03}, "digits"),
    MaskedWords("tiny_bert_pydoc", pydoc_topics, _BERT_RATES),
)
"""Their data comes inside scikit-learn and Python; they are too small to tell methods apart that are close."""
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Images("resnet8_fashion_mnist", resnet8, {"sgd": 0.1}),
        Images("vgg_fashion_mnist", SmallVGG, {"sgd": 0.1, "dgc_0.01": 0.3}),  # by the table rates_vgg
        MaskedWords("tiny_bert_python_docs", python_docs, _BERT_RATES),
        *EMBEDDED,
    )
}

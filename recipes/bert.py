"""Training BERT: masked-language-model pre-training, and fine-tuning for classification and for answering questions."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import SQuAD
from typing_extensions import override

from .loading import check_covers_classes
from .masking import IGNORED
from .optimization import (
    AdaptiveOptimizer,
    adaptive_optimizer,
    check_adaptive_optimizer,
    check_warmup,
    parameter_groups,
    scheduled,
    warmup_linear,
)
from .squad import Question, answers
from .tokens import checkpoint_tokenizer

Size = Literal["base", "tiny"]
SIZES: dict[str, dict[str, Any]] = {
    "base": {},  # transformers' default: 12 layers of width 768
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
}
NEW_IN_FINE_TUNING = ("bert.pooler.",)
"""Parts of the encoder that masked-language-model training does not have."""


class Bert(LightningModule):
    """What all three tasks have in common: the network's size, where its weights come from, optimizer and schedule."""

    def __init__(
        self,
        architecture: str,
        size: Size,
        vocab_size: int,
        dropout: float,
        lr: float,
        weight_decay: float,
        warmup: float,
        optimizer: AdaptiveOptimizer,
        init_from: str | None,
        **config: Any,
    ) -> None:
        """Build the network with random weights.

        Args:
            architecture: Name of the class in transformers.
            size: See the tasks, as for all that follow.
            vocab_size: Tokens that the embedding has.
            dropout: Of hidden values and of attention.
            lr: Highest learning rate.
            weight_decay: Of weights.
            warmup: Share of all steps.
            optimizer: By name.
            init_from: Where pre-trained weights are.
            config: More settings of transformers' BertConfig.

        Raises:
            ValueError: If ``warmup`` is out of range, or the size or the optimizer is unknown.
        """
        super().__init__()
        check_warmup(warmup)
        check_adaptive_optimizer(optimizer)
        if size not in SIZES:
            raise ValueError(f"size={size!r} is unknown; choose one of {', '.join(get_args(Size))}")
        import transformers  # here, since it takes seconds that the other recipes need not pay

        settings = transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **SIZES[size],
            **config,
        )
        self.network: Any = getattr(transformers, architecture)(settings)
        self.lr, self.weight_decay, self.warmup, self.optimizer_name = lr, weight_decay, warmup, optimizer
        self.init_from = init_from

    @override
    def setup(self, stage: str) -> None:
        """Check that the network fits the data, and load the pre-trained weights if training begins.

        Raises:
            ValueError: If the vocabulary or the sequences are larger than the embedding, or the weights do not fit.
            FileNotFoundError: If there are no such weights.
        """
        data = getattr(self.trainer, "datamodule", None)
        tokenizer: Tokenizer | None = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            # Either would otherwise be an index error inside the embedding, on a GPU a device assert.
            words, positions = self.network.config.vocab_size, self.network.config.max_position_embeddings
            if tokenizer.get_vocab_size() > words:
                raise ValueError(
                    f"vocab_size={words} of the model is too small: the data needs {tokenizer.get_vocab_size()}"
                )
            if data.seq_len > positions:  # type: ignore[union-attr]
                raise ValueError(f"seq_len of the data must be at most {positions}, the positions that the model knows")
        if stage == "fit" and self.init_from is not None:
            load_pretrained(self.network, self.init_from, tokenizer)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over two parameter groups and its schedule by steps."""
        optimizer = adaptive_optimizer(self.optimizer_name, parameter_groups(self, self.weight_decay), self.lr)
        return scheduled(self, optimizer, self.warmup, warmup_linear)


class BertMaskedLM(Bert):
    """BERT that learns to guess hidden tokens, without the prediction of the next sentence."""

    def __init__(
        self,
        size: Size = "base",
        vocab_size: int = 30_522,
        dropout: float = 0.1,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup: float = 0.0125,
        optimizer: AdaptiveOptimizer = "adamw",
        init_from: str | None = None,
    ) -> None:
        """Build transformers' BertForMaskedLM with random weights.

        Args:
            size: ``"base"`` has 12 layers of width 768 (110 M parameters), ``"tiny"`` 2 of width 128 for trying out.
            vocab_size: Tokens that the embedding has. It must cover those of the data.
            dropout: Share of hidden values and of attention that is dropped in training.
            lr: Highest learning rate, reached at the end of the warm-up. Scale it with the total batch size.
            weight_decay: Decoupled decay of weights. Norms and biases have none.
            warmup: Share of all optimizer steps in which the learning rate rises from zero, in [0, 1); then it falls to
                zero, both linearly.
            optimizer: By name; see ``recipes/optimization.py``.
            init_from: Weights to begin with: the checkpoint of an earlier phase, or a folder of transformers'
                ``save_pretrained``.
        """
        super().__init__("BertForMaskedLM", size, vocab_size, dropout, lr, weight_decay, warmup, optimizer, init_from)
        self.save_hyperparameters()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the hidden tokens of one batch of this rank."""
        loss, _ = self._guess(*batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and share of right guesses of the held-out text."""
        loss, right = self._guess(*batch)
        self.log("val/loss", loss, sync_dist=True, prog_bar=True)
        self.log("val/acc", right, sync_dist=True)

    def _guess(self, shown: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and share of right guesses; the vocabulary's logits are made for hidden tokens only, a seventh of all."""
        hidden = labels != IGNORED
        logits = self.network.cls(self.network.bert(input_ids=shown).last_hidden_state[hidden])
        return F.cross_entropy(logits, labels[hidden]), (logits.argmax(dim=1) == labels[hidden]).float().mean()


class BertClassifier(Bert):
    """BERT that sorts texts, or pairs of texts, into classes."""

    def __init__(
        self,
        num_classes: int = 2,
        size: Size = "base",
        vocab_size: int = 30_522,
        dropout: float = 0.1,
        lr: float = 2e-5,
        weight_decay: float = 0.01,
        warmup: float = 0.1,
        optimizer: AdaptiveOptimizer = "adamw",
        init_from: str | None = None,
    ) -> None:
        """Build transformers' BertForSequenceClassification with random weights.

        Args:
            num_classes: Number of labels. It must cover those of the data.
            size: As in :class:`BertMaskedLM`, as the following.
            vocab_size: Tokens that the embedding has. It must cover those of the data.
            dropout: Share of hidden values and of attention that is dropped in training.
            lr: Highest learning rate.
            weight_decay: Decoupled decay of weights. Norms and biases have none.
            warmup: Share of all optimizer steps in which the learning rate rises, in [0, 1); then it falls to zero.
            optimizer: By name; see ``recipes/optimization.py``.
            init_from: Weights to begin with: a checkpoint of :class:`BertMaskedLM`, or a folder of transformers'
                ``save_pretrained``. The head begins at random.
        """
        task = "BertForSequenceClassification"
        super().__init__(
            task, size, vocab_size, dropout, lr, weight_decay, warmup, optimizer, init_from, num_labels=num_classes
        )
        self.save_hyperparameters()
        self.num_classes = num_classes
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def setup(self, stage: str) -> None:
        """Check that the head is wide enough for the data, besides the checks of all."""
        check_covers_classes(self, self.num_classes)
        super().setup(stage)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of one batch of this rank."""
        loss: Tensor = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of the validation data."""
        output = self.network(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.log("val/loss", output.loss, sync_dist=True)
        self.log("val/acc", self.accuracy, prog_bar=True)


class BertQuestionAnswering(Bert):
    """BERT that marks the answer to a question in a text."""

    def __init__(
        self,
        size: Size = "base",
        vocab_size: int = 30_522,
        dropout: float = 0.1,
        lr: float = 3e-5,
        weight_decay: float = 0.01,
        warmup: float = 0.1,
        optimizer: AdaptiveOptimizer = "adamw",
        init_from: str | None = None,
        max_answer: int = 30,
    ) -> None:
        """Build transformers' BertForQuestionAnswering with random weights.

        Args:
            size: As in :class:`BertMaskedLM`, as the following.
            vocab_size: Tokens that the embedding has. It must cover those of the data.
            dropout: Share of hidden values and of attention that is dropped in training.
            lr: Highest learning rate.
            weight_decay: Decoupled decay of weights. Norms and biases have none.
            warmup: Share of all optimizer steps in which the learning rate rises, in [0, 1); then it falls to zero.
            optimizer: By name; see ``recipes/optimization.py``.
            init_from: Weights to begin with: a checkpoint of :class:`BertMaskedLM`, or a folder of transformers'
                ``save_pretrained``. The head begins at random.
            max_answer: Most tokens of an answer.
        """
        task = "BertForQuestionAnswering"
        super().__init__(task, size, vocab_size, dropout, lr, weight_decay, warmup, optimizer, init_from)
        self.save_hyperparameters()
        self.max_answer = max_answer
        self.score = SQuAD()

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the answers' first and last tokens of one batch of this rank."""
        loss: Tensor = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[dict[str, Tensor], list[Question]], batch_idx: int) -> None:
        """Log the share of exact answers and the overlap (F1) with the right ones, in per cent."""
        windows, questions = batch
        output = self.network(**windows)
        texts = answers(output.start_logits, output.end_logits, questions, self.max_answer)
        guesses = [{"id": one.id, "prediction_text": text} for one, text in zip(questions, texts, strict=True)]
        self.score.update(guesses, [{"id": one.id, "answers": one.right_answers()} for one in questions])

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the scores over all ranks."""
        scores = self.score.compute()
        self.score.reset()
        self.log("val/exact", scores["exact_match"], sync_dist=True)  # the same on all ranks; else Lightning warns
        self.log("val/f1", scores["f1"], sync_dist=True, prog_bar=True)


def load_pretrained(network: nn.Module, source: str, tokenizer: Tokenizer | None) -> None:
    """Copy pre-trained weights into a network; a head that was not trained keeps its random ones.

    Args:
        network: One of transformers' BERT models.
        source: A checkpoint of this file's models, or a folder of transformers' ``save_pretrained``.
        tokenizer: Of the data, to be compared with that of the checkpoint.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the encoder has other shapes, or the data another vocabulary.
    """
    weights = _read_folder(network, source) if Path(source).is_dir() else _read_checkpoint(source, tokenizer)
    own = network.state_dict()
    unfit = [
        f"{name} {list(value.shape)} there, {list(own[name].shape)} here"
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    unfit += [
        f"{name} not there"
        for name in own
        if name.startswith("bert.") and name not in weights and not name.startswith(NEW_IN_FINE_TUNING)
    ]
    if unfit:
        raise ValueError(f"init_from={source!r} does not fit; set size and vocab_size as they are there: {unfit[0]}")
    network.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=False)


def _read_checkpoint(source: str, tokenizer: Tokenizer | None) -> dict[str, Tensor]:
    if not Path(source).is_file():
        raise FileNotFoundError(f"init_from={source!r} is neither a checkpoint nor a folder of save_pretrained")
    checkpoint = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    theirs = checkpoint_tokenizer(checkpoint)
    if tokenizer and theirs and Tokenizer.from_str(theirs).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the data's vocabulary is not that of init_from: set the data's `tokenizer` to {source!r} too"
        )
    return {name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items()}


def _read_folder(network: Any, source: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = (
        type(network).from_pretrained(source, config=network.config, local_files_only=True).state_dict()
    )
    return weights

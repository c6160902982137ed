"""The trainings whose steps are timed: real networks at full size on random data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

Batch = tuple[Tensor, Tensor]


class Workload(ABC):
    """A model, its input, its loss and its optimizer.

    The learning rate is zero: the optimizer does all its work, but the network stays where it is. So every method
    computes the same thing, and one that leaves ranks different (noop) can take turns with the others on one model.

    Attributes:
        description: Model, batch and input size, for a table's title.
        optimizer_states: Values that the optimizer keeps per parameter.
    """

    description: ClassVar[str]
    optimizer_states: ClassVar[int] = 1

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with random weights."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """A random input and its labels."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, as a training would compute it."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The usual optimizer for this model."""
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=1e-4)


class ImageWorkload(Workload):
    """A torchvision classifier of 1000 classes."""

    architecture: ClassVar[str]
    pixels: ClassVar[int]

    @override
    def model(self) -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(self.architecture, weights=None, num_classes=1000)
        return model

    @override
    def batch(self, generator: torch.Generator) -> Batch:
        images = torch.randn(16, 3, self.pixels, self.pixels, generator=generator)
        return images, torch.randint(1000, (16,), generator=generator)


class ResNet50(ImageWorkload):
    """ResNet-50."""

    description = "ResNet-50 (25.6 M parameters), 16 random images of 96 x 96, SGD with momentum"
    architecture, pixels = "resnet50", 96


class VGG16(ImageWorkload):
    """VGG-16."""

    description = "VGG-16 (138 M parameters), 16 random images of 64 x 64, SGD with momentum"
    architecture, pixels = "vgg16", 64


class BERTBase(Workload):
    """BERT-base, masked language modelling."""

    description = "BERT-base MLM (110 M parameters), 8 random sequences of 128 tokens, AdamW"
    optimizer_states = 2
    _vocabulary = 30522

    @override
    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig(vocab_size=self._vocabulary))

    @override
    def batch(self, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self._vocabulary, (8, 128), generator=generator)
        masked = torch.rand(8, 128, generator=generator) < 0.15
        return tokens, torch.where(masked, tokens, -100)

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss

    @override
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.0)


class Tiny(Workload):
    """A perceptron of two layers with a norm, for trying out the harness."""

    description = "a small perceptron (0.27 M parameters) for trying out the harness"

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256))

    @override
    def batch(self, generator: torch.Generator) -> Batch:
        return torch.randn(16, 256, generator=generator), torch.randint(256, (16,), generator=generator)


WORKLOADS: dict[str, Workload] = {"resnet50": ResNet50(), "vgg16": VGG16(), "bert_base": BERTBase(), "tiny": Tiny()}


def gradient_nbytes(workload: Workload) -> int:
    """Bytes of the model's gradients, without allocating it."""
    with torch.device("meta"):
        model = workload.model()
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

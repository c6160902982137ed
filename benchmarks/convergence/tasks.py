"""What is learned: a network, its data, and the same batches for every method of a seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_compress.recipes import ImageData
from lightning_compress.recipes.images import to_network_input
from lightning_compress.recipes.networks import build_network

Batch = tuple[Tensor, Tensor]


class FashionMNIST:
    """ResNet-8 (width 16) on Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels.

    Initial weights and batches depend on the seed alone, so the runs of one seed are paired.
    """

    name: ClassVar[str] = "resnet8_fashion_mnist"
    metric: ClassVar[str] = "test_accuracy"
    pixels: ClassVar[int] = 28

    @cached_property
    def _data(self) -> ImageData:
        return ImageData("fashion_mnist")

    def model(self, seed: int) -> nn.Module:
        """A network with the seed's initial weights."""
        torch.manual_seed(seed)
        return build_network("resnet8", self._data.num_classes)

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


TASKS = {task.name: task for task in (FashionMNIST(),)}

"""Training an image classifier: the model side of the vision recipes."""

from typing import Literal, get_args

from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_compress.optim import DGCSGD

from .loading import check_covers_classes
from .networks import Architecture, build_network
from .optimization import check_warmup, parameter_groups, scheduled, warmup_cosine

OptimizerName = Literal["sgd", "dgc_sgd"]
Batch = tuple[Tensor, Tensor]


class ImageClassifier(LightningModule):
    """A torchvision network with SGD, a linear warm-up and a cosine decay to zero, both counted in optimizer steps."""

    def __init__(
        self,
        architecture: Architecture = "resnet50",
        num_classes: int = 10,
        lr: float = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 1e-4,
        warmup: float = 0.05,
        label_smoothing: float = 0.0,
        optimizer: OptimizerName = "sgd",
    ) -> None:
        """Build the network with random weights.

        Args:
            architecture: Which network; see ``recipes/networks.py``.
            num_classes: Number of labels. It must cover those of the data.
            lr: Highest learning rate, reached at the end of the warm-up. Scale it with the total batch size.
            momentum: Momentum of SGD.
            nesterov: Use Nesterov's form of the momentum.
            weight_decay: L2 penalty on the weights of convolutions and linear layers. Norms and biases have none.
            warmup: Share of all optimizer steps in which the learning rate rises from zero, in [0, 1).
            label_smoothing: Share of the target spread evenly over all classes, in training only.
            optimizer: ``"sgd"`` is torch's; ``"dgc_sgd"`` is ``lightning_compress.optim.DGCSGD``, which Deep Gradient
                Compression needs, since its exchange has applied the momentum already.

        Raises:
            ValueError: If ``warmup`` is out of range or the optimizer is unknown.
        """
        super().__init__()
        check_warmup(warmup)
        if optimizer not in get_args(OptimizerName):
            raise ValueError(f"optimizer={optimizer!r} is unknown; choose one of {', '.join(get_args(OptimizerName))}")
        self.save_hyperparameters()
        self.network = build_network(architecture, num_classes)
        self.num_classes = num_classes
        self.lr, self.momentum, self.nesterov, self.weight_decay = lr, momentum, nesterov, weight_decay
        self.warmup, self.optimizer_name = warmup, optimizer
        self.label_smoothing = label_smoothing
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Map ``float[batch, 3, height, width]`` to logits ``float[batch, num_classes]``."""
        logits: Tensor = self.network(images)
        return logits

    @override
    def setup(self, stage: str) -> None:
        """Check that the head is wide enough for the data.

        Raises:
            ValueError: If the data module says that it has more classes than this model.
        """
        check_covers_classes(self, self.num_classes)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of one batch of this rank."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        # This rank's own loss: averaging it over ranks would cost one more collective in every step.
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of the validation data."""
        self._evaluate(batch, "val", self.val_accuracy)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of the test data."""
        self._evaluate(batch, "test", self.test_accuracy)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely class of each image, ``int64[batch]``."""
        images, _ = batch
        classes: Tensor = self(images).argmax(dim=1)
        return classes

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD over two parameter groups and its schedule by steps."""
        kind: type[Optimizer] = DGCSGD if self.optimizer_name == "dgc_sgd" else SGD
        groups = parameter_groups(self, self.weight_decay)
        optimizer = kind(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)  # type: ignore[call-arg]
        return scheduled(self, optimizer, self.warmup, warmup_cosine)

    def _evaluate(self, batch: Batch, split: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        # torchmetrics gathers its own counts; the mean loss is once per epoch, so sync_dist is cheap here.
        self.log(f"{split}/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log(f"{split}/acc", accuracy, prog_bar=True)

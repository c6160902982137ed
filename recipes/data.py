"""Batches of images for :class:`~lightning_compress.recipes.ImageClassifier`: the data side of the vision recipes."""

from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from . import images as sources
from .loading import check_one_batch_per_process, check_positive, make_loader

Source = Literal["digits", "fashion_mnist", "imagefolder", "fake"]
Batch = tuple[Tensor, Tensor]


class ImageData(LightningDataModule):
    """Images from scikit-learn's digits, Fashion-MNIST, a folder tree or noise. Nothing is ever downloaded.

    Batches leave the loader as bytes and are resized and normalised on the device, in the model's own precision:
    a quarter of the memory traffic of float32. Validation, test and prediction read the same held-out images.
    """

    def __init__(
        self,
        source: Source = "digits",
        root: str | None = None,
        image_size: int = 32,
        batch_size: int = 16,
        num_workers: int = 0,
        train_limit: int | None = None,
        seed: int = 0,
    ) -> None:
        """Check the settings and find the data, without reading it yet.

        Args:
            source: ``"digits"`` is embedded (scikit-learn's 1,797 digits). ``"fashion_mnist"`` is read from its four
                idx files. ``"imagefolder"`` reads ``root/train/<class>/*`` and ``root/val/<class>/*`` (ImageNet).
                ``"fake"`` is noise, for measuring throughput.
            root: Folder of the data, for ``"fashion_mnist"`` and ``"imagefolder"``; else the environment variable
                LC_DATA_ROOT is asked.
            image_size: Side of the images that the model sees, in pixels.
            batch_size: Images per process and step: the total batch is this times the number of processes.
            num_workers: Loader processes beside each training process. 0 is right for the two small sets.
            train_limit: Train on this many images only, drawn at random.
            seed: Chooses the images held out of ``"digits"``, those of ``train_limit`` and the noise of ``"fake"``.

        Raises:
            ValueError: If a number is not positive or the source is unknown.
            FileNotFoundError: If the data is not there, with what to put where.
        """
        super().__init__()
        check_positive(image_size=image_size, batch_size=batch_size, train_limit=train_limit)
        self.source = source
        self.image_size = image_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_limit = train_limit
        self.seed = seed
        # Looked for here, in the one process that builds everything: later it would fail on each rank separately.
        self.folder = _find(source, root)
        self._sets: sources.ImageSets | None = None

    @property
    def sets(self) -> sources.ImageSets:
        """The images, read at the first use."""
        if self._sets is None:
            self._sets = self._load()
        return self._sets

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return self.sets.num_classes

    @override
    def setup(self, stage: str) -> None:
        """Read the images.

        Raises:
            ValueError: If training has less than one batch per process.
        """
        if stage == "fit":
            check_one_batch_per_process(self, self.batch_size, len(self.sets.train), "images")  # type: ignore[arg-type]

    @override
    def train_dataloader(self) -> DataLoader[sources.Sample]:
        """Return shuffled batches, all of the same size so that every rank takes the same number of steps."""
        return self._loader(self.sets.train, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[sources.Sample]:
        """Return the held-out images."""
        return self._loader(self.sets.held_out)

    @override
    def test_dataloader(self) -> DataLoader[sources.Sample]:
        """Return the held-out images."""
        return self._loader(self.sets.held_out)

    @override
    def predict_dataloader(self) -> DataLoader[sources.Sample]:
        """Return the held-out images."""
        return self._loader(self.sets.held_out)

    @override
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Turn ``uint8[batch, 1 or 3, h, w]`` into normalised ``float[batch, 3, image_size, image_size]``."""
        images, labels = batch
        # Lightning converts a batch to the precision of the model before the transfer, when ours is still bytes.
        model = getattr(self.trainer, "lightning_module", None)
        dtype = torch.float32 if model is None else model.dtype
        return sources.to_network_input(images, self.sets, self.image_size, dtype), labels

    def _load(self) -> sources.ImageSets:
        if self.source == "digits":
            sets = sources.digits(self.seed)
        elif self.source == "fake":
            sets = sources.fake(self.image_size, self.seed)
        elif self.source == "fashion_mnist":
            sets = sources.fashion_mnist(self._existing_folder())
        else:
            sets = sources.image_folder(self._existing_folder(), self.image_size)
        return sets if self.train_limit is None else sets._replace(train=self._limited(sets.train, self.train_limit))

    def _existing_folder(self) -> Path:
        assert self.folder is not None  # set in __init__ for every source that has one
        return self.folder

    def _limited(self, images: Dataset[sources.Sample], limit: int) -> Subset[sources.Sample]:
        # At random, since a folder tree is sorted by class.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))  # type: ignore[arg-type]
        return Subset(images, order[:limit].tolist())

    def _loader(self, images: Dataset[sources.Sample], **options: Any) -> DataLoader[sources.Sample]:
        return make_loader(images, self.batch_size, self.num_workers, **options)


def _find(source: Source, root: str | None) -> Path | None:
    """The folder of a source that has one."""
    if source == "fashion_mnist":
        return sources.find_fashion_mnist(root)
    if source == "imagefolder":
        return sources.find_image_folder(root)
    if source in ("digits", "fake"):
        return None
    raise ValueError(f"source={source!r} is unknown; choose one of digits, fashion_mnist, imagefolder, fake")

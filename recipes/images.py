"""Where the images come from: one function per source, none of which ever downloads."""

import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2 as transforms

from .loading import DATA_ROOT_VARIABLE, find_folder

FASHION_MNIST_PACKAGE = "dataset-fashion-mnist"
FASHION_MNIST_SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where that Debian package puts it
FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

Sample = tuple[Any, ...]  # (image, label); the label is an int or a 0-dimensional tensor


class ImageSets(NamedTuple):
    """The images of one source, each item ``(uint8[channels, height, width], label)``.

    Attributes:
        train: Images to train on.
        held_out: Images to validate and test on.
        num_classes: Number of labels, which are 0 to ``num_classes - 1``.
        mean: Mean of each channel of the training images, scaled to [0, 1]; one value serves all channels.
        std: Their standard deviation.
    """

    train: Dataset[Sample]
    held_out: Dataset[Sample]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def digits(seed: int, held_out: int = 500) -> ImageSets:
    """Return scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which come inside its package.

    Args:
        seed: Chooses which images are held out.
        held_out: How many.
    """
    from sklearn.datasets import load_digits  # imported here: it costs a second that the other sources need not pay

    data = load_digits()
    # The pixels are counts from 0 to 16; they become bytes as every other source has them.
    images = torch.from_numpy(np.round(data.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:held_out], order[held_out:]
    return ImageSets(
        TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]), 10, (0.306,), (0.376,)
    )


def fashion_mnist(folder: Path) -> ImageSets:
    """Return Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels in 10 classes.

    Args:
        folder: What :func:`find_fashion_mnist` returned.
    """
    arrays = [torch.from_numpy(read_idx(_idx_file(folder, name)).copy()) for name in FASHION_MNIST_FILES]
    train_images, train_labels, test_images, test_labels = arrays
    return ImageSets(
        TensorDataset(train_images.unsqueeze(1), train_labels.long()),
        TensorDataset(test_images.unsqueeze(1), test_labels.long()),
        10,
        (0.286,),
        (0.353,),
    )


def find_fashion_mnist(root: str | None) -> Path:
    """Return the first folder that holds the four files of Fashion-MNIST, gzipped or not.

    Args:
        root: The user's own folder: only it is searched, and torchvision's ``FashionMNIST/raw`` below it. Else the folder that
            the environment names, then the system's.

    Raises:
        FileNotFoundError: With the folders that were searched and two ways to get the data.
    """
    base = root or os.environ.get(DATA_ROOT_VARIABLE)
    folders = [Path(base), Path(base) / "FashionMNIST" / "raw"] if base else []
    if not root:  # whoever names a folder wants the data in it, not others
        folders.append(FASHION_MNIST_SYSTEM_FOLDER)
    for folder in folders:
        if all(_idx_file(folder, name).exists() for name in FASHION_MNIST_FILES):
            return folder
    raise FileNotFoundError(
        f"Fashion-MNIST is not in {', '.join(map(str, folders))}. On Debian or Ubuntu, `apt-get install "
        f"{FASHION_MNIST_PACKAGE}` puts it into {FASHION_MNIST_SYSTEM_FOLDER}, where it is found without a `root`; or put "
        f"{', '.join(FASHION_MNIST_FILES)} (each may end in .gz) into a folder and name it by `root` or by the environment "
        f"variable {DATA_ROOT_VARIABLE}."
    )


def image_folder(root: Path, image_size: int) -> ImageSets:
    """Return a folder tree of pictures with ImageNet's usual augmentation.

    Args:
        root: What :func:`find_image_folder` returned.
        image_size: Side of the square that both splits are cut to, in pixels.

    Raises:
        ValueError: If the two splits do not have the same classes.
    """
    train = ImageFolder(
        root / "train",
        transforms.Compose(
            [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
        ),
    )
    # The shorter side is resized to 8/7 of the crop: 256 for 224.
    held_out = ImageFolder(
        root / "val",
        transforms.Compose(
            [transforms.Resize(image_size * 8 // 7), transforms.CenterCrop(image_size), transforms.PILToTensor()]
        ),
    )
    if train.class_to_idx != held_out.class_to_idx:
        differing = sorted(set(train.classes) ^ set(held_out.classes))
        raise ValueError(f"{root}: train and val must have the same class folders; only in one: {differing[:10]}")
    return ImageSets(train, held_out, len(train.classes), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def find_image_folder(root: str | None) -> Path:
    """Return the root of a folder tree of pictures.

    Raises:
        FileNotFoundError: Which says what to put where.
    """
    wanted = "<root>/train/<class>/<picture>.jpg and <root>/val/<class>/<picture>.jpg"
    folder = find_folder(root, wanted)
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"{folder / split} is not a folder; source 'imagefolder' reads {wanted}")
    return folder


def fake(image_size: int, seed: int, length: int = 10_000, num_classes: int = 10) -> ImageSets:
    """Return noise with random labels, for measuring throughput only: there is nothing in it to learn.

    Args:
        image_size: Side of the images in pixels.
        seed: Chooses the noise.
        length: Number of training images; a tenth of it is held out.
        num_classes: Number of labels.
    """
    train = _Noise(length, image_size, num_classes, seed)
    held_out = _Noise(length // 10, image_size, num_classes, seed + length)
    return ImageSets(train, held_out, num_classes, (0.5,), (0.29,))


class _Noise(Dataset[Sample]):
    """Images made when asked for, each by a generator of its own, so that order and workers change nothing."""

    def __init__(self, length: int, image_size: int, num_classes: int, seed: int) -> None:
        self.length = length
        self.shape = (3, image_size, image_size)
        self.num_classes = num_classes
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.seed + index)
        image = torch.randint(256, self.shape, dtype=torch.uint8, generator=generator)
        return image, int(torch.randint(self.num_classes, (1,), generator=generator))


def to_network_input(images: Tensor, sets: ImageSets, image_size: int, dtype: torch.dtype) -> Tensor:
    """Turn a batch of bytes into what a network takes.

    Args:
        images: ``uint8[batch, 1 or 3, height, width]``, on any device.
        sets: Where they come from, for mean and standard deviation.
        image_size: Side of the result. Images of another size are resized bilinearly.
        dtype: Floating-point type of the result.

    Returns:
        ``dtype[batch, 3, image_size, image_size]``, each channel with about zero mean and unit variance.
    """
    mean, std = _per_channel(sets.mean, images), _per_channel(sets.std, images)
    result = (images.float() / 255 - mean) / std
    if result.shape[-2:] != (image_size, image_size):
        result = F.interpolate(result, size=(image_size, image_size), mode="bilinear", align_corners=False)
    return result.to(dtype).expand(-1, 3, -1, -1)


def read_idx(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read an array of bytes in MNIST's idx format, gzipped if the name says so.

    torchvision is no help here: it knows the checksums of its own download only, and Debian compressed the files anew.

    Raises:
        ValueError: If the file is not of this format.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    dimensions = data[3] if data[:3] == b"\x00\x00\x08" and len(data) > 3 else 0
    header = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if not dimensions or len(data) != header + int(np.prod(shape)):
        raise ValueError(f"{path} is not a whole idx file of bytes")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _idx_file(folder: Path, name: str) -> Path:
    """The file as it lies there: plain if it exists, else gzipped."""
    plain = folder / name
    return plain if plain.exists() else plain.with_name(name + ".gz")


def _per_channel(values: Sequence[float], images: Tensor) -> Tensor:
    return torch.tensor(values, device=images.device).view(1, -1, 1, 1)

"""Small data on disk in the formats that the recipes read."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def idx_bytes(array: np.ndarray) -> bytes:
    """The array in MNIST's idx format."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no data set is installed."""
    monkeypatch.delenv("LC_DATA_ROOT", raising=False)
    monkeypatch.setattr("lightning_compress.recipes.images.FASHION_MNIST_SYSTEM_FOLDER", Path("/nonexistent"))


@pytest.fixture
def write_fashion_mnist(no_data: None) -> Callable[..., None]:
    """Write 64 + 16 grey images whose every pixel is the index of the image, labelled by index modulo 10."""

    def write(folder: Path, compress: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 64), ("t10k", 16)):
            index = np.arange(count)
            images = np.broadcast_to(index[:, None, None], (count, 28, 28))
            for name, array in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", index % 10)):
                if compress:
                    (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
                else:
                    (folder / name).write_bytes(idx_bytes(array))

    return write


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """A folder tree with two classes: 6 red and 6 blue pictures to train on, 2 of each to validate on."""
    for split, count in (("train", 6), ("val", 2)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (50, 40), colour).save(folder / f"{number}.png")
    return tmp_path

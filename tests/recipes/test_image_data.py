"""What comes out of ``ImageData``, and what it says when the data is not there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_compress.recipes import ImageClassifier, ImageData, images
from lightning_compress.recipes.images import read_idx

WriteFashionMnist = Callable[..., None]


def first_batch(data: ImageData, split: str = "val") -> tuple[Tensor, Tensor]:
    """The first batch as the model sees it."""
    batch = next(iter(getattr(data, f"{split}_dataloader")()))
    return data.on_after_batch_transfer(batch, 0)


def labels_of(data: ImageData) -> Tensor:
    """All labels of the training images in the order in which they lie there."""
    return torch.tensor([int(data.sets.train[index][1]) for index in range(len(data.sets.train))])


class TestDigits:
    def test_sizes_and_shapes(self) -> None:
        data = ImageData(source="digits", image_size=32, batch_size=7)
        images, labels = first_batch(data)
        assert images.shape == (7, 3, 32, 32)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert (len(data.sets.train), len(data.sets.held_out), data.num_classes) == (1297, 500, 10)

    def test_loader_holds_bytes(self) -> None:
        images, _ = next(iter(ImageData(source="digits").val_dataloader()))
        assert images.dtype == torch.uint8
        assert images.max() == 255  # the 16 of scikit-learn's scale

    def test_normalised(self) -> None:
        images, _ = first_batch(ImageData(source="digits", image_size=8, batch_size=500))
        assert abs(float(images.mean())) < 0.05
        assert abs(float(images.std()) - 1) < 0.05

    def test_no_image_is_in_both_splits(self) -> None:
        data = ImageData(source="digits")
        train, held_out = ({bytes(image.numpy()) for image, _ in split} for split in data.sets[:2])
        assert (len(train), len(held_out)) == (1297, 500)  # no two scans are alike
        assert not train & held_out

    def test_seed_decides_the_split(self) -> None:
        first, again, other = (labels_of(ImageData(source="digits", seed=seed)) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class TestFashionMnist:
    @pytest.mark.parametrize("compress", [True, False], ids=["gz", "plain"])
    @pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
    def test_reads_files(
        self, tmp_path: Path, write_fashion_mnist: WriteFashionMnist, compress: bool, below: str
    ) -> None:
        write_fashion_mnist(tmp_path / below, compress=compress)
        data = ImageData(source="fashion_mnist", root=str(tmp_path), image_size=32)
        assert (len(data.sets.train), len(data.sets.held_out)) == (64, 16)
        image, label = data.sets.train[13]
        assert torch.equal(image, torch.full((1, 28, 28), 13, dtype=torch.uint8))
        assert label == 3
        assert first_batch(data)[0].shape == (16, 3, 32, 32)

    def test_environment_names_the_folder(
        self, tmp_path: Path, write_fashion_mnist: WriteFashionMnist, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_fashion_mnist(tmp_path, compress=True)
        monkeypatch.setenv("LC_DATA_ROOT", str(tmp_path))
        assert ImageData(source="fashion_mnist").folder == tmp_path

    def test_missing_names_package_and_folders(self, tmp_path: Path, no_data: None) -> None:
        with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist") as error:
            ImageData(source="fashion_mnist", root=str(tmp_path))
        assert str(tmp_path) in str(error.value)
        assert "t10k-labels-idx1-ubyte" in str(error.value)

    def test_three_of_four_files_are_missing_data(self, tmp_path: Path, write_fashion_mnist: WriteFashionMnist) -> None:
        write_fashion_mnist(tmp_path, compress=True)
        (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
        with pytest.raises(FileNotFoundError):
            ImageData(source="fashion_mnist", root=str(tmp_path))

    @pytest.mark.parametrize(
        "content", [b"", b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00", b"\x00\x00\x08\x01\x00\x00\x00\x09ab"]
    )
    def test_damaged_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(ValueError, match="damaged is not a whole idx file"):
            read_idx(tmp_path / "damaged")


class TestImageFolder:
    def test_reads_both_splits(self, picture_folder: Path) -> None:
        data = ImageData(source="imagefolder", root=str(picture_folder), image_size=28, batch_size=4)
        images, labels = first_batch(data)
        assert (len(data.sets.train), len(data.sets.held_out), data.num_classes) == (12, 4, 2)
        assert images.shape == (4, 3, 28, 28)
        assert labels.tolist() == [0, 0, 1, 1]
        # Blue pictures: the blue channel is at the largest normalised value, the others at the smallest.
        assert torch.allclose(images[0, 2], torch.tensor((1 - 0.406) / 0.225))
        assert torch.allclose(images[0, 0], torch.tensor(-0.485 / 0.229))

    def test_train_split_has_the_same_shape(self, picture_folder: Path) -> None:
        data = ImageData(source="imagefolder", root=str(picture_folder), image_size=28, batch_size=4)
        assert first_batch(data, "train")[0].shape == (4, 3, 28, 28)

    def test_missing_root_says_what_to_put_where(self, no_data: None) -> None:
        with pytest.raises(FileNotFoundError, match=r"<root>/train/<class>/<picture>\.jpg"):
            ImageData(source="imagefolder")

    def test_missing_split_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "train").mkdir()
        with pytest.raises(FileNotFoundError, match="val is not a folder"):
            ImageData(source="imagefolder", root=str(tmp_path))

    def test_different_classes_in_the_splits(self, picture_folder: Path) -> None:
        (picture_folder / "val" / "red").rename(picture_folder / "val" / "green")
        data = ImageData(source="imagefolder", root=str(picture_folder))
        with pytest.raises(ValueError, match=r"only in one: \['green', 'red'\]"):
            data.setup("fit")


class TestFake:
    def test_item_depends_on_seed_and_index_only(self) -> None:
        first, again, other = (ImageData(source="fake", image_size=16, seed=seed) for seed in (0, 0, 1))
        image, label = first.sets.train[5]
        assert image.shape == (3, 16, 16)
        assert torch.equal(image, again.sets.train[5][0])
        assert label == again.sets.train[5][1]
        assert not torch.equal(image, other.sets.train[5][0])
        assert not torch.equal(image, first.sets.held_out[5][0])

    def test_has_an_end(self) -> None:
        data = ImageData(source="fake", image_size=4, batch_size=500)
        assert len(data.train_dataloader()) == 20


class TestSettings:
    def test_train_limit_draws_at_random_and_the_same_each_time(self, picture_folder: Path) -> None:
        first, again = (
            ImageData(source="imagefolder", root=str(picture_folder), train_limit=6, seed=3) for _ in range(2)
        )
        assert len(first.sets.train) == 6
        assert torch.equal(labels_of(first), labels_of(again))
        assert set(labels_of(first).tolist()) == {0, 1}  # the first six in order are all of one class

    def test_last_short_batch_is_dropped_in_training_only(self) -> None:
        data = ImageData(source="digits", batch_size=1000)
        assert [len(labels) for _, labels in data.train_dataloader()] == [1000]
        assert [len(labels) for _, labels in data.val_dataloader()] == [500]

    @pytest.mark.parametrize("name", ["image_size", "batch_size", "train_limit"])
    def test_zero_is_named(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            ImageData(**{name: 0})

    def test_unknown_source_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match="choose one of digits, fashion_mnist, imagefolder, fake"):
            ImageData(source="cifar")  # type: ignore[arg-type]

    def test_batch_larger_than_the_data(self, tmp_path: Path) -> None:
        trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path)
        with pytest.raises(ValueError, match=r"batch_size=50 x 1 processes is more than the 49 images"):
            trainer.fit(ImageClassifier("resnet8"), ImageData(batch_size=50, train_limit=49))


def test_digits_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("touched the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert first_batch(ImageData(source="digits"))[0].isfinite().all()


def test_a_named_root_is_the_only_place_that_is_searched(
    tmp_path: Path, write_fashion_mnist: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fashion_mnist(tmp_path / "system", compress=True)
    monkeypatch.setattr(images, "FASHION_MNIST_SYSTEM_FOLDER", tmp_path / "system")
    assert images.find_fashion_mnist(None) == tmp_path / "system"
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        images.find_fashion_mnist(str(tmp_path / "elsewhere"))

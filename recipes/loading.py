"""What the recipes' data modules have in common: where data lies, how batches are loaded, and how settings are checked."""

import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset

DATA_ROOT_VARIABLE = "LC_DATA_ROOT"


def find_folder(root: str | None, wanted: str) -> Path:
    """Return the folder that the user named, by ``root`` or by the environment variable LC_DATA_ROOT.

    Args:
        root: Its name.
        wanted: What should be in it, for the message.

    Raises:
        FileNotFoundError: If none is named or it is no folder, with what to put there.
    """
    name = root or os.environ.get(DATA_ROOT_VARIABLE)
    if not name:
        raise FileNotFoundError(
            f"this source needs a folder with {wanted}: name it by `root` or by the environment variable {DATA_ROOT_VARIABLE}"
        )
    if not Path(name).is_dir():
        raise FileNotFoundError(f"{name} is not a folder; wanted is one with {wanted}")
    return Path(name)


def check_files(folder: Path, *names: str) -> None:
    """Raise a FileNotFoundError that names the files that a folder lacks."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {' and no '.join(missing)}: put {' and '.join(names)} there")


def make_loader(dataset: Dataset[Any], batch_size: int, num_workers: int, **options: Any) -> DataLoader[Any]:
    """Return a loader with what is always wanted; ``options`` go to torch's DataLoader."""
    # No sampler here: Lightning puts in the distributed one that the strategy asks for.
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        **options,
    )


def check_one_batch_per_process(data: LightningDataModule, batch_size: int, examples: int, what: str) -> None:
    """Raise a ValueError if training would have no step: its loaders drop what does not fill a batch.

    Args:
        data: The data module, perhaps attached to a Trainer.
        batch_size: Examples per process.
        examples: Number of examples to train on.
        what: What an example is called, in the plural.
    """
    processes = data.trainer.world_size if data.trainer else 1
    if examples < batch_size * processes:
        raise ValueError(
            f"batch_size={batch_size} x {processes} processes is more than the {examples} {what} to train on"
        )


def check_covers_classes(module: LightningModule, num_classes: int) -> None:
    """Raise a ValueError if the Trainer's data module says that it has more classes than this model."""
    # Too few outputs would otherwise surface as an index error inside the loss, on a GPU as a device assert.
    classes = getattr(getattr(module.trainer, "datamodule", None), "num_classes", None)
    if classes is not None and classes > num_classes:
        raise ValueError(f"num_classes={num_classes} of the model is too small: the data has {classes}")


def check_positive(**values: int | None) -> None:
    """Raise a ValueError that names the first of these settings that is less than one; None is no setting."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")

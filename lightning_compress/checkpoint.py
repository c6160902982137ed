"""Checkpoint files and interrupted runs: what holds whatever the checkpoint contains. No Lightning, no collectives."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_calls = itertools.count()


@contextlib.contextmanager
def replaced_at_once(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the path to write to; what stands at ``path`` is replaced when all of it has been written and is on the disk.

    Lightning writes to the system's temporary folder and moves the file, which is a copy where that is another file system:
    a crash or a full disk in the middle of it would leave neither the old checkpoint nor the new one.

    Raises:
        OSError: It cannot be written. What was there before is whole.
    """
    target = Path(path)
    part = target.with_name(f".lightning-compress-{os.getpid()}.part")  # a name that nobody takes for a checkpoint
    try:
        yield str(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    except OSError as error:
        raise OSError(
            error.errno, f"the checkpoint could not be written ({error.strerror}); an older one is left as it was", path
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def readable(path: Any) -> Iterator[None]:
    """Turns what torch says of a truncated or damaged file into an error that names it."""
    try:
        yield
    except (RuntimeError, EOFError, KeyError, ValueError, OSError, pickle.UnpicklingError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to where a damaged directory points
            raise
        raise RuntimeError(
            f"The checkpoint {path} cannot be read: it is truncated, damaged, or no checkpoint "
            f"({type(error).__name__}: {error}). Resume from an older one: trainer.fit(..., ckpt_path=...)."
        ) from error


def all_ranks_are_at(step: int, patience: timedelta = timedelta(seconds=10)) -> bool:
    """Whether every rank calls this with the same step within ``patience``; asks the store, so nobody can hang.

    After a SIGTERM ranks may have stopped at different places, where a collective would meet another one.
    """
    # a key of an earlier call would answer for a rank that is not here
    store, prefix = dist.distributed_c10d._get_default_store(), f"lightning-compress/stopped/{next(_calls)}"
    try:
        keys = [f"{prefix}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], str(step))
        store.wait(keys, patience)
        return {int(store.get(key)) for key in keys} == {step}
    except RuntimeError:  # somebody is missing, or the process that keeps the store is gone
        return False

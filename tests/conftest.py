"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# two busy processes on two cores: OpenMP's spinning threads would dominate
torch.set_num_threads(1)

# every torchrun on a port of its own: by default all take the same, and tests run side by side
os.environ.setdefault("PET_STANDALONE", "1")


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A Trainer leaves LOCAL_RANK and MASTER_PORT behind, and processes that a later test starts would take them for theirs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

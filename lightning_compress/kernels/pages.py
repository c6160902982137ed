"""Large arrays of the host's memory, on huge pages where the system grants them.

An exchange takes and drops hundreds of megabytes per step. On pages of 4 KiB the kernel's work for each page costs more than
encoding what is on it; numpy asks Linux for pages of 2 MiB (``NUMPY_MADVISE_HUGEPAGE``), torch's allocator does not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float64: np.float64}


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``, for uint8, float32 and float64."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(numel, _NUMPY[dtype]))


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``, for uint8, float32 and float64."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(numel, _NUMPY[dtype]))

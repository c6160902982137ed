"""Settings of all tests."""

from __future__ import annotations

import torch

# two busy processes on two cores: OpenMP's spinning threads would dominate
torch.set_num_threads(1)

"""A selection starts from what fitted the block before; that must not show in what is chosen."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.compressors import CenteredTopK, Compressor, TopK
from tests.compressors.both import assert_kernels_agree


@pytest.mark.parametrize("compressor", [TopK(0.05, 256), CenteredTopK(0.06, 256)])
def test_blocks_of_any_size_of_numbers_may_follow_each_other(compressor: Compressor) -> None:
    noise = torch.randn(12, 256, generator=torch.Generator().manual_seed(0))
    size = torch.tensor([1, 1, 1e3, 1e-3, 1, 0, 1, 1e-30, 1e30, 1, 1.2, 0.9])
    assert_kernels_agree(compressor, (noise * size.unsqueeze(1)).flatten())

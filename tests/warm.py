"""Preloaded by the fork server of ``tests.ranks``: ranks start with all CPU kernels loaded, instead of loading them again."""

from __future__ import annotations

import torch

from lightning_compress.compressors import Cast, compressor_names, get_compressor
from lightning_compress.exchange.codec import compile_kernels

compile_kernels([Cast("fp32"), *map(get_compressor, compressor_names())], [torch.float32, torch.float64])

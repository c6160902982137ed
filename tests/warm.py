"""Preloaded by the fork server of ``tests.ranks``: ranks start with the CPU kernels that most tests use already compiled."""

from __future__ import annotations

import torch

from lightning_compress import Cast, NoCompression, Quantize
from lightning_compress.exchange.codec import compile_kernels

compile_kernels([Quantize(), Cast("bf16"), NoCompression()], [torch.float32, torch.float64])

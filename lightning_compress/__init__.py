"""Compressed gradient exchange for data-parallel training with PyTorch Lightning.

Importing this package registers the strategies: ``Trainer(strategy="compressed")``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_compress import registration
from lightning_compress.compressors import (
    Cast,
    CenteredTopK,
    Compressor,
    LinearDithering,
    NaturalDithering,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    Ternary,
    TopK,
    register_compressor,
)
from lightning_compress.exchange import DenseRule, GradientExchange, register_comm_hook
from lightning_compress.memory import ErrorFeedback, MomentumCorrection, SharedMomentum
from lightning_compress.schedule import DensityWarmup

if TYPE_CHECKING:
    from lightning_compress.planner import plan
    from lightning_compress.pytorch_lightning import AutoStrategy, CompressedStrategy, CompressionMonitor

__version__ = "0.1.0"

__all__ = [
    "AutoStrategy",
    "Cast",
    "CenteredTopK",
    "CompressedStrategy",
    "CompressionMonitor",
    "Compressor",
    "DenseRule",
    "DensityWarmup",
    "ErrorFeedback",
    "GradientExchange",
    "LinearDithering",
    "MomentumCorrection",
    "NaturalDithering",
    "NoCompression",
    "OneBit",
    "Quantize",
    "RandomK",
    "SharedMomentum",
    "Ternary",
    "TopK",
    "plan",
    "register_comm_hook",
    "register_compressor",
]

_LIGHTNING_NAMES = ("AutoStrategy", "CompressedStrategy", "CompressionMonitor")

registration.register()


def __getattr__(name: str) -> Any:
    # classes that derive from Lightning's: of the import name in use, and only when asked for
    if name in _LIGHTNING_NAMES:
        return getattr(importlib.import_module(registration.module_in_use()), name)
    if name == "plan":  # what it needs is slow to import, and few programs plan
        return importlib.import_module("lightning_compress.planner").plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

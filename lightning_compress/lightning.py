"""The strategy and the callback for users of ``import lightning.pytorch``."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_compress.auto import AutoGlue
from lightning_compress.monitor import MonitorGlue
from lightning_compress.strategy import CompressionGlue

__all__ = ["AutoStrategy", "CompressedStrategy", "CompressionMonitor"]


class CompressedStrategy(CompressionGlue, DDPStrategy):  # noqa: D101  # documented once, in the glue
    __doc__ = CompressionGlue.__doc__
    root: ClassVar[str] = "lightning.pytorch"


class AutoStrategy(AutoGlue, DDPStrategy):  # noqa: D101
    __doc__ = AutoGlue.__doc__
    root: ClassVar[str] = "lightning.pytorch"


class CompressionMonitor(MonitorGlue, Callback):  # noqa: D101
    __doc__ = MonitorGlue.__doc__


CompressedStrategy.register_strategies(StrategyRegistry)
AutoStrategy.register_strategies(StrategyRegistry)

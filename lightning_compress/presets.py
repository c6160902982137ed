"""The named settings: ``strategy="compressed_<preset>"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_compress.compressors.topk import TopK
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.optim.compressed_adam import CLAN_CODE
from lightning_compress.schedule import DensityWarmup

PRESETS: dict[str, dict[str, Any]] = {
    "": {},
    "_bf16": {"compressor": "bf16"},
    "_fp16": {"compressor": "fp16"},
    "_fp8": {"compressor": "fp8"},
    "_quantize": {"compressor": "quantize"},
    "_ternary": {"compressor": "ternary"},
    "_centered": {"compressor": "centered"},
    "_onebit": {"compressor": "onebit"},
    "_topk": {"compressor": "topk"},
    "_randomk": {"compressor": "randomk"},
    "_dithering": {"compressor": "dithering"},
    "_natural": {"compressor": "natural"},
    "_clan": {"compressor": CLAN_CODE, "memory": "error_feedback", "exchange": "two_way"},
    "_dgc": {"compressor": TopK(0.01), "memory": MomentumCorrection(0.9), "schedule": DensityWarmup()},
}
"""Arguments of ``CompressedStrategy`` by the suffix of the strategy's name; a compressor's name stands for its defaults.

Instances never change, so all strategies of a name may share them.
"""

_LAUNCHERS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def strategy_names(presets: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every registered strategy name with its arguments: presets x launchers x detection of unused parameters."""
    return {
        f"compressed{preset}{launcher}{unused}": {**arguments, "start_method": method, **detection}
        for preset, arguments in presets.items()
        for launcher, method in _LAUNCHERS.items()
        for unused, detection in _UNUSED.items()
    }

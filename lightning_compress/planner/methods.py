"""The gradient exchanges that are compared: DDP's own in fp32 and bf16, and the presets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllReduce
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.rank import RankExchange
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.topology import Steps, exchange_dense
from lightning_compress.kernels.table import PRESENT
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.planner.profile import Bucket
from lightning_compress.presets import PRESETS

DDP = ("fp32", "bf16")
"""Uncompressed: DDP's all-reduce, and torch's bf16 hook."""

MILDEST_FIRST = (
    *DDP,
    *("fp16", "fp8", "quantize", "dithering", "natural", "ternary", "centered", "onebit", "randomk", "topk"),
)
"""By what they leave out of a step: accuracy first. What is not named here comes last."""


def method_names() -> list[str]:
    """All of them, mildest first: fp32 and bf16 DDP, and the presets' names without ``compressed_``.

    The preset bf16 sends the bytes of bf16 DDP, and remembers what the rounding left out: it has no row of its own.
    """
    presets = [suffix.removeprefix("_") for suffix, arguments in PRESETS.items() if "compressor" in arguments]
    names = dict.fromkeys([*DDP, *presets])
    return sorted(names, key=mildness)


def mildness(name: str) -> int:
    """Its place in ``MILDEST_FIRST``."""
    return MILDEST_FIRST.index(name) if name in MILDEST_FIRST else len(MILDEST_FIRST)


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of ``GradientExchange`` for a method."""
    return {"compressor": "none"} if name == "fp32" else PRESETS[f"_{name}"]


def needs_own_optimizer(name: str) -> bool:
    """Whether the method exchanges something else than gradients: nobody's optimizer can be kept."""
    return isinstance(arguments_of(name).get("memory"), MomentumCorrection)


class MethodOnOneRank:
    """What one rank computes and sends under a method, one bucket at a time.

    Args:
        name: The method.
        module: The model.
        rank: This rank.
        world_size: Number of ranks.
    """

    _LATE = 10**6
    """A step after every warm-up."""

    def __init__(self, name: str, module: torch.nn.Module, rank: int, world_size: int) -> None:
        self.name, self.world_size = name, world_size
        self._exchange: RankExchange | None = None
        if name not in DDP:
            settings = ExchangeSettings.make(**arguments_of(name))
            self._exchange = RankExchange(
                settings, module, rank, Nodes.alone(world_size), ExchangeStats(), steps_per_epoch=1
            )

    def steps(self, bucket: Bucket, buffer: Tensor) -> Steps:
        """The exchange of a bucket: computes, yields a collective, computes."""
        if self._exchange is not None and not bucket.sparse:
            status = torch.full((len(bucket.names),), PRESENT, dtype=torch.uint8)
            return self._exchange.steps(buffer, bucket.names, status, self._LATE, 1.0)
        return _bf16(buffer, self.world_size) if self.name == "bf16" else exchange_dense(buffer, self.world_size)


def _bf16(buffer: Tensor, world_size: int) -> Steps:
    """What ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`` does."""
    compressed = buffer.to(torch.bfloat16).div_(world_size)
    yield AllReduce(compressed)
    buffer.copy_(compressed)


def check_names(names: Iterable[str]) -> list[str]:
    """The methods ``names``, mildest first.

    Raises:
        ValueError: One is unknown.
    """
    known = method_names()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"method {unknown[0]!r} is unknown; known are {', '.join(known)}.")
    return sorted({*names}, key=mildness)

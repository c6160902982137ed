"""The gradient exchanges that are compared: DDP's own in fp32 and bf16, and the presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllReduce
from lightning_compress.exchange.dense import DenseRule
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
    *("fp16", "fp8", "quantize", "dithering", "natural", "ternary", "centered", "onebit", "clan", "randomk", "topk"),
)
"""By what they leave out of a step: accuracy first. What is not named here comes last."""

HIERARCHICAL = "hierarchical_"
"""Before the name of a preset: dense inside the node, the preset's code between nodes."""


@dataclass(frozen=True)
class Method:
    """A gradient exchange that is measured and predicted.

    Attributes:
        name: In tables.
        arguments: Of ``GradientExchange``; None: DDP's own all-reduce, or torch's hook, in the backward's thread.
    """

    name: str
    arguments: Mapping[str, Any] | None = None

    @classmethod
    def named(cls, name: str) -> Method:
        """The method of a table's row: fp32 and bf16 are DDP's own."""
        return cls(name, None if name in DDP else arguments_of(name))


@dataclass(frozen=True)
class Choice:
    """What ``compressed_auto`` takes: a method, and what of it stays dense.

    Attributes:
        method: Its name.
        dense: Which tensors stay dense; None: the small ones, as by default.
    """

    method: str
    dense: DenseRule | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``GradientExchange``."""
        return {**arguments_of(self.method), **({} if self.dense is None else {"dense": self.dense})}

    @property
    def as_run(self) -> Method:
        """By the exchange's own pipeline, fp32 and bf16 too, not by hooks of DDP's."""
        return Method(self.method, self.arguments)

    @property
    def compresses(self) -> bool:
        """Whether it has something milder beside itself: fp32 and bf16 have not."""
        return self.method.removeprefix(HIERARCHICAL) not in DDP

    @property
    def mildness(self) -> tuple[int, bool]:
        """The lower, the milder."""
        return mildness(self.method), self.dense is None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"method": self.method, "dense": None if self.dense is None else asdict(self.dense)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Choice:
        """From ``state()``."""
        rule = state["dense"]
        return cls(state["method"], None if rule is None else DenseRule(**rule))

    def __str__(self) -> str:
        return self.method if self.dense is None else f"{self.method} of some tensors"


def method_names(nodes: Nodes | None = None) -> list[str]:
    """All of them, mildest first: fp32 and bf16 DDP, and the presets' names without ``compressed_``.

    The preset bf16 sends the bytes of bf16 DDP, and remembers what the rounding left out: it has no row of its own.

    Args:
        nodes: Where the ranks are; several on each of several nodes may exchange hierarchically too.
    """
    presets = {suffix.removeprefix("_"): given for suffix, given in PRESETS.items() if "compressor" in given}
    layered = [HIERARCHICAL + name for name, given in presets.items() if set(given) == {"compressor"}]
    names = dict.fromkeys([*DDP, *presets, *(layered if nodes is not None and nodes.nested else [])])
    return sorted(names, key=mildness)


def mildness(name: str) -> int:
    """Its place in ``MILDEST_FIRST``; a hierarchical exchange leaves out what its code does."""
    bare = name.removeprefix(HIERARCHICAL)
    return MILDEST_FIRST.index(bare) if bare in MILDEST_FIRST else len(MILDEST_FIRST)


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of ``GradientExchange`` for a method."""
    bare = name.removeprefix(HIERARCHICAL)
    arguments = {"compressor": "none"} if bare == "fp32" else PRESETS[f"_{bare}"]
    return arguments if bare == name else {**arguments, "exchange": "hierarchical"}


def needs_own_optimizer(name: str) -> bool:
    """Whether the method exchanges something else than gradients: nobody's optimizer can be kept."""
    return isinstance(arguments_of(name).get("memory"), MomentumCorrection)


class MethodOnOneRank:
    """What one rank computes and sends under a method, one bucket at a time.

    Args:
        method: The method.
        module: The model.
        rank: This rank.
        nodes: Where all ranks are.
    """

    _LATE = 10**6
    """A step after every warm-up."""

    def __init__(self, method: Method, module: torch.nn.Module, rank: int, nodes: Nodes) -> None:
        self._bf16, self._world_size = method.name == "bf16", nodes.world_size
        self._exchange: RankExchange | None = None
        if method.arguments is not None:
            settings = ExchangeSettings.make(**method.arguments)
            self._exchange = RankExchange(settings, module, rank, nodes, ExchangeStats(), steps_per_epoch=1)

    def steps(self, bucket: Bucket, buffer: Tensor) -> Steps:
        """The exchange of a bucket: computes, yields a collective, computes."""
        if self._exchange is not None and not bucket.sparse:
            status = torch.full((len(bucket.names),), PRESENT, dtype=torch.uint8)
            return self._exchange.steps(buffer, bucket.names, status, self._LATE, 1.0)
        return (_bf16 if self._bf16 and not bucket.sparse else exchange_dense)(buffer, self._world_size)


def _bf16(buffer: Tensor, world_size: int) -> Steps:
    """What ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`` does."""
    compressed = buffer.to(torch.bfloat16).div_(world_size)
    yield AllReduce(compressed)
    buffer.copy_(compressed)


def check_names(names: Iterable[str], nodes: Nodes) -> list[str]:
    """The methods ``names``, mildest first.

    Raises:
        ValueError: One is unknown, or needs other nodes than there are.
    """
    known = method_names(nodes)
    unknown = [name for name in names if name not in known]
    if unknown and unknown[0].startswith(HIERARCHICAL) and not nodes.nested:
        raise ValueError(f"{unknown[0]} needs several ranks on each of several nodes: start them with torchrun.")
    if unknown:
        raise ValueError(f"method {unknown[0]!r} is unknown; known are {', '.join(known)}.")
    return sorted({*names}, key=mildness)

"""What a user chose, checked before any process starts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from lightning_compress.checks import is_whole
from lightning_compress.compressors.base import PIECE, Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.registry import get_compressor
from lightning_compress.exchange.collectives import Level
from lightning_compress.exchange.dense import DenseRule, dense_rule
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.topology import TOPOLOGIES, GatherAll, ReduceAll, Topology, TwoWay
from lightning_compress.memory.error_feedback import ErrorFeedback
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.schedule import DensityWarmup

MemoryName = Literal["auto", "none", "error_feedback"]
Memory = ErrorFeedback | MomentumCorrection | SharedMomentum
ExchangeName = Literal[
    "auto",
    "all_reduce",
    "all_gather",
    "two_way",
    "hierarchical",
    "hierarchical_all_reduce",
    "hierarchical_all_gather",
    "hierarchical_two_way",
]


@dataclass(frozen=True)
class ExchangeSettings:
    """The checked settings of a gradient exchange.

    Attributes:
        compressor: Code of the large tensors, at its final density.
        dense_compressor: Code of the small ones.
        dense: Which tensors are small.
        memory: The workers' memory, None without one.
        topology: How payloads travel, between nodes if ``hierarchical``; None: DDP's own all-reduce.
        start_step: Exchanges that are dense before compression begins.
        schedule: The density's warm-up, None without.
        by_bytes: Whether ``topology`` is still to be chosen when the world size is known.
        verify_every: Exchanges from one comparison of the ranks' parameters to the next, 0 for none.
        hierarchical: Whether gradients are summed inside the node first.
        compression_threads: Threads that encode or decode one bucket on the CPU; ranks may have different numbers.
    """

    compressor: Compressor
    dense_compressor: Compressor
    dense: DenseRule
    memory: Memory | None
    topology: type[Topology] | None
    start_step: int
    schedule: DensityWarmup | None = None
    by_bytes: bool = False
    verify_every: int = 0
    hierarchical: bool = False
    compression_threads: int = field(default=1, compare=False)

    @classmethod
    def make(
        cls,
        compressor: str | Compressor = "quantize",
        memory: MemoryName | Memory = "auto",
        exchange: ExchangeName = "auto",
        dense: str | int | DenseRule = "auto",
        start_step: int = 0,
        schedule: DensityWarmup | None = None,
        verify_every: int = 0,
        compression_threads: int = 1,
    ) -> ExchangeSettings:
        """Checks and completes a user's arguments (see ``GradientExchange``).

        Raises:
            ValueError: An argument is unknown or does not go with another; the message names it and the remedy.
        """
        code = get_compressor(compressor)
        _check_counts(start_step, verify_every, compression_threads)
        if schedule is not None and not isinstance(schedule, DensityWarmup):
            raise ValueError(f"schedule must be a DensityWarmup(...) or None, got {schedule!r}")
        if schedule is not None:
            code.with_ratio(schedule.densities[0])  # raises for a compressor without a density
        topology = _topology(code, exchange)
        hierarchical = exchange.startswith("hierarchical")
        remembered = _memory(code, memory)
        _check_memory(remembered, hierarchical)
        if topology is None:
            _check_nothing_is_remembered(memory, remembered)
        if isinstance(remembered, SharedMomentum) and start_step > remembered.freeze_step:
            raise ValueError(
                f"start_step={start_step} lies behind freeze_step={remembered.freeze_step}: momenta are exchanged "
                "compressed, so the dense steps must end at freeze_step or before."
            )
        rule = dense_rule(dense)
        if topology is None and rule.code != "auto":
            raise ValueError(
                f"dense={rule.code!r} needs a code beside it: compressor='none' is DDP's own all-reduce of everything; "
                "use dense='auto', another compressor, or exchange='two_way'."
            )
        mild = code if topology is None else rule.compressor(code, remembered is not None)
        if topology is ReduceAll and mild.value_dtype != code.value_dtype:
            mild = _same_type(code, rule)
        by_bytes = (
            exchange in ("auto", "hierarchical") and topology is TwoWay and not isinstance(remembered, SharedMomentum)
        )
        return cls(
            code,
            mild,
            rule,
            remembered,
            topology,
            start_step,
            schedule,
            by_bytes,
            verify_every,
            hierarchical,
            compression_threads,
        )

    @property
    def stages(self) -> list[tuple[Level, ...]]:
        """For each collective of a bucket the levels at which it may run; dense buckets are all-reduced by all ranks."""
        count = self.topology.collectives if self.topology else 1
        if not self.hierarchical:
            return [("world",)] * count
        between: list[tuple[Level, ...]] = [("nodes",)] * count
        return [("world", "node"), *between, ("node",)]

    def resolve(self, nodes: Nodes) -> ExchangeSettings:
        """The settings for the ranks at hand; what cannot pay is said."""
        settings, world_size = self, nodes.world_size
        if self.hierarchical:
            settings, world_size = self._between(nodes), nodes.count
        if self.by_bytes and settings.topology is not None:
            # at two ranks both send the same bytes, and all-gather needs no second encoding
            settings = replace(settings, topology=GatherAll if world_size <= 2 else TwoWay, by_bytes=False)
        if world_size > 1 and settings.topology is GatherAll and settings.wire_share(world_size) >= 1.0:
            warnings.warn(
                f"exchange='all_gather' with {self.compressor!r} sends {settings.wire_share(world_size):.1f} times the "
                f"bytes of dense DDP on {world_size} ranks; use exchange='two_way', whose traffic does not grow with them.",
                stacklevel=2,
            )
        return settings

    def wire_share(self, world_size: int) -> float:
        """Bytes that a large tensor's code puts on the wire, divided by what a float32 all-reduce does."""
        block = self.compressor.block_size or PIECE
        share = self.compressor.payload_nbytes(block) / (4 * block)
        return share * world_size / 2 if self.topology is GatherAll else share

    def _between(self, nodes: Nodes) -> ExchangeSettings:
        """Where every node has one rank, hierarchical is the exchange between nodes; on one node, DDP's own."""
        if nodes.count == 1 < nodes.size:
            warnings.warn(
                f"exchange='hierarchical' has nothing to compress: all {nodes.size} ranks are on one node, where gradients "
                "travel dense, by DDP's own all-reduce. To compress inside a node use exchange='two_way'.",
                stacklevel=2,
            )
            return replace(self, hierarchical=False, topology=None)
        return replace(self, hierarchical=nodes.size > 1)

    def at_density(self, density: float) -> ExchangeSettings:
        """The settings of a warm-up stage."""
        return replace(self, compressor=self.compressor.with_ratio(density))


def _check_counts(start_step: int, verify_every: int, compression_threads: int) -> None:
    if not is_whole(start_step) or start_step < 0:
        raise ValueError(
            f"start_step is the number of dense steps before compression and must be 0 or more, got {start_step!r}"
        )
    if not is_whole(verify_every) or verify_every < 0:
        raise ValueError(
            "verify_every is the number of steps from one comparison of the ranks' parameters to the next, 0 for none, "
            f"got {verify_every!r}"
        )
    if not is_whole(compression_threads) or compression_threads < 1:
        raise ValueError(
            "compression_threads is the number of threads that encode or decode one bucket and must be 1 or more, got "
            f"{compression_threads!r}; more than the cores of a process only cost time"
        )


def _topology(compressor: Compressor, exchange: str) -> type[Topology] | None:
    if exchange not in get_args(ExchangeName):
        raise ValueError(f"exchange={exchange!r} is unknown; known are {', '.join(get_args(ExchangeName))}.")
    if exchange == "auto" and isinstance(compressor, NoCompression):
        return None
    asked, exchange = exchange, exchange.removeprefix("hierarchical").removeprefix("_")
    if exchange in ("auto", ""):
        exchange = "all_reduce" if compressor.linear else "two_way"
    if exchange == "all_reduce" and not compressor.linear:
        raise ValueError(
            f"exchange={asked!r} adds up payloads, which {compressor!r} does not allow; "
            "use exchange='two_way' (any number of ranks) or 'all_gather' (a few ranks)."
        )
    return TOPOLOGIES[exchange]


def _memory(compressor: Compressor, memory: MemoryName | Memory) -> Memory | None:
    if isinstance(memory, (ErrorFeedback, MomentumCorrection, SharedMomentum)):
        return memory
    if memory not in get_args(MemoryName):
        raise ValueError(
            f"memory={memory!r} is unknown; known are {', '.join(get_args(MemoryName))}, ErrorFeedback() and "
            "MomentumCorrection() (an instance: the class must be called)."
        )
    if memory == "none" and not compressor.unbiased:
        warnings.warn(
            f"{compressor!r} is biased and memory='none' drops what it leaves out: expect a loss of accuracy. "
            "Use memory='error_feedback' (the default for biased compressors).",
            stacklevel=2,
        )
    feedback = memory == "error_feedback" or (memory == "auto" and not compressor.unbiased)
    return ErrorFeedback() if feedback else None


def _check_memory(remembered: Memory | None, hierarchical: bool) -> None:
    if hierarchical and isinstance(remembered, MomentumCorrection):
        raise ValueError(
            "MomentumCorrection keeps the velocity of every rank's own gradient, and exchange='hierarchical' sums "
            "gradients inside the node first: use exchange='two_way'."
        )
    if hierarchical and isinstance(remembered, SharedMomentum):
        raise ValueError(
            "exchanged='momentum' encodes whole parameters' momenta, and with exchange='hierarchical' each rank encodes a "
            "shard of its node's gradients: use exchange='two_way', or CompressedAdam(exchanged='gradient')."
        )


def _check_nothing_is_remembered(memory: MemoryName | Memory, remembered: Memory | None) -> None:
    """Of compressor='none', which is DDP's own all-reduce."""
    if isinstance(remembered, MomentumCorrection):
        raise ValueError("MomentumCorrection needs a compressor: without one use torch.optim.SGD(momentum=...).")
    if isinstance(remembered, SharedMomentum):
        raise ValueError("exchanged='momentum' needs a compressor: without one use torch.optim.AdamW.")
    if remembered is not None and memory not in ("auto", "none"):
        raise ValueError(f"memory={memory!r} has nothing to remember beside compressor='none': use memory='auto'.")


def _same_type(compressor: Compressor, rule: DenseRule) -> Compressor:
    """The dense code of an all-reduce: its payload is one tensor, so small tensors ride in it in its format."""
    name = _FORMATS[compressor.value_dtype]
    if rule.code not in ("auto", name):
        raise ValueError(
            f"exchange='all_reduce' sends one tensor of {name}; dense={rule.code!r} does not fit, use 'auto'."
        )
    return Cast(name)


_FORMATS: dict[torch.dtype, Literal["fp32", "fp16", "bf16"]] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}

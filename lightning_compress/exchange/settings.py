"""What a user chose, checked before any process starts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_compress.compressors.base import Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.registry import get_compressor
from lightning_compress.exchange.dense import DenseRule, dense_rule
from lightning_compress.exchange.topology import TOPOLOGIES, Topology
from lightning_compress.memory.error_feedback import ErrorFeedback

MemoryName = Literal["auto", "none", "error_feedback"]
ExchangeName = Literal["auto", "all_reduce", "all_gather", "two_way"]


@dataclass(frozen=True)
class ExchangeSettings:
    """The checked settings of a gradient exchange.

    Attributes:
        compressor: Code of the large tensors.
        dense_compressor: Code of the small ones.
        dense: Which tensors are small.
        memory: The workers' memory, None without one.
        topology: How payloads travel; None: DDP's own all-reduce.
        start_step: Steps that are exchanged dense before compression begins.
    """

    compressor: Compressor
    dense_compressor: Compressor
    dense: DenseRule
    memory: ErrorFeedback | None
    topology: type[Topology] | None
    start_step: int

    @classmethod
    def make(
        cls,
        compressor: str | Compressor,
        memory: MemoryName | ErrorFeedback,
        exchange: ExchangeName,
        dense: str | int | DenseRule,
        start_step: int,
    ) -> ExchangeSettings:
        """Checks and completes a user's arguments (see ``GradientExchange``).

        Raises:
            ValueError: An argument is unknown or does not go with another; the message names it and the remedy.
        """
        code = get_compressor(compressor)
        if isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0:
            raise ValueError(f"start_step is the number of dense steps before compression and must be 0 or more, got {start_step!r}")
        topology = _topology(code, exchange)
        remembered = _memory(code, memory)
        rule = dense_rule(dense)
        mild = code if topology is None else rule.compressor(code, remembered is not None)
        if topology is TOPOLOGIES["all_reduce"] and mild.value_dtype != code.value_dtype:
            mild = _same_type(code, rule)
        return cls(code, mild, rule, remembered, topology, start_step)


def _topology(compressor: Compressor, exchange: str) -> type[Topology] | None:
    if exchange not in get_args(ExchangeName):
        raise ValueError(f"exchange={exchange!r} is unknown; known are {', '.join(get_args(ExchangeName))}.")
    if exchange == "auto":
        if isinstance(compressor, NoCompression):
            return None
        exchange = "all_reduce" if compressor.linear else "two_way"
    if exchange == "all_reduce" and not compressor.linear:
        raise ValueError(
            f"exchange='all_reduce' adds up payloads, which {compressor!r} does not allow; "
            "use exchange='two_way' (any number of ranks) or 'all_gather' (a few ranks)."
        )
    return TOPOLOGIES[exchange]


def _memory(compressor: Compressor, memory: MemoryName | ErrorFeedback) -> ErrorFeedback | None:
    if isinstance(memory, ErrorFeedback):
        return memory
    if memory not in get_args(MemoryName):
        raise ValueError(f"memory={memory!r} is unknown; known are {', '.join(get_args(MemoryName))} or an ErrorFeedback().")
    if memory == "none" and not compressor.unbiased:
        warnings.warn(
            f"{compressor!r} is biased and memory='none' drops what it leaves out: expect a loss of accuracy. "
            "Use memory='error_feedback' (the default for biased compressors).",
            stacklevel=2,
        )
    feedback = memory == "error_feedback" or (memory == "auto" and not compressor.unbiased)
    return ErrorFeedback() if feedback else None


def _same_type(compressor: Compressor, rule: DenseRule) -> Compressor:
    """The dense code of an all-reduce: its payload is one tensor, so small tensors ride in it in the same number format."""
    name = _FORMATS[compressor.value_dtype]
    if rule.code not in ("auto", name):
        raise ValueError(f"exchange='all_reduce' sends one tensor of {name}; dense={rule.code!r} does not fit, use 'auto'.")
    return Cast(name)


_FORMATS: dict[torch.dtype, Literal["fp32", "fp16", "bf16"]] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}

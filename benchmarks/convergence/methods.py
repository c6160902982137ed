"""What is compared: an optimizer and an exchange under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_compress import (
    CenteredTopK,
    Compressor,
    DenseRule,
    DensityWarmup,
    LinearDithering,
    MomentumCorrection,
    OneBit,
    Quantize,
    Ternary,
    TopK,
)
from lightning_compress.memory import SharedMomentum
from lightning_compress.optim import DGCSGD, LANS, CompressedAdam

MOMENTUM = 0.9
CLIP_NORM = 1.0
"""Threshold for the summed gradient: with 4 workers, each clips its own gradient's norm to 2."""
PAPER_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)

Exchange = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        make_optimizer: From parameters and learning rate.
        make_exchange: Arguments of ``SimulatedExchange`` for a run of so many steps.
        optimizer: The optimizer's name in the results.
        lr: Peak learning rate.
        warmup: Share of the run over which it rises.
    """

    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    make_exchange: Callable[[int], Exchange]
    optimizer: str = "sgd"
    lr: float = 0.1
    warmup: float = 0.0


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """SGD with momentum: dense runs, and error feedback with the momentum after the exchange."""
    return torch.optim.SGD(parameters, lr, momentum=MOMENTUM)


def dgc_sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer that goes with momentum correction."""
    return DGCSGD(parameters, lr, momentum=MOMENTUM)


def warmup(share: float, dense: float = 0.0) -> Callable[[int], Exchange]:
    """The paper's densities over ``share`` of the run, after ``dense`` of it without compression."""

    def exchange(steps: int) -> Exchange:
        stage = max(1, round(share * steps / len(PAPER_DENSITIES)))
        schedule = DensityWarmup(PAPER_DENSITIES, steps=stage) if share else None
        return {"schedule": schedule, "start_step": round(dense * steps)}

    return exchange


def dgc(
    density: float = 0.01,
    plan: Callable[[int], Exchange] | None = None,
    *,
    correction: bool = True,
    clip: bool = True,
    masking: bool = True,
    exchange: str = "two_way",
    **topk: Any,
) -> Method:
    """Deep Gradient Compression with all its parts, or without some of them; by default warmed up over a tenth of the run.

    Clipping and masking act inside momentum correction: without it (error feedback, momentum after the exchange) they go too.
    """
    memory = (
        MomentumCorrection(MOMENTUM, clip_norm=CLIP_NORM if clip else None, factor_masking=masking)
        if correction
        else "error_feedback"
    )

    def make(steps: int) -> Exchange:
        return {
            "compressor": TopK(density, **topk),
            "memory": memory,
            "exchange": exchange,
            **(plan or warmup(0.1))(steps),
        }

    return Method(dgc_sgd if correction else sgd, make)


LANS_LR, ADAM_LR, ADAPTIVE_WARMUP = 0.01, 2e-3, 0.1
"""For the tiny BERT: found by the table ``clan_lr``, where the same rate was best for dense and for compressed runs."""
FREEZE = 0.2
"""Share of a run after which momenta are exchanged."""


def lans(exchange: Callable[[int], Exchange]) -> Method:
    """LANS; with a compressing exchange, CLAN."""
    return Method(lambda parameters, lr: LANS(_decayed(parameters), lr), exchange, "lans", LANS_LR, ADAPTIVE_WARMUP)


def adamw(exchange: Callable[[int], Exchange]) -> Method:
    """AdamW; torch's, to float rounding."""
    return _compressed_adam("adam", exchange, "adamw", ADAM_LR)


def momentum(update: Any, **settings: Any) -> Method:
    """Dense until ``FREEZE``, then momenta are exchanged: 1-bit Adam, or its LAMB."""

    def exchange(steps: int) -> Exchange:
        freeze = max(1, round(FREEZE * steps))
        return {"memory": SharedMomentum(freeze), "start_step": freeze, **settings}

    name, lr = ("adamw", ADAM_LR) if update == "adam" else ("lans", LANS_LR)
    return _compressed_adam(update, exchange, name, lr)


def _compressed_adam(update: Any, exchange: Callable[[int], Exchange], name: str, lr: float) -> Method:
    return Method(
        lambda parameters, rate: CompressedAdam(_decayed(parameters), rate, update=update, normalize_grad=False),
        exchange,
        name,
        lr,
        ADAPTIVE_WARMUP,
    )


def _decayed(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Weights with decay, norms and biases without."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        groups[parameter.ndim > 1].append(parameter)
    return [{"params": groups[True], "weight_decay": 0.01}, {"params": groups[False], "weight_decay": 0.0}]


def coded(compressor: Compressor | str, dense: float = 0.0, **settings: Any) -> Callable[[int], Exchange]:
    """A compressor from the first step on, or after the share ``dense`` of the run."""
    return lambda steps: {"compressor": compressor, "start_step": round(dense * steps), **settings}


CLAN: dict[str, Method] = {
    "lans_dense": lans(coded("none")),
    "clan_onebit": lans(coded(OneBit(), exchange="two_way")),
    "clan_topk_0.001": lans(coded(TopK(0.001), exchange="two_way")),
    "clan_topk_0.01": lans(coded(TopK(0.01), exchange="two_way")),
    "clan_dithering_7": lans(coded(LinearDithering(7), exchange="two_way")),
    "adamw_dense": adamw(coded("none")),
    "adamw_onebit": adamw(coded(OneBit(), exchange="two_way")),
    "onebit_adam": momentum("adam", compressor=OneBit()),
}
_RATES = {"lans": (0.003, 0.01, 0.03), "adamw": (7e-4, 2e-3, 6e-3)}
SEARCH: dict[str, Method] = {
    f"{name}_lr_{lr:g}": replace(CLAN[name], lr=lr)
    for name in ("lans_dense", "clan_onebit", "clan_topk_0.01", "clan_dithering_7", "adamw_dense", "adamw_onebit")
    for lr in _RATES[CLAN[name].optimizer]
}
"""The learning rates are searched alike for dense and compressed runs, with a seed that no other table uses."""
_WITHOUT_EMBEDDINGS = DenseRule(patterns=("*word_embeddings*",))
CLAN_CANDIDATES: dict[str, Method] = {
    "clan_onebit_dense_0.2": lans(coded(OneBit(), 0.2)),
    "clan_onebit_block_256": lans(coded(OneBit(block_size=256))),
    "clan_onebit_without_embeddings": lans(lambda _: {"compressor": OneBit(), "dense": _WITHOUT_EMBEDDINGS}),
    "clan_onebit_momentum": momentum("lans", compressor=OneBit()),
    "clan_topk_0.01_dense_0.2": lans(coded(TopK(0.01), 0.2)),
    "clan_centered_0.06": lans(coded(CenteredTopK(0.06))),
    "clan_ternary": lans(coded(Ternary())),
    "clan_quantize_4": lans(coded(Quantize(4))),
    "ternary_adam": momentum("adam", compressor=Ternary()),
}
"""What closes the difference: dense steps first, smaller blocks, momenta, gentler codes."""

CANDIDATES: dict[str, Method] = {
    "dgc_0.01_no_clipping_dense_0.1": dgc(plan=warmup(0.1, dense=0.1), clip=False),
    "dgc_0.03_no_clipping": dgc(0.03, clip=False),
    "dgc_0.01_one_way": dgc(exchange="all_gather"),
    "dgc_0.01_dense_0.2": dgc(plan=warmup(0.1, dense=0.2)),
    "dgc_0.01_block_256": dgc(block_size=256),
    "dgc_0.01_whole_tensors": dgc(block_size=None),
    "dgc_0.03": dgc(0.03),
    "dgc_0.06": dgc(0.06),
    "dgc_0.06_dense_0.1": dgc(0.06, warmup(0.1, dense=0.1)),
    "dgc_0.03_one_way_dense_0.1": dgc(0.03, warmup(0.1, dense=0.1), exchange="all_gather"),
    "dgc_0.06_one_way_dense_0.1": dgc(0.06, warmup(0.1, dense=0.1), exchange="all_gather"),
}
"""Where is the difference to dense within the spread of the seeds? Named by density and what else differs from the default."""

METHODS: dict[str, Method] = {
    "dense": Method(sgd, lambda _: {"compressor": "none"}),
    "dgc_0.01": dgc(),
    "dgc_0.01_no_correction": dgc(correction=False),
    "dgc_0.01_no_clipping": dgc(clip=False),
    "dgc_0.01_no_masking": dgc(masking=False),
    "dgc_0.01_no_warmup": dgc(plan=warmup(0.0)),
    "dgc_0.001": dgc(0.001),
    **CANDIDATES,
    **CLAN,
    **CLAN_CANDIDATES,
    **SEARCH,
}

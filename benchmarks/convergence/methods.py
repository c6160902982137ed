"""What is compared: an optimizer and an exchange under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.powersgd import PowerSGD
from benchmarks.convergence.relaxed import Relaxed
from lightning_compress import (
    CenteredTopK,
    Compressor,
    DenseRule,
    DensityWarmup,
    LinearDithering,
    MomentumCorrection,
    NaturalDithering,
    OneBit,
    Quantize,
    RandomK,
    Ternary,
    TopK,
)
from lightning_compress.memory import SharedMomentum
from lightning_compress.optim import DGCSGD, LANS, CompressedAdam
from lightning_compress.testing import SimulatedExchange

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
        make_exchange: Arguments of ``simulator`` for a run of so many steps.
        optimizer: The optimizer's name in the results.
        lr: Peak learning rate; None: the task's, for this optimizer.
        warmup: Share of the run over which it rises.
        simulator: What exchanges the gradients of simulated workers.
    """

    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    make_exchange: Callable[[int], Exchange]
    optimizer: str = "sgd"
    lr: float | None = None
    warmup: float = 0.0
    simulator: Callable[..., SimulatedExchange] = SimulatedExchange


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


def corrected(compressor: Compressor) -> Method:
    """Momentum correction alone, with a code that is not top-k."""
    return Method(dgc_sgd, coded(compressor, memory=MomentumCorrection(MOMENTUM)))


ADAPTIVE_WARMUP = 0.1
FREEZE = 0.2
"""Share of a run after which momenta are exchanged."""


def lans(exchange: Callable[[int], Exchange]) -> Method:
    """LANS; with a compressing exchange, CLAN."""
    return Method(lambda parameters, lr: LANS(_decayed(parameters), lr), exchange, "lans", warmup=ADAPTIVE_WARMUP)


def adamw(exchange: Callable[[int], Exchange]) -> Method:
    """AdamW; torch's, to float rounding."""
    return _compressed_adam("adam", exchange)


def momentum(update: Any, **settings: Any) -> Method:
    """Dense until ``FREEZE``, then momenta are exchanged: 1-bit Adam, or its LAMB."""

    def exchange(steps: int) -> Exchange:
        freeze = max(1, round(FREEZE * steps))
        return {"memory": SharedMomentum(freeze), "start_step": freeze, **settings}

    return _compressed_adam(update, exchange)


def _compressed_adam(update: Any, exchange: Callable[[int], Exchange]) -> Method:
    return Method(
        lambda parameters, rate: CompressedAdam(_decayed(parameters), rate, update=update, normalize_grad=False),
        exchange,
        "adamw" if update == "adam" else "lans",
        warmup=ADAPTIVE_WARMUP,
    )


def _decayed(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Weights with decay, norms and biases without."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        groups[parameter.ndim > 1].append(parameter)
    return [{"params": groups[True], "weight_decay": 0.01}, {"params": groups[False], "weight_decay": 0.0}]


def coded(compressor: Compressor | str, after: float = 0.0, **settings: Any) -> Callable[[int], Exchange]:
    """A compressor from the first step on, or after that share of the run."""
    return lambda steps: {"compressor": compressor, "start_step": round(after * steps), **settings}


_ALL_MATRICES = DenseRule(max_numel=0)
"""Beside a sparse code, the 8 bits of tensors of up to 1024 elements are most of what a small network sends."""
EXCHANGES: dict[str, Callable[[int], Exchange]] = {
    "onebit": coded(OneBit(), exchange="two_way"),
    "topk_0.01": coded(TopK(0.01), exchange="two_way"),
    "topk_0.001": coded(TopK(0.001), exchange="two_way"),
    "randomk_1_32": coded(RandomK(1 / 32)),
    "dithering_5": coded(LinearDithering(5), exchange="two_way"),
    "dithering_7": coded(LinearDithering(7), exchange="two_way"),
    "natural_3": coded(NaturalDithering(3), exchange="two_way"),
    "ternary": coded(Ternary()),
    **{f"quantize_{bits}": coded(Quantize(bits)) for bits in (8, 4, 3, 2)},
    **{
        f"centered_{ratio:g}": coded(CenteredTopK(ratio, block_size))
        for ratio, block_size in ((0.12, 256), (0.06, 256), (0.03, 1024), (0.01, 4096), (0.003, 4096))
    },
    "centered_0.03_dense_0.1": coded(CenteredTopK(0.03, 1024), 0.1),
    "centered_0.01_dense_0.1": coded(CenteredTopK(0.01, 4096), 0.1),
    "centered_0.003_dense_0.1": coded(CenteredTopK(0.003, 4096), 0.1),
    "centered_0.03_all_matrices": coded(CenteredTopK(0.03, 1024), dense=_ALL_MATRICES),
    "centered_0.01_all_matrices_dense_0.1": coded(CenteredTopK(0.01, 4096), 0.1, dense=_ALL_MATRICES),
    "centered_0.03_one_way": coded(CenteredTopK(0.03, 1024), exchange="all_gather"),
    "centered_0.01_one_way_dense_0.1": coded(CenteredTopK(0.01, 4096), 0.1, exchange="all_gather"),
    "control": coded(TopK(0.0005), exchange="two_way"),
}
"""The papers' exchanges, ours, and a control that must lose: they go with any optimizer, whose momentum comes after them."""
POWERSGD: dict[str, Callable[[int], Exchange]] = {
    f"powersgd_{rank}": (lambda _, rank=rank: {"powersgd_rank": rank}) for rank in (1, 2, 4)
}


def _of_all(name: str, train: Callable[[Callable[[int], Exchange]], Method]) -> dict[str, Method]:
    """Every exchange under one optimizer."""
    ours = {name.format(exchange): train(make) for exchange, make in EXCHANGES.items()}
    theirs = {name.format(exchange): replace(train(make), simulator=PowerSGD) for exchange, make in POWERSGD.items()}
    return ours | theirs


SGD: dict[str, Method] = {
    "dense": Method(sgd, lambda _: {"compressor": "none"}),
    **_of_all("{}", lambda exchange: Method(sgd, exchange)),
    "dgc_0.01": dgc(),
    "ternary_correction": corrected(Ternary()),
    "centered_0.06_correction": corrected(CenteredTopK(0.06)),
    "centered_0.01_correction": corrected(CenteredTopK(0.01, 4096)),
}
_MOMENTA: dict[str, Compressor] = {
    "onebit": OneBit(),
    "ternary": Ternary(),
    "centered_0.06": CenteredTopK(0.06),
    "centered_0.01": CenteredTopK(0.01, 4096),
}
CLAN: dict[str, Method] = {
    "lans_dense": lans(coded("none")),
    **_of_all("clan_{}", lans),
    **{f"clan_{code}_momentum": momentum("lans", compressor=compressor) for code, compressor in _MOMENTA.items()},
}
ADAMW: dict[str, Method] = {
    "adamw_dense": adamw(coded("none")),
    **_of_all("adamw_{}", adamw),
    **{f"{code}_adam": momentum("adam", compressor=compressor) for code, compressor in _MOMENTA.items()},
}
_RATES = {"sgd": (0.01, 0.03, 0.1, 0.3), "lans": (0.003, 0.01, 0.03), "adamw": (2e-4, 7e-4, 2e-3, 6e-3)}
_SEARCHED = (
    *("dense", "ternary", "centered_0.06", "dgc_0.01"),
    *("lans_dense", "clan_onebit", "clan_topk_0.01", "clan_dithering_7", "clan_ternary", "clan_centered_0.06"),
    *("adamw_dense", "adamw_onebit", "adamw_ternary", "adamw_centered_0.06"),
)
SEARCH: dict[str, Method] = {
    f"{name}_lr_{lr:g}": replace(method, lr=lr)
    for name, method in ((name, (SGD | CLAN | ADAMW)[name]) for name in _SEARCHED)
    for lr in _RATES[method.optimizer]
}
"""The learning rates are searched alike for dense and compressed runs, with a seed that no other table uses."""
_WITHOUT_EMBEDDINGS = DenseRule(patterns=("*word_embeddings*",))
CLAN_CANDIDATES: dict[str, Method] = {
    "clan_onebit_dense_0.2": lans(coded(OneBit(), 0.2)),
    "clan_onebit_block_256": lans(coded(OneBit(block_size=256))),
    "clan_onebit_without_embeddings": lans(lambda _: {"compressor": OneBit(), "dense": _WITHOUT_EMBEDDINGS}),
    "clan_topk_0.01_dense_0.2": lans(coded(TopK(0.01), 0.2)),
}
"""What closes the difference: dense steps first, smaller blocks, embeddings left out."""

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

RELAXED: dict[str, Method] = {
    f"{name}_times_{factor:g}": Method(sgd, coded(Relaxed(compressor, factor)))
    for name, compressor, factors in (
        ("centered_0.03", CenteredTopK(0.03, 1024), (0.5, 0.75, 1.25)),
        ("centered_0.01", CenteredTopK(0.01, 4096), (0.5, 0.75)),
        ("topk_0.01", TopK(0.01), (1.3, 1.7, 2.0)),
        ("onebit", OneBit(), (0.5, 1.5)),
    )
    for factor in factors
}
"""Where is the best amplitude? ``CenteredTopK`` sends twice its threshold, top-k what it has."""

METHODS: dict[str, Method] = {
    **SGD,
    **CLAN,
    **ADAMW,
    "dgc_0.01_no_correction": dgc(correction=False),
    "dgc_0.01_no_clipping": dgc(clip=False),
    "dgc_0.01_no_masking": dgc(masking=False),
    "dgc_0.01_no_warmup": dgc(plan=warmup(0.0)),
    "dgc_0.001": dgc(0.001),
    **CANDIDATES,
    **CLAN_CANDIDATES,
    **RELAXED,
    **SEARCH,
}

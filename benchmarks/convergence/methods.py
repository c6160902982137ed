"""What is compared: an optimizer and an exchange under a name, and the tables that they fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_compress import DensityWarmup, MomentumCorrection, TopK
from lightning_compress.optim import DGCSGD

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
    """

    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    make_exchange: Callable[[int], Exchange]
    optimizer: str = "sgd"


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


_CANDIDATES: dict[str, Method] = {
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
    **_CANDIDATES,
}


@dataclass(frozen=True)
class Table:
    """The runs that one command makes.

    Attributes:
        methods: Names from ``METHODS``; the first is what the others are compared with.
        seeds: Every method runs with each.
        steps: Length of a run.
        about: What the table shows.
        task: Name from ``tasks.TASKS``.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    about: str
    task: str = field(default="resnet8_fashion_mnist")


TABLES: dict[str, Table] = {
    "dgc": Table(
        ("dense", "dgc_0.01", *(f"dgc_0.01_no_{part}" for part in ("correction", "clipping", "masking", "warmup"))),
        (0, 1, 2),
        2000,
        "Deep Gradient Compression at 1 %, and without each of its parts",
    ),
    "dgc_curve": Table(
        ("dense", "dgc_0.001"), (0,), 4000, "Deep Gradient Compression at 0.1 % over the steps of one run"
    ),
    "dgc_settings": Table(
        ("dense", "dgc_0.01", *_CANDIDATES),
        (0, 1, 2),
        2000,
        "Settings of Deep Gradient Compression: which cost nothing that can be seen?",
    ),
}

"""What the recipes' optimizers have in common: which parameters decay, and how the learning rate moves from step to step."""

import math
from collections.abc import Callable
from typing import Any, Literal

from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_compress.optim import LANS, CompressedAdam

Schedule = Callable[[int, int, int], float]
AdaptiveOptimizer = Literal["adamw", "lans", "compressed_adam"]
ADAPTIVE_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "lans": LANS,
    "compressed_adam": CompressedAdam,
}


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups: weights with decay, norms and biases (all one-dimensional) without."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def adaptive_optimizer(name: AdaptiveOptimizer, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return an optimizer by its name, with BERT's constants: betas 0.9 and 0.999, eps 1e-6.

    Args:
        name: ``"adamw"`` is torch's; ``"lans"`` takes larger rates and batches; ``"compressed_adam"`` is LANS with the settings
            of its compressed exchange (CLAN), for ``strategy: compressed_clan``.
        groups: What :func:`parameter_groups` returned.
        lr: Highest learning rate.
    """
    return ADAPTIVE_OPTIMIZERS[name](groups, lr=lr, betas=(0.9, 0.999), eps=1e-6)


def check_adaptive_optimizer(name: str) -> None:
    """Raise a ValueError unless :func:`adaptive_optimizer` knows the name."""
    if name not in ADAPTIVE_OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} is unknown; choose one of {', '.join(ADAPTIVE_OPTIMIZERS)}")


def scheduled(module: LightningModule, optimizer: Optimizer, warmup: float, schedule: Schedule) -> OptimizerLRScheduler:
    """Return what ``configure_optimizers`` does: the optimizer, and a learning rate that changes with every step of it.

    Args:
        module: The model, attached to a Trainer.
        optimizer: Its learning rate is the highest one.
        warmup: Share of all optimizer steps in which the learning rate rises, in [0, 1).
        schedule: :func:`warmup_cosine` or :func:`warmup_linear`.

    Raises:
        ValueError: If training has no end.
    """
    total = module.trainer.estimated_stepping_batches
    if math.isinf(total):
        raise ValueError("the learning rate's schedule needs an end: set max_epochs or max_steps of the Trainer")
    warmup_steps = round(warmup * total)
    by_step = LambdaLR(optimizer, lambda step: schedule(step, warmup_steps, int(total)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step"}}


def check_warmup(warmup: float) -> None:
    """Raise a ValueError unless ``warmup`` is a share of all steps."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a share of all steps, in [0, 1)")


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then half a cosine to zero.

    Args:
        step: Number of optimizer steps already taken.
        warmup_steps: Length of the linear rise. Step ``warmup_steps - 1`` is the first at the full rate.
        total_steps: Step at which the cosine reaches zero; the factor stays there afterwards.

    Returns:
        A factor in [0, 1].
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup_steps, total_steps)))


def warmup_linear(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then a linear fall to zero; arguments as above."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 1.0 - _progress(step, warmup_steps, total_steps)


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """How much of the time after the warm-up is over, in [0, 1]."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))

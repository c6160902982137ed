"""Which optimizers go with momentum correction, and how they learn what it corrects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.optim.dgc_sgd import CORRECTED, DGCSGD

if TYPE_CHECKING:
    from lightning_compress.exchange.plan import BlockPlan


def mark_corrected(parameters: Mapping[str, torch.Tensor], plan: BlockPlan | None) -> None:
    """Tells ``DGCSGD`` which parameters arrive as velocities; without a plan, none does."""
    sizes = {} if plan is None else plan.velocity_sizes()
    for name, parameter in parameters.items():
        setattr(parameter, CORRECTED, sizes.get(name, 0) > 0)


def require_compatible(optimizer: torch.optim.Optimizer, memory: Any) -> None:
    """Refuses an optimizer that would apply momentum to velocities, or none to what travels as gradients.

    Raises:
        ValueError: It would, or its momentum is not that of the correction.
    """
    if not isinstance(memory, MomentumCorrection):
        return
    remedy = f"use lightning_compress.optim.DGCSGD(momentum={memory.momentum}, nesterov={memory.nesterov})"
    if isinstance(optimizer, DGCSGD):
        for group in optimizer.param_groups:
            if (group["momentum"], group["nesterov"]) != (memory.momentum, memory.nesterov):
                raise ValueError(
                    f"DGCSGD has momentum={group['momentum']}, nesterov={group['nesterov']} and MomentumCorrection has "
                    f"momentum={memory.momentum}, nesterov={memory.nesterov}: give both the same, also in every group, and "
                    "a schedule that moves the momentum (OneCycleLR, CyclicLR) cycle_momentum=False."
                )
    elif not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"MomentumCorrection exchanges velocities, which {type(optimizer).__name__} would treat as gradients: "
            f"{remedy}, or keep the optimizer and use memory='error_feedback'."
        )
    elif any(group["momentum"] for group in optimizer.param_groups):
        raise ValueError(
            f"torch.optim.SGD(momentum=...) would apply momentum twice under MomentumCorrection: {remedy}."
        )
    elif memory.momentum:
        raise ValueError(
            "Small tensors, which travel as gradients, and weight decay need momentum too, which torch.optim.SGD without "
            f"momentum does not give them: {remedy}."
        )

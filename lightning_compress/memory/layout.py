"""How a parameter's gradient lies in a DDP bucket."""

from __future__ import annotations

import torch


def real_numel(parameter: torch.Tensor) -> int:
    """Real numbers in the parameter's gradient."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def bucket_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides of the parameter's slot: its own if its elements fill a run of memory, else those of a contiguous tensor."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if reach == parameter.numel():
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())

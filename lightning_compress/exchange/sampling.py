"""How large the residuals are beside the gradients, judged by a few thousand elements of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_compress.exchange.rank import RankExchange

_ELEMENTS = 256
"""Of each sampled parameter."""
_PARAMETERS = 16
"""Sampled parameters, spread evenly over the model."""


def sample_norms(exchange: RankExchange) -> tuple[float, float] | None:
    """Norms of the same elements of this rank's residuals and of the exchanged gradients in ``.grad``.

    Read between the exchange and the optimizer step, by the training loop: the exchange itself never waits for it.

    In a hierarchical exchange they are of this rank's shard.

    Returns:
        (residual norm, gradient norm); None where nothing is remembered or no gradient is there.
    """
    pairs = list(_pairs(exchange))
    if not pairs:
        return None
    residual, gradient = (torch.cat([part.double() for part in side]).norm() for side in zip(*pairs, strict=True))
    return float(residual), float(gradient)


def _pairs(exchange: RankExchange) -> Iterator[tuple[Tensor, Tensor]]:
    parameters = exchange.parameters
    for name in _spread([name for name, p in parameters.items() if p.dim() > 1] or list(parameters)):
        parameter = parameters[name]
        residual, gradient = exchange.memories.read("worker", name, parameter.dtype), parameter.grad
        if residual is None or gradient is None or gradient.is_sparse or not len(residual):
            continue
        values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        yield _strided(residual), _strided(_in_memory_order(values.detach())[exchange.plan.held(name)])


def _spread(names: list[str]) -> Iterable[str]:
    return names[:: max(1, len(names) // _PARAMETERS)]


def _strided(flat: Tensor) -> Tensor:
    return flat[:: max(1, len(flat) // _ELEMENTS)]


def _in_memory_order(gradient: Tensor) -> Tensor:
    """The gradient flat, without copying one that fills a run of memory (residuals lie in that order)."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    if reach == gradient.numel():
        return gradient.as_strided((reach,), (1,), gradient.storage_offset())
    return gradient.flatten()

"""What an exchange owes to the model when it ends before its time: it joins the gradients that come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.exchange.rank import RankExchange
from lightning_compress.kernels.table import PRESENT
from lightning_compress.memory.layout import real_numel

_SIDES = ("worker", "owner")


def repay(exchange: RankExchange, names: Sequence[str], status: Tensor, buffer: Tensor, scale: float | Tensor) -> None:
    """Adds what ``exchange`` owes for a bucket's parameters to this rank's gradient, and forgets it there.

    What is owed to the model is mean(worker residuals) + owner residual. The gradients will be averaged over the N ranks, so
    each adds its worker residual, and N times what it owes as an owner. In a hierarchical exchange a node is the worker: each
    of its ranks adds its shard of the node's residual, as many times as the node has ranks.

    Args:
        exchange: The one that ended.
        names: The bucket's parameters.
        status: Which of them take part on this rank; the others stay owed.
        buffer: Their gradients.
        scale: The loss scale of the gradients.
    """
    if buffer.is_sparse:
        return
    place = 0
    number, _ = exchange.nodes.position("nodes", exchange.rank)
    for name, seen in zip(names, status.tolist(), strict=True):
        size = real_numel(exchange.parameters[name])
        part = buffer[place : place + size]
        place += size
        for side in _SIDES if seen == PRESENT else ():
            owed = exchange.memories.take(side, name, buffer.dtype)
            if owed is None or not len(owed):
                continue
            if side == "worker":
                part[exchange.plan.held(name)] += (scale * exchange.nodes.size * owed).to(part.dtype)
            else:
                mine = exchange.plan.owned_elements(name, number).to(part.device)
                part.index_add_(0, mine, (scale * exchange.world_size * owed).to(part.dtype))


class Debt:
    """What is left of an exchange that others follow, until it is paid.

    A parameter that takes no part stays owed until it does. Under a loss scaler a payment in a step that is skipped has not
    happened.

    Args:
        exchange: The one that ended.
    """

    def __init__(self, exchange: RankExchange) -> None:
        self.exchange = exchange
        self._left = set(exchange.parameters)

    def repay(self, names: Sequence[str], status: Tensor, buffer: Tensor, scale: float | Tensor) -> None:
        """See the function."""
        repay(self.exchange, names, status, buffer, scale)
        self._left.difference_update(name for name, seen in zip(names, status.tolist(), strict=True) if seen == PRESENT)

    def paid(self) -> bool:
        """Whether nothing is owed any more; asked between steps, looks through the memories only when it may be so."""
        if self._left:
            return False
        memories, parameters = self.exchange.memories, self.exchange.parameters
        for name, parameter in parameters.items():
            owed = [memories.read(side, name, parameter.dtype) for side in _SIDES]
            if any(bool(torch.any(one != 0)) for one in owed if one is not None):
                self._left.add(name)
        return not self._left

"""The guard against adding gradients to what has been exchanged, where that is a velocity or a momentum."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class AccumulationGuard:
    """Fails in a backward that adds to a ``.grad`` in which no gradient stands.

    DDP exchanges what ``.grad`` holds after the backward. A velocity that still stands there would be sent again, as a
    gradient: with two synchronized backwards a step it grows without bound.

    Args:
        parameters: Those that are exchanged, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._exchanged: set[str] = set()
        self._handles = [p.register_hook(_Check(self._exchanged, name, p)) for name, p in parameters.items()]

    def note_exchange(self, names: Iterable[str]) -> None:
        """No gradients stand in the ``.grad`` of these any more."""
        self._exchanged.update(names)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class _Check:
    """Called before a gradient is added to its parameter's."""

    def __init__(self, exchanged: set[str], name: str, parameter: torch.nn.Parameter) -> None:
        self._exchanged, self._name = exchanged, name
        self._parameter = weakref.ref(parameter)  # which holds this hook

    def __call__(self, _: Tensor) -> None:
        if self._name not in self._exchanged:
            return
        parameter = self._parameter()
        if parameter is not None and parameter.grad is not None and bool(parameter.grad.any()):
            raise RuntimeError(
                f"lightning-compress: this backward adds to the exchanged velocity or momentum of {self._name!r} as if it "
                "were a gradient. Call optimizer.zero_grad() before each backward, and toggle_optimizer() where optimizers "
                "take turns. To accumulate use accumulate_grad_batches, or ddp.no_sync() (in Lightning's manual optimization "
                "trainer.strategy.block_backward_sync()) around all backwards but the last, without static_graph."
            )
        self._exchanged.discard(self._name)

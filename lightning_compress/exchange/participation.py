"""Which parameters the backward has reached since their last exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_compress.kernels.table import ABSENT, PRESENT


class Participation:
    """The fresh set.

    DDP calls its hook also for slots that hold zeros or an old, already exchanged gradient; what is not fresh must send
    nothing and touch no memory. The hooks fire at every accumulation of a gradient, ``no_sync`` included, before DDP's own.

    Args:
        parameters: Names and parameters, each parameter once.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._fresh: set[str] = set()
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(_Note(self._fresh, name)) for name, parameter in parameters
        ]

    def take(self, names: Sequence[str]) -> Tensor:
        """The status of the parameters ``names``, uint8; they are not fresh any more."""
        status = [PRESENT if name in self._fresh else ABSENT for name in names]
        self._fresh.difference_update(names)
        return torch.tensor(status, dtype=torch.uint8)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class _Note:
    """A hook that notes a name (an object: a copied model must not carry a closure over this one)."""

    def __init__(self, fresh: set[str], name: str) -> None:
        self._fresh, self._name = fresh, name

    def __call__(self, _parameter: Tensor) -> None:
        self._fresh.add(self._name)

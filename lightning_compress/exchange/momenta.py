"""What the exchange asks of the optimizers that it serves: their settings, and their momenta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.optim.compressed_adam import CompressedAdam


class Momenta:
    """The first moments of the ``CompressedAdam``s of one model.

    Args:
        optimizers: Those that serve the model; others than ``CompressedAdam`` are left out.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self.optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, CompressedAdam)]
        self._of: dict[int, CompressedAdam] = {}
        for optimizer in self.optimizers:
            self._of.update((id(p), optimizer) for group in optimizer.param_groups for p in group["params"])

    def announce(self, momenta: bool) -> None:
        """Says what the next step's ``grad`` will be."""
        for optimizer in self.optimizers:
            optimizer.receive(momenta)

    def of(self, parameter: Tensor) -> tuple[float, Tensor | None]:
        """See ``CompressedAdam.momentum``."""
        return self._of[id(parameter)].momentum(parameter)

    def serve(self, memory: Any, parameters: Mapping[str, Tensor]) -> None:
        """Tells the optimizers what is exchanged, and checks that every momentum is at hand if it is to be.

        Raises:
            ValueError: It is not; the message names the parameter.
        """
        for optimizer in self.optimizers:
            optimizer.attach(parameters)
        if not isinstance(memory, SharedMomentum):
            return
        for name, parameter in parameters.items():
            if id(parameter) not in self._of:
                raise ValueError(
                    f"exchanged='momentum' needs every trainable parameter in a CompressedAdam, and {name} is in none: "
                    "add it, or freeze it (requires_grad_(False)); with plain DDP use register_comm_hook(ddp, optimizer=...)."
                )


def agreed_settings(said: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]) -> ExchangeSettings | None:
    """The settings that an exchange and its optimizers have said together; None if the optimizers say nothing.

    Args:
        said: Arguments that the exchange was given.
        optimizers: Those that serve the model.

    Raises:
        ValueError: Both say something, and not the same; the message shows both.
    """
    adams = [optimizer for optimizer in optimizers if isinstance(optimizer, CompressedAdam)]
    if not adams:
        return None
    settings = [_agreed(dict(said), adam) for adam in adams]
    for other in settings[1:]:
        if other != settings[0]:
            raise ValueError(
                "The CompressedAdams of one model share one exchange and need the same settings: one has "
                f"{settings[0]!r}, another {other!r}."
            )
    return settings[0]


def _agreed(said: dict[str, Any], adam: CompressedAdam) -> ExchangeSettings:
    theirs = adam.exchange_arguments
    if isinstance(theirs.get("memory"), SharedMomentum) and said.get("memory") == "error_feedback":
        del said["memory"]  # which it is
    together = {**adam.exchange_defaults, **theirs, **said}
    settings = ExchangeSettings.make(**together)
    for name in said.keys() & theirs.keys():
        if ExchangeSettings.make(**{**together, name: theirs[name]}) != settings:
            raise ValueError(
                f"The strategy says {name}={said[name]!r} and CompressedAdam says {name}={theirs[name]!r}: leave one of them "
                "out (strategy='compressed' says nothing)."
            )
    return settings

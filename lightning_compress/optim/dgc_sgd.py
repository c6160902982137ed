"""The optimizer for exchanges that carry velocities instead of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_compress.checks import check_not_negative, is_number

CORRECTED = "lightning_compress_corrected"
"""Attribute of a parameter whose gradient, after the exchange, is a velocity."""


class DGCSGD(Optimizer):
    """SGD with momentum and weight decay for ``MomentumCorrection`` (Lin et al. 2017).

    Use it exactly as ``torch.optim.SGD(lr, momentum, weight_decay, nesterov)``. Large tensors arrive as velocities: only
    their weight decay still needs momentum, which every replica adds alike (decay without momentum, or decay compressed with
    the gradient, costs accuracy). Small tensors arrive as gradients and get the ordinary update. Where nothing is corrected
    (another strategy, one process), it is ``torch.optim.SGD``.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: The same as ``MomentumCorrection``'s, in [0, 1).
        weight_decay: L2 decay, with momentum.
        nesterov: The same as ``MomentumCorrection``'s.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose own settings are checked like the constructor's."""
        group = {**self.defaults, **param_group}
        check_not_negative(lr=group["lr"], weight_decay=group["weight_decay"])
        if not is_number(group["momentum"]) or not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']!r}")
        if group["nesterov"] and group["momentum"] == 0.0:
            raise ValueError("nesterov=True needs a momentum above 0")
        super().add_param_group(param_group)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimizer step; ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        momentum, decay, nesterov = group["momentum"], group["weight_decay"], group["nesterov"]
        gradient = parameter.grad
        assert gradient is not None
        if getattr(parameter, CORRECTED, False):
            direction = gradient
            if decay:
                direction = gradient + self._with_momentum(parameter, parameter * decay, momentum, nesterov)
        else:
            whole = gradient.add(parameter, alpha=decay) if decay else gradient
            direction = self._with_momentum(parameter, whole, momentum, nesterov)
        parameter.add_(direction, alpha=-group["lr"])

    def _with_momentum(self, parameter: Tensor, gradient: Tensor, momentum: float, nesterov: bool) -> Tensor:
        if not momentum:
            return gradient
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.clone(gradient).detach()
        else:
            state["momentum_buffer"].mul_(momentum).add_(gradient)
        buffer: Tensor = state["momentum_buffer"]
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer

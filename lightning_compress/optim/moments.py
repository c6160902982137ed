"""What optimizers with first and second moments share: state, batches of tensors, loading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_compress.checks import check_not_negative, is_number

Tensors = tuple[Tensor, ...] | list[Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")
_CPU_NUMEL = 1 << 16
"""Elements that are updated together on a CPU: few, so that they stay in its caches from one operation to the next."""
_GPU_NUMEL = 1 << 26
"""Elsewhere: many, to start few kernels, but what an update computes takes memory too."""


@dataclass
class Part:
    """Lists of tensors for ``torch._foreach_*``: values, gradients, first and second moments; all but g change in place."""

    x: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]

    def cut(self, numel: int) -> list[Part]:
        """A large tensor in pieces of ``numel`` elements; several tensors, or one that is not contiguous, stay whole."""
        lists = (self.x, self.g, self.m, self.v)
        if len(self.x) > 1 or self.x[0].numel() <= numel or not all(t.is_contiguous() for (t,) in lists):
            return [self]
        pieces = zip(*(t.view(-1).split(numel) for (t,) in lists), strict=True)
        return [Part([x], [g], [m], [v]) for x, g, m, v in pieces]


@dataclass
class Batch:
    """Tensors of one device and type that are updated together.

    Attributes:
        parameters: What is trained.
        states: The optimizer's state of each.
        values: Their values, float32 (float64) also where the parameters are narrower.
        whole: All tensors.
    """

    parameters: list[Tensor]
    states: list[dict[str, Any]]
    values: list[Tensor]
    whole: Part

    @classmethod
    def of(cls, parameters: list[Tensor], states: list[dict[str, Any]], maximize: bool) -> Batch:
        """Collects what one update needs."""
        wide = wide_dtype(parameters[0])
        gradients = [p.grad.to(wide) for p in parameters if p.grad is not None]
        if maximize:
            gradients = list(torch._foreach_neg(gradients))
        m, v = ([state[name] for state in states] for name in MOMENTS)
        values = [p.detach().to(wide) for p in parameters]
        return cls(parameters, states, values, Part(values, gradients, m, v))

    def parts(self) -> list[Part]:
        """Many small tensors in one part, or one large tensor in many."""
        return self.whole.cut(_limit(self.parameters[0]))

    def write_back(self) -> None:
        """Rounds the values into narrower parameters."""
        if self.values[0].dtype != self.parameters[0].dtype:
            torch._foreach_copy_(self.parameters, self.values)


class MomentOptimizer(Optimizer):
    """Walks through the parameter groups and keeps ``step``, ``exp_avg`` and ``exp_avg_sq`` of every parameter.

    Moments are float32 for parameters of 16 bits too: (1 - beta2) g^2 is below what these can add up.
    """

    @abstractmethod
    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        """One step of a batch's moments and values; every state's ``step`` counts it already."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimizer step; ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _batches([p for p in group["params"] if p.grad is not None]):
                batch = Batch.of(parameters, [self._state(p) for p in parameters], group["maximize"])
                self._update(batch, group)
                batch.write_back()
        return loss

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose own settings are checked like the constructor's."""
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises a ValueError that names the setting which is out of its range."""
        check_arguments(group["lr"], group["betas"], group["eps"], group["weight_decay"])

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the state of another Adam lacks what only this one has
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, or another Adam's; moments keep their type and follow their parameter's device."""
        super().load_state_dict(state_dict)
        # torch has cast them to the parameter's type
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            state = state_dict["state"].get(key, {})
            if "step" in state:
                self.state[parameter]["step"] = int(state["step"])  # torch.optim's are tensors
            for name in MOMENTS:
                if name in state:
                    self.state[parameter][name] = state[name].to(parameter.device, wide_dtype(parameter), copy=True)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            assert parameter.grad is not None
            if parameter.grad.is_sparse or parameter.is_complex():
                kind = "sparse gradients" if parameter.grad.is_sparse else "complex parameters"
                raise ValueError(f"{type(self).__name__} does not support {kind}: use another optimizer for them.")
            state["step"] = 0
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=wide_dtype(parameter))
        state["step"] += 1
        return state


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The type of a parameter's moments."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def check_arguments(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Refuses what every such optimizer refuses.

    Raises:
        ValueError: The message names the argument.
    """
    check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    if (
        not isinstance(betas, Sequence)
        or len(betas) != 2
        or not all(is_number(beta) and 0.0 <= beta < 1.0 for beta in betas)
    ):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of one device and type that are small enough together; a large one comes alone."""
    batch: list[Tensor] = []
    numel = 0
    for parameter in parameters:
        alike = batch and (batch[0].device, batch[0].dtype) == (parameter.device, parameter.dtype)
        if batch and (not alike or numel + parameter.numel() > _limit(parameter)):
            yield batch
            batch, numel = [], 0
        batch.append(parameter)
        numel += parameter.numel()
    if batch:
        yield batch


def _limit(parameter: Tensor) -> int:
    return _CPU_NUMEL if parameter.device.type == "cpu" else _GPU_NUMEL

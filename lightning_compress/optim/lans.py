"""LANS: Adam with Nesterov's momentum, normalised per tensor, for very large batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.kernels.cpu import lans as kernel
from lightning_compress.kernels.cpu.lans import Coefficients
from lightning_compress.optim.moments import Batch, MomentOptimizer, Part, Tensors

TrustClip = tuple[float, float]


class LANS(MomentOptimizer):
    """Accelerated large-batch training of BERT (Zheng et al. 2020, arXiv 2006.13484, algorithm 2).

    Per tensor x with gradient g and moments m, v (float32):

    1. g~ = g / (||g|| + eps) with ``normalize_grad``, else g.
    2. m = b1 m + b3 g~ and v = b2 v + (1 - b2) g~^2; b3 is 1 - b1 with ``grad_averaging``, else 1.
    3. den = sqrt(v / (1 - b2^t)) + eps.
    4. u = m / (1 - b1^t) / den + wd x and w = g~ / den + wd x.
    5. x = x - lr [b1 phi(||x||) / ||u|| u + b3 phi(||x||) / ||w|| w], both from the old x. A ratio is 1 where ||x|| or the
       direction's norm is 0.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate; every tensor moves by about ``lr`` times its norm, so rates that suit Adam are too small.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment, and to the norm in step 1.
        weight_decay: Decay, decoupled by default. Put biases and norms into a group with 0.
        normalize_grad: The paper's normalisation of the gradient. The runs of arXiv 2105.07829 leave it off.
        grad_averaging: Whether the gradient enters the first moment with 1 - b1.
        bias_correction: Whether both moments are corrected for their start at zero.
        decoupled_weight_decay: Off: weight_decay * x joins the gradient after step 1, and there is none in step 4.
        trust_clip: Bounds (low, high) of phi(||x||); None: phi is the identity.
        maximize: Ascends instead.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        normalize_grad: bool = True,
        grad_averaging: bool = True,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        trust_clip: TrustClip | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "normalize_grad": normalize_grad,
            "grad_averaging": grad_averaging,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
            "trust_clip": trust_clip,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @override
    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        trust_clip = group["trust_clip"]
        if trust_clip is not None and not (len(trust_clip) == 2 and 0.0 <= trust_clip[0] <= trust_clip[1]):
            raise ValueError(f"trust_clip must be (low, high) with 0 <= low <= high, or None, got {trust_clip!r}")

    @override
    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        lans_update(batch, group)


def lans_update(batch: Batch, group: dict[str, Any], accumulates: bool = True) -> None:
    """Steps 1 to 5 on a batch (see ``LANS``, whose arguments ``group`` holds).

    Without ``accumulates`` the moments are given and there is no gradient: u alone moves x, with the weight 1.
    """
    lr, eps, (beta1, beta2), decay = group["lr"], group["eps"], group["betas"], group["weight_decay"]
    beta3 = 1.0 - beta1 if group["grad_averaging"] else 1.0
    factors = _normalising(batch, eps) if group["normalize_grad"] and accumulates else None
    joined, decoupled = (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)
    numbers = _Numbers(factors, joined, beta1, beta3, beta2, decoupled, Scales.of(batch, group))
    way = (_Compiled if accumulates and _Compiled.serves(batch) else _Foreach)(batch, numbers, accumulates)
    sizes, *lengths_of = way.directions()
    weights = (beta1, beta3) if accumulates else (1.0,)
    way.move(
        [
            -lr * q * trust_ratios(sizes, length, group["trust_clip"])
            for q, length in zip(weights, lengths_of, strict=True)
        ]
    )


@dataclass
class _Numbers:
    """What one step of a batch computes with.

    Attributes:
        factors: Normalises the gradient of every tensor, [tensors]; None where it is taken as it is.
        joined: Weight decay that joins the gradient.
        beta1: Decay of the first moment.
        beta3: Weight of the gradient in it.
        beta2: Decay of the second moment.
        decoupled: Weight decay that joins the directions.
        scales: Bias correction.
    """

    factors: Tensor | None
    joined: float
    beta1: float
    beta3: float
    beta2: float
    decoupled: float
    scales: Scales


class _Foreach:
    """The update by ``torch._foreach_*``, on any device; nothing waits for the device."""

    def __init__(self, batch: Batch, numbers: _Numbers, accumulates: bool) -> None:
        self._parts, self._numbers, self._accumulates = batch.parts(), numbers, accumulates
        self._moves: list[tuple[Tensors, ...]] = []

    def directions(self) -> Tensor:
        """Steps 2 to 4; returns the norms of x and of each direction, [1 + directions, tensors]."""
        lengths = []
        for part in self._parts:
            self._moves.append(self._directions(part))
            lengths.append(torch.stack([norms(part.x), *map(norms, self._moves[-1])]))
        lengths_of_all: Tensor = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
        return lengths_of_all

    def move(self, rates: list[Tensor]) -> None:
        """Adds the directions, each with its rate, [tensors]."""
        for part, of_part in zip(self._parts, self._moves, strict=True):
            for direction, rate in zip(of_part, rates, strict=True):
                torch._foreach_addcmul_(part.x, direction, rate.unbind())  # a rate is a number that stays on the device

    def _directions(self, part: Part) -> tuple[Tensors, ...]:
        """The u of the first moment and the w of the gradient."""
        n = self._numbers
        g: Tensors = part.g
        if self._accumulates:
            g = g if n.factors is None else torch._foreach_mul(g, list(n.factors.unbind()))
            g = torch._foreach_add(g, part.x, alpha=n.joined) if n.joined else g
            accumulate(part, g, n.beta1, n.beta2, n.beta3)
        w = torch._foreach_mul(part.x, n.decoupled)
        denominators = n.scales.denominators(part.v)
        u = torch._foreach_addcdiv(w, part.m, denominators, n.scales.first)
        if not self._accumulates:
            return (u,)
        torch._foreach_addcdiv_(w, g, denominators, n.scales.root)
        return u, w


class _Compiled:
    """The same on the CPU in two passes over memory, the second of which makes the directions anew."""

    def __init__(self, batch: Batch, numbers: _Numbers, _: bool = True) -> None:
        whole, n = batch.whole, numbers
        self._arrays = [
            [t.view(-1).numpy() for t in four] for four in zip(whole.x, whole.g, whole.m, whole.v, strict=True)
        ]
        self._real = real = self._arrays[0][0].dtype.type
        factors = [1.0] * len(whole.x) if n.factors is None else n.factors.tolist()
        self._coefficients = [
            Coefficients(
                *map(
                    real,
                    (
                        factor,
                        n.joined,
                        n.beta1,
                        n.beta3,
                        n.beta2,
                        1.0 - n.beta2,
                        first,
                        root,
                        root * n.scales.eps,
                        n.decoupled,
                    ),
                )
            )
            for factor, first, root in zip(factors, n.scales.first, n.scales.root, strict=True)
        ]

    @staticmethod
    def serves(batch: Batch) -> bool:
        """Whether all tensors are contiguous and on the CPU."""
        whole = batch.whole
        return all(t.device.type == "cpu" and t.is_contiguous() for t in chain(whole.x, whole.g, whole.m, whole.v))

    def directions(self) -> Tensor:
        """As in ``_Foreach``."""
        squares = [kernel.accumulate(*of_one, c) for of_one, c in zip(self._arrays, self._coefficients, strict=True)]
        return torch.tensor(squares, dtype=torch.float64).sqrt().T

    def move(self, rates: list[Tensor]) -> None:
        """As in ``_Foreach``."""
        both = zip(*(rate.tolist() for rate in rates), strict=True)
        for of_one, c, (of_u, of_w) in zip(self._arrays, self._coefficients, both, strict=True):
            kernel.move(*of_one, c, self._real(of_u), self._real(of_w))


@dataclass
class Scales:
    """Bias correction folded into what is there anyway.

    root * m / (sqrt(v) + root * eps) = m / (sqrt(v) / root + eps), in one pass less.

    Attributes:
        root: sqrt(1 - beta2^t) per tensor; 1 without bias correction.
        first: root / (1 - beta1^t).
        eps: As in ``LANS``.
    """

    root: list[float]
    first: list[float]
    eps: float

    @classmethod
    def of(cls, batch: Batch, group: dict[str, Any]) -> Scales:
        """The scales at every state's step; a second moment that is frozen stays at the correction of its last update."""
        eps, betas = group["eps"], group["betas"]
        if not group["bias_correction"]:
            ones = [1.0] * len(batch.states)
            return cls(ones, ones, eps)
        root = [math.sqrt(1.0 - betas[1] ** state.get("frozen_at", state["step"])) for state in batch.states]
        first = [r / (1.0 - betas[0] ** state["step"]) for r, state in zip(root, batch.states, strict=True)]
        return cls(root, first, eps)

    def denominators(self, v: list[Tensor]) -> Tensors:
        """sqrt(v) + root * eps."""
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, [root * self.eps for root in self.root])
        return roots


def accumulate(part: Part, g: Tensors, beta1: float, beta2: float, beta3: float) -> None:
    """Moves m to beta1 m + beta3 g and v to beta2 v + (1 - beta2) g^2, in place."""
    torch._foreach_mul_(part.m, beta1)
    torch._foreach_add_(part.m, g, alpha=beta3)
    torch._foreach_mul_(part.v, beta2)
    torch._foreach_addcmul_(part.v, g, g, 1.0 - beta2)


def norms(tensors: Tensors) -> Tensor:
    """The norm of every tensor, [tensors]."""
    return torch.stack(list(torch._foreach_norm(tensors)))


def trust_ratios(sizes: Tensor, lengths: Tensor, trust_clip: TrustClip | None) -> Tensor:
    """phi(||x||) / ||d|| for every tensor; 1 where one of the two is zero."""
    trusted = sizes if trust_clip is None else sizes.clamp(*trust_clip)
    return torch.where((sizes > 0) & (lengths > 0), trusted / lengths, 1.0)


def _normalising(batch: Batch, eps: float) -> Tensor:
    sizes = norms(batch.whole.g)
    return torch.where(sizes > 0, 1.0 / (sizes + eps), 1.0)

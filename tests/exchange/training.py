"""What the exchange's tests train with; all of it runs inside a rank of ``run_ranks``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import GradientExchange, Quantize

SMALL_BUCKETS = 0.001
"""bucket_cap_mb that cuts ``Net`` into several buckets from the second step on."""


class Net(nn.Module):
    """Two matrices of several blocks with a short last one, and small tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 110)
        self.norm = nn.LayerNorm(110)
        self.second = nn.Linear(110, 60)
        self.last = nn.Linear(60, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(x))) * self.gain + self.empty.sum()


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    """The same network on every rank."""
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, features: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's inputs: different on every rank and at every step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, features, generator=generator, dtype=torch.float64).to(dtype)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradients are of very different sizes."""
    return (model(x) - x[:, :5]).square().mean()


def wrap(
    model: nn.Module, ddp: dict[str, Any] | None = None, grad_scaler: Any = None, **settings: Any
) -> tuple[DistributedDataParallel, RecordedExchange]:
    """Wraps a model in DDP with the exchange ``settings``."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS, **(ddp or {})})
    return wrapped, RecordedExchange(**settings).attach(wrapped, grad_scaler)


class RecordedExchange(GradientExchange):
    """Notes which buckets DDP makes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.layouts: list[tuple[int, ...]] = []

    def _hook(self, _state, bucket):
        layout = tuple(id(p) for p in bucket.parameters())
        if layout not in self.layouts:
            self.layouts.append(layout)
        return super()._hook(_state, bucket)


def train(
    ddp: DistributedDataParallel,
    steps: int,
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> list[Tensor]:
    """Trains by SGD with momentum; returns the parameters, flat."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    dtype = next(ddp.parameters()).dtype
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(ddp, batch(step, dtype=dtype)).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def content(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of tensors, for comparisons between ranks and runs."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        digest.update(values.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def residuals(exchange: GradientExchange) -> dict[str, Tensor]:
    """Everything that this rank remembers, settled, by side and parameter name."""
    state = exchange.state_dict()
    workers = {f"worker {name}": residual for name, (residual,) in state["worker"].items()}
    return workers | {f"owner {name}": residual for name, residual in state["owner"].items()}


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, everything as float64."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()


class Ledger:
    """Checks conservation: applied + mean of worker residuals + owner residuals = true mean gradients, in float64.

    The true gradients come from a second backward of the bare module on the same batch.
    """

    def __init__(self, ddp: DistributedDataParallel, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self._parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad and p.numel()}
        self._true = {name: torch.zeros_like(real(p)) for name, p in self._parameters.items()}
        self._size = {name: torch.zeros_like(real(p)) for name, p in self._parameters.items()}
        self._applied = {name: torch.zeros_like(real(p)) for name, p in self._parameters.items()}

    def expect(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's ``loss``, computed without DDP."""
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._true[name] += real(gradient)
                self._size[name] += real(gradient).abs()

    def note(self) -> None:
        """Adds the exchanged gradients."""
        for name, p in self._parameters.items():
            if p.grad is not None:
                self._applied[name] += real(p.grad)

    def errors(self) -> dict[str, float]:
        """By parameter: the largest |difference| relative to the mean over ranks and elements of the sum of |g|."""
        remembered, ranks = residuals(self._exchange), dist.get_world_size()
        found = {}
        for name, true in self._true.items():
            owed = _mean(true) - self._applied[name]
            owed -= _mean(remembered.get(f"worker {name}", torch.zeros_like(true)))
            owed -= _mean(remembered.get(f"owner {name}", torch.zeros_like(true))) * ranks
            found[name] = float(owed.abs().max() / _mean(self._size[name]).mean())
        return found


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


EXCHANGES: dict[str, dict[str, Any]] = {
    "none": {"compressor": "none"},
    "all_reduce": {"compressor": "none", "exchange": "all_reduce"},
    "all_gather": {"compressor": Quantize(4), "exchange": "all_gather"},
    "two_way": {"compressor": Quantize(4), "exchange": "two_way"},
    "two_way_per_tensor": {"compressor": Quantize(2, block_size=None), "exchange": "two_way"},
}
"""Every way to exchange, by a name for test reports."""

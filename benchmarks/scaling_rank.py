"""One host of ``scaling.py``: steps of a model that computes next to nothing, so that their time is that of the exchange.

Started by ``hosts.sh`` on every host, with the command line of ``step_time_rank.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.step_time_rank import Training, main
from benchmarks.workloads import Workload


class RandomGradients(nn.Module):
    """The parameters of ``network``, and a loss whose gradients are random numbers: two passes over memory.

    Args:
        network: Whose parameters.
        seed: Of the numbers.
    """

    def __init__(self, network: nn.Module, seed: int) -> None:
        super().__init__()
        self.network = network
        generator = torch.Generator().manual_seed(seed)
        self._gradients = [1e-3 * torch.randn(p.shape, generator=generator) for p in network.parameters()]

    @override
    def forward(self) -> Tensor:
        pairs = zip(self.network.parameters(), self._gradients, strict=True)
        return torch.stack([torch.dot(p.flatten(), gradient.flatten()) for p, gradient in pairs]).sum()


class ExchangeAlone(Training):
    """Steps of the model's exchange, without its computation and its optimizer."""

    def __init__(self, workload: Workload, rank: int, corrected: bool = False) -> None:
        super().__init__(workload, rank, corrected)
        self.model = RandomGradients(self.model, rank)

    @override
    def forward(self, model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model()
        return loss

    @override
    def update(self) -> None:
        pass


if __name__ == "__main__":
    main(ExchangeAlone)

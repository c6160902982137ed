"""PowerSGD on simulated workers: an outside reference for the tables, not a part of the package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.exchange.collectives import AllReduce
from lightning_compress.testing import SimulatedExchange
from lightning_compress.testing.simulation import Gradients


class PowerSGD(SimulatedExchange):
    """Vogels et al. 2019 (arXiv 1905.13727, algorithms 1 and 2) as torch's hook does it: error feedback and warm start.

    A gradient M [n, m] is approximated by P Q^T of rank r: P = orthogonalised sum of M Q, Q = mean of M^T P. Tensors of which
    that would not send half travel whole, as do those of one dimension.

    Args:
        module: The model.
        world_size: Number of simulated workers.
        powersgd_rank: r.
        start_step: Dense steps before compression begins.
        optimizer: Taken for the sake of the other exchanges.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world_size: int,
        powersgd_rank: int,
        start_step: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(module, world_size, "none", optimizer=optimizer)
        self.start_step = start_step
        self._matrices = {
            name: _LowRank(parameter.flatten(1), powersgd_rank, world_size)
            for name, parameter in self._parameters.items()
            if parameter.ndim > 1
        }
        self._matrices = {name: matrix for name, matrix in self._matrices.items() if matrix.pays}

    @override
    def mean(self, gradients: Sequence[Gradients]) -> Gradients:
        if self._step < self.start_step:
            return super().mean(gradients)
        self._step += 1
        result, whole, ps, qs = {}, [], [], []
        for name, parameter in self._parameters.items():
            given = [of_one.get(name, torch.zeros_like(parameter)) for of_one in gradients]
            matrix = self._matrices.get(name)
            if matrix is None:
                result[name] = torch.stack(given).mean(0)
                whole.append(given[0])
            else:
                result[name] = matrix.mean([g.flatten(1) for g in given]).view_as(parameter)
                ps.append(matrix.p)
                qs.append(matrix.q)
        self._count(whole, ps, qs)
        return result

    def _count(self, *sent: Iterable[Tensor]) -> None:
        for rank, worker in enumerate(self.workers):
            worker.stats.begin_step()
            worker.stats.count_dense(
                torch.cat([p.detach().flatten() for p in self._parameters.values()]), self.world_size
            )
            for tensors in sent:
                buffer = torch.cat([torch.empty(0), *(tensor.flatten() for tensor in tensors)])
                worker.stats.count_wire(AllReduce(buffer), rank, self.world_size)


class _LowRank:
    """One matrix: its factors, of which Q is the next step's first guess, and what every worker still owes."""

    def __init__(self, parameter: Tensor, rank: int, world_size: int) -> None:
        n, m = parameter.shape
        rank = min(n, m, rank)
        self.pays = 2 * (n + m) * rank < n * m
        self.p = torch.zeros(n, rank, dtype=parameter.dtype)
        self.q = torch.randn(m, rank, dtype=parameter.dtype, generator=torch.Generator().manual_seed(0))
        self.errors = [torch.zeros_like(parameter) for _ in range(world_size)]

    def mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """The approximate mean over the workers, [n, m]."""
        owed = [gradient + error for gradient, error in zip(gradients, self.errors, strict=True)]
        q = torch.linalg.qr(self.q).Q
        self.p = torch.linalg.qr(torch.stack([matrix @ q for matrix in owed]).sum(0)).Q
        self.q = torch.stack([matrix.T @ self.p for matrix in owed]).mean(0)
        sent = self.p @ self.q.T
        self.errors = [matrix - sent for matrix in owed]
        return sent

"""The stores of one rank: what its worker side and its owner side remember, per number format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.exchange.plan import BlockPlan
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.store import Store, StoreView


class Memories:
    """Makes stores when the first bucket of their number format comes, and settles them between steps.

    Args:
        plan: The model's blocks.
        settings: Whether there is a memory, and whether owners encode again.
        rank: This process, or its node's number, among those that exchange payloads.
        transactional: Whether steps may be undone (a loss scaler is at work).
    """

    def __init__(self, plan: BlockPlan, settings: ExchangeSettings, rank: int, transactional: bool) -> None:
        self._transactional = transactional
        self._sizes: dict[str, dict[str, int]] = {}
        if settings.topology is not None:
            if settings.memory is not None:
                self._sizes["worker"] = plan.worker_sizes()
            if isinstance(settings.memory, MomentumCorrection):
                self._sizes["velocity"] = plan.velocity_sizes()
            if settings.topology.second_encoding:
                self._sizes["owner"] = plan.owner_sizes(rank)
        self._nowhere = dict.fromkeys(plan.worker_sizes(), 0)
        self.stores: dict[tuple[str, torch.dtype], Store] = {}
        self._last_scale: float | Tensor | None = None

    def views(self, names: Sequence[str], buffer: Tensor) -> tuple[StoreView | None, StoreView | None]:
        """Access of one exchange of the bucket ``buffer`` to the worker's and the owner's memory, where there is one."""
        worker, owner = (self._store(side, buffer.dtype, buffer.device) for side in ("worker", "owner"))
        return (worker.view(names) if worker else None), (owner.view(names) if owner else None)

    def velocities(self, names: Sequence[str], buffer: Tensor) -> StoreView | None:
        """Access of one exchange to the velocities of momentum correction; None without it."""
        store = self._store("velocity", buffer.dtype, buffer.device)
        return store.view(names) if store else None

    def offsets(self, buffer: Tensor) -> tuple[dict[str, int], dict[str, int]]:
        """Where each parameter begins in the worker's and in the owner's store."""
        worker, owner = (self._store(side, buffer.dtype, buffer.device) for side in ("worker", "owner"))
        return (worker.offsets if worker else self._nowhere), (owner.offsets if owner else self._nowhere)

    def note_step(self, names: Sequence[str], taken: Tensor | bool) -> None:
        """An optimizer has stepped on these parameters: what was written for it is kept.

        Args:
            names: The parameters.
            taken: False if a fused optimizer found an overflow itself and changed nothing.
        """
        for store in self.stores.values():
            store.commit(names, taken)

    def settle(self, scale: float | Tensor) -> Tensor | bool:
        """Forgets what was written for a step that the loss scaler has skipped: it lowers its scale exactly then.

        What no optimizer has used yet stays open. With a device tensor the comparison stays on the device.

        Returns:
            Whether a step was skipped since the last call.
        """
        if not self._transactional:
            return False
        skipped = self._last_scale is not None and scale < self._last_scale
        for store in self.stores.values():
            store.forget(skipped)
        self.watch(scale)
        return skipped

    def watch(self, scale: float | Tensor) -> None:
        """Compares the loss scale with this one from now on."""
        self._last_scale = scale.clone() if isinstance(scale, Tensor) else scale

    def read(self, side: str, name: str, dtype: torch.dtype) -> Tensor | None:
        """The settled state of a parameter, a view; None where nothing is remembered (yet, or of sparse gradients)."""
        store = self.stores.get((side, _real_dtype(dtype)))
        return store.read(name) if store is not None and name in store.sizes else None

    def write(self, side: str, name: str, parameter: Tensor, state: Tensor) -> None:
        """Sets the state of a parameter, flat in the parameter's memory order."""
        store = self._store(side, _real_dtype(parameter.dtype), parameter.device)
        if store is not None and name in store.sizes:
            store.read(name).copy_(state)

    def clear(self) -> None:
        """Forgets everything."""
        for store in self.stores.values():
            store.clear()

    def holds(self, side: str) -> bool:
        """Whether this exchange has such a memory."""
        return side in self._sizes

    def take(self, side: str, name: str, dtype: torch.dtype) -> Tensor | None:
        """The state of a parameter, and zeros in its place: an exchange of its own. None where nothing is remembered."""
        store = self.stores.get((side, _real_dtype(dtype)))
        return store.take(name) if store is not None and name in store.sizes else None

    def fits(self, other: Memories) -> bool:
        """Whether both remember the same parameters in the same places."""
        return (self._sizes, self._transactional) == (other._sizes, other._transactional)

    def _store(self, side: str, dtype: torch.dtype, device: torch.device) -> Store | None:
        if side not in self._sizes:
            return None
        dtype = _real_dtype(dtype)
        if (side, dtype) not in self.stores:
            self.stores[side, dtype] = Store(self._sizes[side], dtype, device, self._transactional)
        return self.stores[side, dtype]


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format in which gradients of ``dtype`` are remembered."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32

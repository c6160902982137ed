"""The stores of one rank: what its worker side and its owner side remember, per number format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_compress.exchange.plan import BlockPlan
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.memory.store import Store, StoreView


class Memories:
    """Makes stores when the first bucket of their number format comes, and settles them between steps.

    Args:
        plan: The model's blocks.
        settings: Whether there is a memory, and whether owners encode again.
        rank: This process.
        transactional: Whether steps may be undone (a loss scaler is at work).
    """

    def __init__(self, plan: BlockPlan, settings: ExchangeSettings, rank: int, transactional: bool) -> None:
        self._transactional = transactional
        self._sizes: dict[str, dict[str, int]] = {}
        if settings.topology is not None:
            if settings.memory is not None:
                self._sizes["worker"] = plan.worker_sizes()
            if settings.topology.second_encoding:
                self._sizes["owner"] = plan.owner_sizes(rank)
        self._nowhere = dict.fromkeys(plan.worker_sizes(), 0)
        self.stores: dict[tuple[str, torch.dtype], Store] = {}
        self._stepped: set[str] = set()
        self._last_scale: float | Tensor | None = None

    def views(self, names: Sequence[str], buffer: Tensor) -> tuple[StoreView | None, StoreView | None]:
        """Access of one exchange of the bucket ``buffer`` to the worker's and the owner's memory; None where there is none."""
        worker, owner = (self._store(side, buffer) for side in ("worker", "owner"))
        return worker and worker.view(names), owner and owner.view(names)

    def offsets(self, buffer: Tensor) -> tuple[dict[str, int], dict[str, int]]:
        """Where each parameter begins in the worker's and in the owner's store."""
        worker, owner = (self._store(side, buffer) for side in ("worker", "owner"))
        return (worker.offsets if worker else self._nowhere), (owner.offsets if owner else self._nowhere)

    def note_step(self, names: Iterable[str]) -> None:
        """An optimizer has stepped on these parameters."""
        self._stepped.update(names)

    def settle(self, scale: float | Tensor) -> None:
        """Keeps what was written before a step that was taken, forgets what was written before one that was skipped.

        A loss scaler lowers its scale exactly when it skips a step; an optimizer that checks for overflows itself (fused) runs
        its hooks even then, so the scale decides. With a device tensor the comparison stays on the device.
        """
        if not self._transactional:
            return
        keep: Tensor | bool = True if self._last_scale is None else scale >= self._last_scale
        for store in self.stores.values():
            store.settle(list(self._stepped), keep)
        self._stepped.clear()
        self._last_scale = scale.clone() if isinstance(scale, Tensor) else scale

    def fits(self, other: Memories) -> bool:
        """Whether both remember the same parameters in the same places."""
        return (self._sizes, self._transactional) == (other._sizes, other._transactional)

    def _store(self, side: str, buffer: Tensor) -> Store | None:
        if side not in self._sizes:
            return None
        dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
        if (side, dtype) not in self.stores:
            self.stores[side, dtype] = Store(self._sizes[side], dtype, buffer.device, self._transactional)
        return self.stores[side, dtype]

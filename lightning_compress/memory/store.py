"""The flat arrays in which memories keep their values, and the two copies that make a skipped step undoable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.kernels import pages
from lightning_compress.kernels.batch import MemoryView


class Store:
    """State of many parameters in one flat array, addressed by parameter name.

    A DDP bucket rebuild moves nothing here: blocks know their place in the store, not in the bucket.

    With ``transactional`` (under a loss scaler) the array exists twice. An exchange writes the copy that is not
    current; ``commit`` makes it current for the parameters of an optimizer that has stepped, ``forget`` drops what
    was written for a step that was skipped. Nothing is copied and, on CUDA, nothing is read by the host.

    Args:
        sizes: Elements per parameter, in the order of ``named_parameters()``.
        dtype: float32 or float64.
        device: Where the gradients are.
        transactional: Whether steps may be undone.
    """

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, transactional: bool) -> None:
        self.sizes = sizes
        self.offsets: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self.offsets[name] = total
            total += size
        self._total = total
        self._transactional = transactional
        self._index = {name: i for i, name in enumerate(sizes)}
        self._views: dict[tuple[str, ...], Tensor] = {}
        self.data = pages.zeros(total * (2 if transactional else 1), dtype, device)
        self._current = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        self._dirty = torch.zeros(len(sizes), dtype=torch.bool, device=device)

    def view(self, names: Sequence[str]) -> StoreView:
        """Access for one exchange of a bucket with the parameters ``names``."""
        index = self._views.get(tuple(names))
        if index is None:
            index = torch.tensor([self._index[name] for name in names], dtype=torch.int64, device=self.data.device)
            self._views[tuple(names)] = index
        if not self._transactional:
            zero = torch.zeros_like(index)
            return StoreView(self, names, index, read=zero, write=zero)
        current, dirty = self._current[index], self._dirty[index]
        # a second exchange before the optimizer step goes on from what the first one wrote
        return StoreView(self, names, index, read=(current ^ dirty) * self._total, write=(1 - current) * self._total)

    def mark_written(self, index: Tensor, written: Tensor) -> None:
        """Notes that an exchange has written these parameters."""
        if self._transactional:
            self._dirty[index] |= written

    def commit(self, stepped: Sequence[str], taken: Tensor | bool) -> None:
        """Ends the open exchanges of some parameters.

        Args:
            stepped: Parameters whose optimizer has stepped.
            taken: False: it found an overflow and left them alone; what was written is forgotten.
        """
        if not self._transactional:
            return
        taken = torch.as_tensor(taken, device=self._dirty.device)
        done = torch.zeros_like(self._dirty)
        done[[self._index[name] for name in stepped if name in self._index]] = True
        self._current ^= (self._dirty & done & taken).to(torch.int64)
        self._dirty &= ~done

    def forget(self, skipped: Tensor | bool) -> None:
        """Drops all that is written and not committed, if ``skipped``."""
        if self._transactional:
            self._dirty &= ~torch.as_tensor(skipped, device=self._dirty.device)

    def clear(self) -> None:
        """Forgets everything."""
        self.data.zero_()
        self._current.zero_()
        self._dirty.zero_()

    def take(self, name: str) -> Tensor:
        """The state of a parameter, and zeros in its place: an exchange of its own."""
        view = self.view([name])
        taken = view.get(0).clone()
        view.set(0, torch.zeros_like(taken))
        view.mark_written(torch.ones_like(view.index, dtype=torch.bool))
        return taken

    def place(self, name: str, base: Tensor) -> slice | Tensor:
        """Indices into ``data`` of a parameter's elements in the copy at ``base`` (0-dim, on the device)."""
        first, size = self.offsets[name], self.sizes[name]
        if not self._transactional:
            return slice(first, first + size)
        # which copy it is, only the device knows
        return base + torch.arange(first, first + size, device=base.device)

    def read(self, name: str) -> Tensor:
        """The settled state of a parameter, a view [size]."""
        start = self.offsets[name] + int(self._current[self._index[name]]) * self._total
        return self.data[start : start + self.sizes[name]]


@dataclass
class StoreView:
    """One exchange's access to a store: which copy of each of the bucket's parameters is read and which is written."""

    store: Store
    names: Sequence[str]
    index: Tensor
    read: Tensor
    write: Tensor

    def get(self, i: int) -> Tensor:
        """State of the bucket's i-th parameter, before this exchange."""
        return self.store.data[self.store.place(self.names[i], self.read[i])]

    def set(self, i: int, state: Tensor) -> None:
        """Writes what this exchange leaves for the i-th parameter."""
        self.store.data[self.store.place(self.names[i], self.write[i])] = state

    def written(self, i: int) -> Tensor:
        """What this exchange has written for the i-th parameter."""
        return self.store.data[self.store.place(self.names[i], self.write[i])]

    def mark_written(self, written: Tensor) -> None:
        """Notes which of the bucket's parameters this exchange has written, bool [parameters]."""
        self.store.mark_written(self.index, written)


def access(view: StoreView | None, values: Tensor) -> MemoryView:
    """Error feedback on ``view`` while ``values`` are coded; without one, nothing is added and nothing is kept."""
    if view is None:
        return MemoryView.nothing(values)
    return MemoryView(view.store.data, view.read, view.write, compensate=True, update=True)

"""Says which parameter's gradient was the first that is not finite: without a loss scaler nobody else would notice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_compress.kernels.table import NONFINITE


class NonfiniteWatch:
    """Looks at what the ranks' payloads say of every parameter, and warns once. Made on one rank only.

    On CUDA the host does not wait for what it looks at: the warning comes with one of the next exchanges.
    """

    def __init__(self) -> None:
        self._said = False
        self._pending: list[tuple[torch.cuda.Event, Tensor, Sequence[str], int]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pending": []}  # events cannot travel

    def look(self, names: Sequence[str], status: Tensor, step: int) -> None:
        """Called once per bucket.

        Args:
            names: The bucket's parameters.
            status: uint8 for each of them, merged over the ranks (see ``kernels.table``).
            step: Number of the exchange.
        """
        if self._said:
            return
        if not status.is_cuda:
            self._warn(names, status, step)
            return
        copied = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        copied.copy_(status, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((event, copied, names, step))
        while self._pending and not self._said and self._pending[0][0].query():
            _, copied, names, step = self._pending.pop(0)
            self._warn(names, copied, step)

    def _warn(self, names: Sequence[str], status: Tensor, step: int) -> None:
        bad = (status == NONFINITE).nonzero().flatten().tolist()
        if not bad:
            return
        self._said = True
        self._pending.clear()
        more = f" (and {len(bad) - 1} more of its bucket)" if len(bad) > 1 else ""
        warnings.warn(
            f"At step {step} the gradient of {names[bad[0]]!r}{more} was not finite on some rank. There is no loss scaler that "
            "would skip the step: the parameter becomes NaN on all ranks, unless the optimizer or gradient clipping prevents "
            "it. Residuals do not take it up. Look for the cause (learning rate, float16 without a GradScaler, a division by "
            "zero in the loss). Said once.",
            stacklevel=2,
        )

"""A few threads that work on one bucket at once (``compression_threads``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import torch
from torch import Tensor

LEAST = 1 << 16
"""Elements of a block range that is worth a thread's waking up."""


class Threads:
    """Threads that live as long as the exchange; they start when they are first needed.

    Compiled kernels work without the GIL. Work that is handed in must not wait for anything: all stages of the pipeline share
    these threads.

    Args:
        count: How many, the one that calls ``run`` included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "lightning-compress-codec") if count > 1 else None

    def ranges(self, lengths: Tensor) -> list[slice]:
        """Cuts a block table into a range for each thread, with about equally many elements; fewer where it is short.

        Args:
            lengths: Elements of every block, at least one block.
        """
        ends = lengths.cumsum(0)
        total = int(ends[-1])
        count = max(1, min(self.count, total // LEAST))
        bounds = torch.searchsorted(ends, torch.arange(1, count, device=ends.device) * total // count, right=True)
        cuts = sorted({0, *bounds.tolist(), len(lengths)})
        return [slice(first, end) for first, end in pairwise(cuts)]

    def run(self, work: Sequence[Callable[[], object]]) -> None:
        """Calls everything in ``work``, the first in this thread; returns when all have ended, and raises what one raised."""
        first, *others = work
        if not others:
            first()
            return
        assert self._pool is not None
        futures = [self._pool.submit(one) for one in others]
        try:
            first()
        finally:
            wait(futures)  # they write where the caller goes on
        for future in futures:
            future.result()

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()


ALONE = Threads(1)
"""Everything in the thread that calls."""

"""How kernels are compiled: without the GIL, cached on disk where that is possible, without counting references.

numba counts a reference to every array that is passed or sliced, by atomic instructions that the processor cannot overlap with
anything. For blocks of a few hundred elements that costs more than coding them. Without it a kernel can neither make arrays nor
return one to Python: the caller holds them all, scratch included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba

log = logging.getLogger(__name__)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Numba's ``njit`` with its cache, or without where nothing can be written (a read-only installation and home)."""
    options = {"nogil": True, "_nrt": False, **options}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            log.info("No folder to cache compiled kernels in: they are compiled at every start. Set NUMBA_CACHE_DIR.")
            return numba.njit(**options)(function)

    return decorate

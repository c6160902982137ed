"""How kernels are compiled: without the GIL, cached on disk where that is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba

log = logging.getLogger(__name__)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Numba's ``njit`` with its cache, or without where nothing can be written (a read-only installation and home)."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            log.info("No folder to cache compiled kernels in: they are compiled at every start. Set NUMBA_CACHE_DIR.")
            return numba.njit(nogil=True, **options)(function)

    return decorate

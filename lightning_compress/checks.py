"""What arguments are: a wrong type must be refused by a message of ours, not by a comparison that fails."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, TypeGuard

from torch import Tensor


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is an int; True and 4.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_not_negative(**values: Any) -> None:
    """Raises ValueError that names the first of these arguments that is no number (or tensor of one), or below 0."""
    for name, value in values.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(number) or number < 0.0:
            raise ValueError(f"{name} must be a number and not negative, got {value!r}")


def check_switch(name: str, value: Any) -> None:
    """Raises ValueError unless the argument ``name`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_timeout(timeout: Any) -> None:
    """Raises ValueError unless it is a positive timedelta, or None for the default."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(
            f"timeout must be a positive datetime.timedelta, such as timedelta(minutes=5), got {timeout!r}"
        )

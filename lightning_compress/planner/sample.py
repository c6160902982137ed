"""Figures that were measured several times."""

from __future__ import annotations

from collections.abc import Sequence

NOISE = 0.03
"""Share of a step below which nobody should care."""


def quantile(values: Sequence[float], at: float) -> float:
    """The value below which the share ``at`` of the values lies, interpolated: 0.5 is the median.

    (``statistics.quantiles`` needs two values and gives many.)
    """
    ordered = sorted(values)
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])

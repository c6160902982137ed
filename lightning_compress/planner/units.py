"""Reads quantities as people write them: ``10gbit``, ``100us``."""

from __future__ import annotations

import re

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def bandwidth(text: str) -> float:
    """Bytes per second of a bandwidth such as "10gbit", "100 Mbit/s", "25Gb/s" or "1.2GB/s" (capital B: bytes).

    Raises:
        ValueError: It is no number with such a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(bit/s|bits|bit|bps|b/s|B/s|Bps)", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"bandwidth={text!r} is no number with a unit: write 10gbit, 100mbit or 1.2GB/s.")
    bits = 8.0 if match[3].startswith("B") else 1.0
    return float(match[1]) * _PREFIX[match[2].lower()] * bits / 8.0


def duration(text: str) -> float:
    """Seconds of a duration such as "100us", "0.5 ms" or "1s".

    Raises:
        ValueError: It is no number with such a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)", str(text).strip())
    if match is None:
        raise ValueError(f"latency={text!r} is no number with a unit: write 100us or 0.5ms.")
    return float(match[1]) * _SECONDS[match[2]]

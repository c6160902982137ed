"""Compressors by name; packages add theirs through the entry-point group ``lightning_compress.compressors``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from lightning_compress.compressors.base import Compressor

ENTRY_POINTS = "lightning_compress.compressors"

_factories: dict[str, Callable[[], Compressor]] = {}


def register_compressor(name: str, factory: Callable[[], Compressor]) -> None:
    """Makes a compressor available by name.

    Args:
        name: Lower case, as users will write it.
        factory: A class or function that makes it with its default settings.

    Raises:
        ValueError: The name is taken by something else.
    """
    if not callable(factory):
        raise TypeError(f"A factory makes the compressor when it is asked for: pass the class, not {factory!r}.")
    if _factories.setdefault(name, factory) is not factory:
        raise ValueError(f"A compressor named {name!r} is already registered; choose another name.")


def compressor_names() -> list[str]:
    """All names that ``get_compressor`` knows, installed packages' included."""
    return sorted({*_factories, *entry_points(group=ENTRY_POINTS).names})


def get_compressor(compressor: str | Compressor) -> Compressor:
    """A compressor from its name or from itself.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
        TypeError: It is neither a name nor a compressor.
    """
    if isinstance(compressor, Compressor):
        return compressor
    if not isinstance(compressor, str):
        raise TypeError(
            f"compressor must be a name or a Compressor instance, got {compressor!r}; a class must be called: TopK()"
        )
    factory = _factories.get(compressor)
    if factory is None:
        found = entry_points(group=ENTRY_POINTS, name=compressor)
        if not found:
            raise ValueError(f"compressor={compressor!r} is unknown; known are {', '.join(compressor_names())}.")
        factory = next(iter(found)).load()
    return factory()

"""Registers the strategies with whichever import name of Lightning a program uses, without importing Lightning itself.

``pytorch_lightning`` and ``lightning.pytorch`` are disjoint trees, each with a registry of its own. A tree that is
already imported gets our names at once; one that is imported later gets them when its strategies module has been
executed.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from typing_extensions import override

MODULES = {
    "pytorch_lightning.strategies": "lightning_compress.pytorch_lightning",
    "lightning.pytorch.strategies": "lightning_compress.lightning",
}
"""Lightning's strategies modules, and ours for each of them."""


def register() -> None:
    """Registers with the trees that are imported, and arranges it for the others."""
    for name, ours in MODULES.items():
        if name in sys.modules:
            importlib.import_module(ours)
    if not any(isinstance(finder, _LightningFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LightningFinder())


def module_in_use() -> str:
    """Our module for the import name that the program uses; ``pytorch_lightning`` when both or none is imported."""
    names = list(MODULES)
    imported = [name for name in names if name in sys.modules]
    if len(imported) == len(names):
        warnings.warn(
            "pytorch_lightning and lightning.pytorch are both imported, and lightning_compress.CompressedStrategy is that of "
            "pytorch_lightning. For a lightning.pytorch.Trainer import it from lightning_compress.lightning, for a "
            "pytorch_lightning.Trainer from lightning_compress.pytorch_lightning (which silences this), or use a name such as "
            "strategy='compressed', which both know.",
            stacklevel=3,
        )
    return MODULES[(imported or names)[0]]


class _LightningFinder(MetaPathFinder):
    """Lets the ordinary finders find Lightning's strategies module, and registers after it has been executed."""

    def __init__(self) -> None:
        self._searching = False

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or self._searching:
            return None
        self._searching = True  # find_spec below asks us again
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        ours = importlib.import_module(MODULES[module.__name__])
        for name in ("CompressedStrategy", "AutoStrategy"):
            # else ours is what imports Lightning just now, and registers when it has been executed
            if (strategy := vars(ours).get(name)) is not None:
                strategy.register_strategies(module.StrategyRegistry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # sources, resources

"""Compressors by name, and those of other packages."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_compress import Quantize, register_compressor
from lightning_compress.compressors import registry
from lightning_compress.compressors.registry import compressor_names, get_compressor

DOCS = Path(__file__).parents[2] / "docs" / "compressors.md"


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def test_names_give_the_documented_defaults() -> None:
    assert get_compressor("quantize") == Quantize(4)
    assert set(compressor_names()) == {
        "none", "fp16", "bf16", "fp8", "quantize", "ternary", "centered", "onebit", "topk", "randomk", "dithering", "natural",
    }  # fmt: skip
    for name in compressor_names():
        assert get_compressor(name).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'zip' is unknown; known are .*topk"):
        get_compressor("zip")


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(TypeError, match="must be called"):
        get_compressor(Quantize)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_registry")
def test_a_name_can_be_taken_once() -> None:
    register_compressor("mine", Quantize)
    register_compressor("mine", Quantize)
    with pytest.raises(ValueError, match="already registered"):
        register_compressor("mine", lambda: Quantize(2))


def test_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(name="theirs", load=lambda: lambda: Quantize(2))

    class Entries(list):  # type: ignore[type-arg]
        names = ("theirs",)

    def entry_points(group: str, name: str = "theirs") -> Any:
        return Entries([entry] if (group, name) == (registry.ENTRY_POINTS, "theirs") else [])

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert get_compressor("theirs") == Quantize(2)
    assert "theirs" in compressor_names()


@pytest.mark.usefixtures("own_registry")
def test_the_documented_example_passes_the_conformance_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    (tmp_path / "documented_example.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("documented_example")
    assert get_compressor("halves") == module.Halves()

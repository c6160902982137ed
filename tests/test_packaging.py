"""What pyproject.toml ships is what the checkout holds, under one top-level name."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SHIPPED = ("lightning_compress", "recipes", "configs")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    folders = {init.parent.relative_to(ROOT) for top in SHIPPED for init in (ROOT / top).rglob("__init__.py")}
    names = {".".join(folder.parts) for folder in folders}
    expected = {name if name.startswith("lightning_compress") else f"lightning_compress.{name}" for name in names}
    assert set(project["tool"]["setuptools"]["packages"]) == expected


def test_every_dependency_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    entries = [line.strip() for line in section.splitlines() if line.strip().startswith('"')]
    assert len(entries) > 10
    unexplained = [line for line in entries if " # " not in line and "lightning-compress[" not in line]
    assert not unexplained


def test_wheel_holds_one_top_level_name_and_works(tmp_path: Path, project: dict[str, Any]) -> None:
    sources = tmp_path / "sources"  # a copy: setuptools leaves build/ in the folder that it builds
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    subprocess.run([*command, str(sources)], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    version = project["project"]["version"]
    assert wheel.name == f"lightning_compress-{version}-py3-none-any.whl"
    assert {name.split("/")[0] for name in inside} == {"lightning_compress", f"lightning_compress-{version}.dist-info"}
    assert "lightning_compress/py.typed" in inside
    wanted = {
        path.relative_to(ROOT).as_posix()
        for top in SHIPPED
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    missing = {n for n in wanted if n not in inside and f"lightning_compress/{n}" not in inside}
    assert not missing

    program = (
        "import lightning_compress.recipes as recipes; from lightning_compress.cli import find_config; "
        "print(recipes.__file__, find_config('demo'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "site"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [Path(name).relative_to(tmp_path / "site").as_posix() for name in found[-2:]] == [
        "lightning_compress/recipes/__init__.py",
        "lightning_compress/configs/demo.yaml",
    ]

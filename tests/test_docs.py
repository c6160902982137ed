"""The code in docs/ runs as it is printed."""

import re
import sys
from pathlib import Path

import pytest

from tests.test_readme import run_in

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_code(block: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block)
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if "init_process_group" in block else []
    output = run_in(tmp_path, sys.executable, *ranks, "train.py")
    if "times less than dense" in block:
        (ratio,) = re.findall(r"(\d+) times less than dense$", output, flags=re.MULTILINE)
        assert int(ratio) > 100


def test_shipped_configs_are_named_rightly() -> None:
    from lightning_compress import cli

    for page in DOCS.glob("*.md"):
        names = re.findall(r"fit --config (\S+?)[`\s]", page.read_text())
        assert set(names) <= set(cli.shipped_configs()), page

"""Runs programs as a user would: a file, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_script(
    folder: Path, source: str, *command: str, arguments: tuple[str, ...] = (), timeout: float = 120
) -> tuple[int, str, float]:
    """Runs ``source`` by ``command`` (python alone by default); returns the exit code, all that was said, and the seconds."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment["PYTHONPATH"] = str(REPOSITORY)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
        cwd=folder,
    )
    return done.returncode, done.stdout, time.monotonic() - start

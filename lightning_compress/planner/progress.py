"""A progress bar for what takes more than a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 3.0
"""Seconds of work before a progress bar appears."""
_LINE_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call after each of ``total`` pieces of work, with a word on what was done.

    On a terminal a bar appears on standard error once the work has taken a few seconds; elsewhere a line now and then.
    Without rich, which comes with the extra ``[recipes]``, nothing is shown.
    """
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield lambda _: None
        return
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
    task, start = bar.add_task("", total=total), time.monotonic()
    said = start

    def advance(text: str) -> None:
        nonlocal said
        bar.update(task, description=text, advance=1)
        now = time.monotonic()
        if console.is_terminal and now - start > _PATIENCE:
            bar.start()
        elif not console.is_terminal and now - said > _LINE_EVERY:
            console.print(f"{bar.tasks[0].completed:.0f}/{total} after {now - start:.0f} s: {text}", highlight=False)
            said = now

    try:
        yield advance
    finally:
        bar.stop()

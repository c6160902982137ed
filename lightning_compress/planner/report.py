"""A plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_compress.planner.predict import Prediction


def make_table(predictions: Sequence[Prediction], recommended: str, link: str) -> Any:
    """A ``rich`` table, one row per method, the recommended one marked."""
    from rich.table import Table

    steps = {p.method: p.seconds for p in predictions}
    baselines = [name for name in ("fp32", "bf16") if name in steps]
    table = Table(
        title=f"Predicted training steps; link {link}", caption=_CAPTION, title_justify="left", caption_justify="left"
    )
    for column in ("method", "step ms", "interval", "exposed ms", "MB sent", *(f"x {name} DDP" for name in baselines)):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for p in predictions:
        table.add_row(
            f"{p.method} <" if p.method == recommended else p.method,
            f"{1e3 * p.seconds:.1f}",
            f"{1e3 * p.low:.1f} .. {1e3 * p.high:.1f}",
            f"{1e3 * p.exposed:.1f}",
            f"{p.nbytes / 1e6:.3f}",
            *(f"{steps[name] / p.seconds:.2f}" for name in baselines),
            style="bold" if p.method == recommended else None,
        )
    return table


_CAPTION = (
    "Interval: from the quartiles of the measurements. Exposed: by how much the exchange makes the step longer than its\n"
    "computation. MB sent: by each rank in a step."
)

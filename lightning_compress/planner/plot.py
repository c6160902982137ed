"""A plan as a picture: who works when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_compress.planner.predict import Prediction

_LANES = {"forward": "backward", "backward": "backward", "optimizer": "backward"}
_ORDER = ("backward", "encode", "link", "owner", "decode")


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Draws a timeline per method, below each other: lanes for backward, encode, link, owner and decode.

    Raises:
        ValueError: matplotlib cannot write such a file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2 * len(predictions) + 0.5), layout="constrained")
    grid = figure.subplots(len(predictions), 1, sharex=True, squeeze=False)
    colours = {"forward": "tab:gray", "optimizer": "tab:gray"}
    for axes, prediction in zip(grid[:, 0], predictions, strict=True):
        lanes = [lane for lane in _ORDER if any(_lane(s.task.kind) == lane for s in prediction.spans)]
        for span in prediction.spans:
            kind = span.task.kind
            place = lanes.index(_lane(kind))
            colour = colours.get(kind, f"C{_ORDER.index(_lane(kind))}")
            axes.barh(place, 1e3 * (span.end - span.start), left=1e3 * span.start, color=colour, edgecolor="white")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_title(f"{prediction.method}: {1e3 * prediction.seconds:.0f} ms", loc="left")
    grid[-1, 0].set_xlabel("ms since the start of the step (grey: forward, optimizer)")
    figure.savefig(path)


def _lane(kind: str) -> str:
    return _LANES.get(kind, kind)

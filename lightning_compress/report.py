"""The monitor's report: plots of ratio, residual and times, as a page or as a picture."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".html", ".png")


@dataclass(frozen=True)
class Sample:
    """What the exchange did in one step.

    Attributes:
        step: Exchanges since the fit began.
        ratio: Dense bytes / bytes sent.
        planned_ratio: The same as planned.
        residual_ratio: Residual norm / gradient norm, None where nothing is remembered.
        encode_seconds: Time of encoding, like the next two summed over the pipeline's threads.
        decode_seconds: Time of decoding.
        wait_seconds: Time of waiting for collectives.
    """

    step: int
    ratio: float
    planned_ratio: float
    residual_ratio: float | None
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float


def require_plots(path: str | Path) -> None:
    """Raises, before any training, what would keep ``write_report`` from writing ``path`` after it.

    Raises:
        ValueError: The name says neither page nor picture.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if Path(path).suffix not in _FORMATS:
        raise ValueError(f"report must be the name of a .html or .png file, got {str(path)!r}")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError('report needs matplotlib: pip install "lightning-compress[recipes]"')


def write_report(
    path: str | Path, samples: Sequence[Sample], rows: Sequence[tuple[str, str]], warnings: Sequence[str]
) -> None:
    """Writes the plots, in a page with the summary's ``rows`` and the ``warnings`` if ``path`` ends in ``.html``."""
    picture = io.BytesIO()
    _plot(samples).savefig(picture, format="png", dpi=120)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(picture.getvalue())
    else:
        path.write_text(_page(picture.getvalue(), rows, warnings), encoding="utf-8")


def _plot(samples: Sequence[Sample]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    bytes_, residual, times = figure.subplots(3, 1, sharex=True)
    steps = [sample.step for sample in samples]
    _curve(bytes_, steps, [s.ratio for s in samples], "measured")
    _curve(bytes_, steps, [s.planned_ratio for s in samples], "planned", linestyle="--")
    bytes_.set(ylabel="dense bytes / bytes sent", yscale="log")
    # matplotlib leaves out what is not a number
    ratios = [float("nan") if s.residual_ratio is None else s.residual_ratio for s in samples]
    _curve(residual, steps, ratios, "sampled")
    residual.set(ylabel="residual norm / gradient norm", ylim=(0, None))
    for stage in ("encode", "decode", "wait"):
        _curve(times, steps, [1e3 * getattr(s, f"{stage}_seconds") for s in samples], stage)
    times.set(xlabel="exchange", ylabel="ms in a step, all threads", ylim=(0, None))
    for axes in (bytes_, residual, times):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _curve(axes: Any, steps: list[int], values: list[float], label: str, **style: Any) -> None:
    axes.plot(steps, values, label=label, marker=".", **style)


def _page(picture: bytes, rows: Sequence[tuple[str, str]], warnings: Sequence[str]) -> str:
    table = "\n".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    said = "\n".join(f"<p><strong>Warning:</strong> {html.escape(text)}</p>" for text in warnings)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Gradient exchange</title>
<style>body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; }} td {{ padding: 0.2em 1em 0.2em 0; }}</style>
<h1>Gradient exchange of rank 0</h1>
{said}
<table>
{table}
</table>
<img alt="Ratio, residual and times over the steps" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
</html>
"""

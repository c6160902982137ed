"""Shows what the exchange does in the user's own logger, warns when it goes wrong, and sums it up at the end."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_compress.compressors.base import PIECE
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.report import Sample, require_plots, write_report

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback

    from lightning_compress.exchange.hook import GradientExchange
else:
    Callback = object  # the import name in use supplies it as the next class

_STEP_FIGURES = (
    "bytes_sent",
    "bytes_received",
    "ratio",
    "encode_seconds",
    "decode_seconds",
    "wait_seconds",
)
_WORSE = 0.9
"""A measured ratio below this part of the planned one is said."""
_UNKNOWN_BOUND = 1e3
"""Residual norm in gradient norms that is called unbounded where a compressor gives no contraction factor."""


class MonitorGlue(Callback):
    """Logs the bytes and times of the gradient exchange, warns when it goes wrong, and sums it up when training ends.

    Whenever the Trainer logs (``log_every_n_steps``) and at the end of an epoch, rank 0's figures go to all loggers and to
    ``trainer.callback_metrics`` under stable names:

    - of the last step: ``comm/bytes_sent``, ``comm/bytes_received``, ``comm/ratio`` (dense bytes / bytes sent),
      ``comm/density``, ``comm/encode_seconds``, ``comm/decode_seconds``, ``comm/wait_seconds``, and in a hierarchical exchange
      ``comm/bytes_between_nodes``;
    - since the fit began: ``comm/total_bytes_sent``, ``comm/total_bytes_received``, ``comm/skipped_steps`` (by the loss
      scaler);
    - where something is remembered: ``comm/residual_ratio``, the last sample of residual norm / gradient norm.

    It warns once when the residual exceeds what error feedback can owe (Karimireddy et al. 2019, arXiv 1901.09847, Lemma 3)
    and still grows, and once when the measured ratio is more than a tenth below the planned one.

    Args:
        summary: Whether rank 0 prints the table at the end of ``fit``.
        report: A file for plots of ratio, residual and times, written by rank 0 at the end of ``fit``: ``.html`` (with the
            table) or ``.png``. Needs matplotlib, which the extra ``[recipes]`` brings.
        sample_every_n_steps: Optimizer steps between two samples of the residual: a few thousand elements of this rank's
            memory, at the cost of well under a millisecond. They are also the report's points.

    Raises:
        ValueError: An argument is wrong.
        ModuleNotFoundError: A report is asked for and matplotlib is not there.
    """

    def __init__(self, summary: bool = True, report: str | Path | None = None, sample_every_n_steps: int = 50) -> None:
        if (
            isinstance(sample_every_n_steps, bool)
            or not isinstance(sample_every_n_steps, int)
            or sample_every_n_steps < 1
        ):
            raise ValueError(f"sample_every_n_steps must be 1 or more, got {sample_every_n_steps!r}")
        if report is not None:
            require_plots(report)
        self._summary, self._report, self._every = summary, report, sample_every_n_steps
        self._begin()

    def _begin(self, first: dict[str, Any] | None = None) -> None:
        self._first = first or {}
        self._logged_step = 0
        self._norms: tuple[float, float] | None = None
        self._sampled = False
        self._largest_gradient = self._last_residual = 0.0
        self._samples: list[Sample] = []
        self._said: dict[str, str] = {}
        self._settings: Any = None
        self._compressors: list[tuple[int, str]] = []  # and the first step of each

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(_exchange(trainer).stats())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # the one moment at which the gradients are exchanged, unscaled, and not yet clipped
        if trainer.global_step % self._every == 0:
            self._norms = _exchange(trainer).residual_norms()
            self._sampled = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._note_switch(_exchange(trainer))
        due = trainer._logger_connector.should_update_logs or trainer.is_last_batch
        if not (due or self._sampled):
            return
        exchange = _exchange(trainer)
        stats = exchange.stats()
        if stats["steps"] == self._logged_step:
            return  # a micro-batch that was only accumulated
        self._logged_step = stats["steps"]
        if self._sampled:
            self._sampled = False
            self._note(exchange, stats)
            self._watch_bytes(trainer)
            self._watch_residual(trainer)
        if due:
            # float64: a float32 counts bytes exactly only up to 16 MiB
            figures = {
                name: torch.tensor(value, dtype=torch.float64) for name, value in self._figures(exchange).items()
            }
            pl_module.log_dict({f"comm/{name}": value for name, value in figures.items()})

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exchange = _exchange(trainer)
        stats = exchange.stats()
        if not trainer.is_global_zero or stats["steps"] == self._first["steps"]:
            return
        rows = _summary(stats, self._first, exchange, self._norms, self._compressors)
        if self._summary:
            _print_summary(rows)
        if self._report is not None:
            write_report(self._report, self._samples, rows, list(self._said.values()))

    def _figures(self, exchange: GradientExchange) -> dict[str, float]:
        stats = exchange.stats()
        between = ("bytes_between_nodes",) if exchange.settings.hierarchical else ()  # compressed_auto may change it
        figures = {name: stats["last"][name] for name in (*_STEP_FIGURES, *between)}
        figures |= {f"total_{name}": stats[name] - self._first[name] for name in ("bytes_sent", "bytes_received")}
        figures["skipped_steps"] = stats["skipped_steps"] - self._first["skipped_steps"]
        figures["density"] = stats["density"]
        if (ratio := _residual_ratio(self._norms)) is not None:
            figures["residual_ratio"] = ratio
        return figures

    def _note(self, exchange: GradientExchange, stats: dict[str, Any]) -> None:
        last = stats["last"]
        self._samples.append(
            Sample(
                step=stats["steps"] - self._first["steps"],
                ratio=last["ratio"],
                planned_ratio=exchange.planned_ratio(),
                residual_ratio=_residual_ratio(self._norms),
                encode_seconds=last["encode_seconds"],
                decode_seconds=last["decode_seconds"],
                wait_seconds=last["wait_seconds"],
            )
        )

    def _note_switch(self, exchange: GradientExchange) -> None:
        """compressed_auto changes the settings while it trains."""
        if exchange.settings is self._settings:
            return
        self._settings, compressor = exchange.settings, repr(exchange.settings.compressor)
        if not self._compressors or self._compressors[-1][1] != compressor:
            self._compressors.append((exchange.stats()["steps"] - self._first["steps"], compressor))

    def _watch_bytes(self, trainer: Trainer) -> None:
        sample = self._samples[-1]
        if sample.ratio < _WORSE * sample.planned_ratio:
            self._warn(
                trainer,
                "bytes",
                f"The gradient exchange sends {sample.planned_ratio / sample.ratio:.2g} times the planned bytes (ratio "
                f"{sample.ratio:.3g}, planned {sample.planned_ratio:.3g}): each bucket has headers and pads of its own, and "
                "sparse gradients travel uncompressed. Raise bucket_cap_mb, or use nn.Embedding(sparse=False).",
            )

    def _watch_residual(self, trainer: Trainer) -> None:
        if self._norms is None or not math.isfinite(self._norms[1]):
            return  # an overflow, whose step the loss scaler skips, says nothing
        residual, gradient = self._norms
        self._largest_gradient = max(self._largest_gradient, gradient)
        grows = not residual <= self._last_residual  # also when it is not a number
        self._last_residual = residual
        exchange = _exchange(trainer)
        bound = _largest_residual(exchange, trainer.world_size)
        if grows and not residual <= bound * self._largest_gradient:
            self._warn(
                trainer,
                "residual",
                f"The residual of the gradient exchange grows without bound: its norm is {residual:.3g}, the largest "
                f"gradient norm so far {self._largest_gradient:.3g}, and {exchange.settings.compressor!r} owes at most "
                f"{bound:.3g} times that in a stable training. Lower the learning rate, or use a compressor that sends more.",
            )

    def _warn(self, trainer: Trainer, kind: str, text: str) -> None:
        if trainer.is_global_zero and kind not in self._said:
            self._said[kind] = text
            warnings.warn(text, stacklevel=2)


def _exchange(trainer: Trainer) -> GradientExchange:
    exchange = getattr(trainer.strategy, "exchange", None)
    if exchange is None:
        raise ValueError(
            f"CompressionMonitor needs a compressed strategy, this Trainer has {type(trainer.strategy).__name__}: "
            "use Trainer(strategy='compressed') or remove the callback."
        )
    return exchange  # type: ignore[no-any-return]


def _residual_ratio(norms: tuple[float, float] | None) -> float | None:
    if norms is None:
        return None
    residual, gradient = norms
    return residual / gradient if gradient else 0.0 if not residual else math.inf


def _largest_residual(exchange: GradientExchange, world_size: int) -> float:
    """What error feedback owes at most, in norms of the largest exchanged gradient.

    r / (1 - r) local gradients, r = sqrt(1 - delta) with the compressor's contraction delta. A local gradient is at most
    sqrt(N) times its mean if noise is all there is; momentum correction encodes velocities, 1 / (1 - momentum) gradients.
    """
    compressor, memory = exchange.settings.compressor, exchange.settings.memory
    delta = compressor.contraction(compressor.block_size or PIECE)
    r = math.sqrt(1.0 - delta) if delta else 1.0
    bound = r / (1.0 - r) if r < 1.0 else _UNKNOWN_BOUND
    momentum = memory.momentum if isinstance(memory, MomentumCorrection) else 0.0
    return max(1.0, bound) * math.sqrt(world_size) / (1.0 - momentum)


def _summary(
    stats: dict[str, Any],
    first: dict[str, Any],
    exchange: GradientExchange,
    norms: tuple[float, float] | None,
    compressors: list[tuple[int, str]],
) -> list[tuple[str, str]]:
    done = {name: stats[name] - first[name] for name in first if name not in ("last", "ratio", "density")}
    steps, switched = done["steps"], len(compressors) > 1
    ratio = done["dense_bytes"] / done["bytes_sent"] if done["bytes_sent"] else 1.0
    coding = done["encode_seconds"] + done["decode_seconds"]
    rows = [
        ("compressor", ", ".join(f"{name} from step {step}" if switched else name for step, name in compressors)),
        ("steps", f"{steps}"),
        ("steps skipped by the loss scaler", f"{done['skipped_steps']}"),
        ("bytes dense DDP would send", f"{done['dense_bytes']:,}"),
        ("bytes sent", f"{done['bytes_sent']:,}"),
        *([("bytes sent between nodes", f"{done['bytes_between_nodes']:,}")] if exchange.settings.hierarchical else []),
        ("bytes received", f"{done['bytes_received']:,}"),
        ("compression ratio", f"{ratio:.1f}x"),
        ("planned ratio of the last one" if switched else "planned ratio", f"{exchange.planned_ratio():.1f}x"),
        ("encode + decode per step", f"{1e3 * coding / steps:.1f} ms"),
        ("waiting for the network per step", f"{1e3 * done['wait_seconds'] / steps:.1f} ms"),
    ]
    residual = _residual_ratio(norms)
    return rows if residual is None else [*rows, ("residual / gradient (norms, last sample)", f"{residual:.2g}")]


def _print_summary(rows: list[tuple[str, str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # rich comes with the [recipes] extra
        print("\n".join(f"{name}: {value}" for name, value in rows))
        return
    table = Table("gradient exchange of rank 0", "")
    for row in rows:
        table.add_row(*row)
    Console().print(table)

"""Shows what the exchange does in the user's own logger, and in one table at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback

    from lightning_compress.exchange.hook import GradientExchange
else:
    Callback = object  # the import name in use supplies it as the next class


class MonitorGlue(Callback):
    """Logs the bytes and times of the gradient exchange, and prints a summary when training ends.

    Under stable names, per step of rank 0: ``comm/bytes_sent``, ``comm/bytes_received``, ``comm/ratio`` (dense bytes
    / bytes sent), ``comm/density``, ``comm/encode_seconds``, ``comm/decode_seconds``, ``comm/wait_seconds``.

    Args:
        summary: Whether rank 0 prints the table at the end of ``fit``.
    """

    def __init__(self, summary: bool = True) -> None:
        self._summary = summary
        self._first: dict[str, Any] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = _exchange(trainer).stats()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        stats = _exchange(trainer).stats()
        figures = {**stats["last"], "density": stats["density"]}
        pl_module.log_dict({f"comm/{name}": float(value) for name, value in figures.items() if name != "dense_bytes"})

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._summary or not trainer.is_global_zero:
            return
        stats = _exchange(trainer).stats()
        steps = stats["steps"] - self._first["steps"]
        if steps:
            done = {k: stats[k] - self._first[k] for k in stats if k not in ("last", "ratio", "steps", "density")}
            _print_summary(steps, done, _exchange(trainer))


def _exchange(trainer: Trainer) -> GradientExchange:
    exchange = getattr(trainer.strategy, "exchange", None)
    if exchange is None:
        raise ValueError(
            f"CompressionMonitor needs a compressed strategy, this Trainer has {type(trainer.strategy).__name__}: "
            "use Trainer(strategy='compressed') or remove the callback."
        )
    return exchange  # type: ignore[no-any-return]


def _print_summary(steps: int, done: dict[str, Any], exchange: GradientExchange) -> None:
    ratio = done["dense_bytes"] / done["bytes_sent"] if done["bytes_sent"] else 1.0
    rows = [
        ("compressor", repr(exchange.settings.compressor)),
        ("steps", f"{steps}"),
        ("bytes dense DDP would send", f"{done['dense_bytes']:,}"),
        ("bytes sent", f"{done['bytes_sent']:,}"),
        ("compression ratio", f"{ratio:.1f}x"),
        ("encode + decode per step", f"{1e3 * (done['encode_seconds'] + done['decode_seconds']) / steps:.1f} ms"),
        ("waiting for the network per step", f"{1e3 * done['wait_seconds'] / steps:.1f} ms"),
    ]
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

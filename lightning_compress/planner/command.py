"""The command ``lightning-compress plan``: the advisor for a config."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.strategies import StrategyRegistry
from typing_extensions import override

from lightning_compress.cli import CompressCLI
from lightning_compress.planner.planning import Plan, plan
from lightning_compress.planner.training import Ranks

_TRAINER = (
    *("accelerator", "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("sync_batchnorm", "benchmark", "deterministic", "use_distributed_sampler"),
)
"""Settings of a config's Trainer that change what a step costs."""
_DDP = ("find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view")


def main(args: Sequence[str]) -> None:
    """Runs the command.

    Args:
        args: What stands behind ``plan`` on the command line.

    Raises:
        SystemExit: With one sentence, if something is wrong; 130 after Ctrl-C.
    """
    options, experiment = parse(args)
    try:
        # what models and data print must not get between the lines of the result
        with contextlib.redirect_stdout(sys.stderr):
            found = _plan(options, experiment)
    except KeyboardInterrupt:
        print("lightning-compress plan: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("JSONARGPARSE_DEBUG"):
            raise
        what = str(error) if isinstance(error, _RefusedError) else f"{type(error).__name__}: {error}"
        # torch's messages may be pages long; JSONARGPARSE_DEBUG=1 shows them, and the traceback
        raise SystemExit(f"lightning-compress plan: {what.splitlines()[0]}") from None
    if Ranks.started().rank == 0:
        _show(found, options)


def parse(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and those that describe the experiment, for LightningCLI."""
    parser = argparse.ArgumentParser(
        prog="lightning-compress plan",
        description="Measures a config's training steps, this device and the network, predicts the step time under every "
        "gradient exchange, and says which one to take. Further options are those of `lightning-compress fit`: --config, "
        "--model, --data, --trainer. Started by torchrun it measures the network of those ranks.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--bandwidth", help="of the link if it is not to be measured: what each node can send, such as 10gbit")
    add("--latency", default="50us", help="of a message on that link (default: %(default)s)")
    add("--nodes", type=int, help="on that link, one rank each (default: 2)")
    add(
        "--methods",
        nargs="+",
        help="fp32, bf16, or presets without compressed_; with hierarchical_ before them under torchrun (default: all)",
    )
    add("--steps", type=int, default=10, help="training steps to measure (default: %(default)s)")
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    add("--plot", metavar="FILE", help="draw the timelines of fp32, bf16 and the recommended method")
    return parser.parse_known_args(list(args))


def _plan(options: argparse.Namespace, experiment: list[str]) -> Plan:
    if options.plot:
        _check_picture(Path(options.plot))
    cli = _built(experiment)
    settings, strategy = cli.config_init["trainer"], cli.config_init["trainer"]["strategy"]
    if isinstance(strategy, str):
        known = StrategyRegistry[strategy]["init_params"] if strategy in StrategyRegistry else {}
    else:
        known = getattr(strategy, "_ddp_kwargs", {})
    try:
        return plan(
            cli.model,
            cli.datamodule,
            bandwidth=options.bandwidth,
            latency=options.latency,
            nodes=options.nodes,
            methods=options.methods,
            steps=options.steps,
            ddp={name: known[name] for name in _DDP if name in known},
            trainer={name: settings[name] for name in _TRAINER if settings.get(name) is not None},
        )
    except ValueError as error:
        raise _RefusedError(str(error)) from error


def _check_picture(path: Path) -> None:
    """Before everything is measured."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise _RefusedError(f"--plot {path}: a picture's name ends with .png or another of {', '.join(known)}.")
    if not path.absolute().parent.is_dir():
        raise _RefusedError(f"--plot {path}: there is no folder {path.absolute().parent}.")


def _built(experiment: list[str]) -> CompressCLI:
    try:
        return _Experiment(args=experiment, run=False)
    except argparse.ArgumentError as error:
        said = " ".join(str(error).split())
        # the parser tells what else a class could have been, in ten lines
        why = re.search(r"Problem with given class_path .*?(?= - Expected a )", said)
        raise _RefusedError(why[0] if why else said) from error
    except Exception as error:
        raise _RefusedError(f"the model or its data could not be built: {type(error).__name__}: {error}") from error


class _RefusedError(Exception):
    """Something that the user can mend; the message says what."""


class _Experiment(CompressCLI):
    """Builds model and data; the Trainer that measures is not the config's."""

    @override
    def init_parser(self, **kwargs: Any) -> Any:
        return super().init_parser(exit_on_error=False, **kwargs)  # it would print hundreds of options

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def _show(found: Plan, options: argparse.Namespace) -> None:
    from rich.console import Console

    notes = Console(stderr=True, soft_wrap=True)
    if options.plot:
        found.plot(options.plot)
        notes.print(f"timelines: {options.plot}", highlight=False)
    if options.json:
        print(found.to_json())
        notes.print(found.reason, highlight=False, markup=False)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(found.table())
    console.print(found.reason, highlight=False, markup=False, soft_wrap=True)

"""The command ``lightning-compress fit|validate|test|predict|plan``: LightningCLI that knows the shipped configs.

What it adds to LightningCLI: a config that is shipped with the package is found by its name from any folder, and what
names neither a model nor data runs the demo's.
"""

import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_info
from typing_extensions import override

import lightning_compress  # noqa: F401  the import registers the strategies

DEMO = "demo"
CONFIG_OPTIONS = frozenset({"--config", "-c"})
EXPERIMENT_KEYS = frozenset({"model", "data"})
EXPERIMENT_OPTIONS = frozenset({"--model", "--model.class_path", "--data", "--data.class_path"})
RECIPE_MODULES = (
    *("docstring_parser", "jsonargparse", "sklearn", "tokenizers", "torchmetrics", "torchvision", "transformers"),
    "typeshed_client",
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        args: Command line without the program's name; ``None`` takes the process's own.

    Raises:
        SystemExit: With a message, if the command line is wrong or the extra ``[recipes]`` is not installed.
    """
    missing = [name for name in RECIPE_MODULES if find_spec(name) is None]
    if missing:
        raise SystemExit(f'lightning-compress needs {", ".join(missing)}: pip install "lightning-compress[recipes]"')
    words = sys.argv[1:] if args is None else list(args)
    if words[:1] == ["plan"]:
        from lightning_compress.planner.command import main as plan

        plan(words[1:])
        return
    CompressCLI(args=None if args is None else words)


class CompressCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule, with the shipped configs known by name.

    For a notebook: ``CompressCLI(args=["--config", "demo"], run=False).trainer``.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        """Parse ``args`` (``None``: the process's own) and, if ``run``, carry out its subcommand."""
        import lightning_compress.recipes  # noqa: F401  makes their short class names known

        self.run = run
        # No classes are given: any subclass will do, and a model may bring its own data.
        super().__init__(
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            # Without this, `--trainer.max_epoch` would silently be taken for `max_epochs`.
            parser_kwargs={
                "prog": "lightning-compress",
                "allow_abbrev": False,
                "epilog": "`lightning-compress plan` measures a config and says which compression pays: see `plan --help`.",
            },
            args=args,
            run=run,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, after shipped configs have become paths."""
        if args is None:
            args = sys.argv[1:]
        if not isinstance(args, list):  # a dictionary or namespace: there are no names of files in it
            super().parse_arguments(parser, args)
            return
        try:
            expanded = with_shipped_configs(args, self.run)
        except FileNotFoundError as error:
            parser.error(str(error))
        # Not by super(): given a list, it warns that a command line exists as well, which is where this list is from.
        self.config = parser.parse_args(expanded)

    @override
    def instantiate_classes(self) -> None:
        """Build data, model and Trainer; what they say about their settings ends the program as a usage error.

        The environment variable JSONARGPARSE_DEBUG=1 shows the traceback.
        """
        try:
            super().instantiate_classes()
        except (ValueError, FileNotFoundError, MisconfigurationException) as error:
            self.parser.error(str(error), error)


def with_shipped_configs(args: Sequence[str], run: bool = True) -> list[str]:
    """Return a command line in which shipped configs are paths and the demo comes first where it is needed.

    Args:
        args: As typed.
        run: Whether the first word is a subcommand.

    Raises:
        FileNotFoundError: If ``--config`` names neither a file nor a shipped config.
    """
    result: list[str] = []
    configs: list[str] = []
    words = iter(args)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in CONFIG_OPTIONS:
            result.append(word)
            continue
        if not equals and (value := next(words, "")) == "":
            result.append(word)  # the parser will say that its value is missing
            continue
        path = find_config(value)
        configs.append(path)
        result += [option, path]
    start = 1 if run else 0
    started = not run or (bool(result) and result[0] in LightningCLI.subcommands())
    if started and not names_experiment(result[start:], configs):
        rank_zero_info(f"No model and no data given: these are the demo's, {find_config(DEMO)}")
        result[start:start] = ["--config", find_config(DEMO)]
    return result


def names_experiment(args: Sequence[str], configs: Sequence[str]) -> bool:
    """Return whether a command line chooses a model or data.

    Args:
        args: Options. ``--model MyModel`` chooses one; ``--model.lr 0.1`` only changes a setting.
        configs: Files or YAML texts.
    """
    if any(word.partition("=")[0] in EXPERIMENT_OPTIONS for word in args):
        return True
    return any(not EXPERIMENT_KEYS.isdisjoint(_top_keys(config)) for config in configs)


def find_config(name: str) -> str:
    """Return the path of a config.

    Args:
        name: A file, a YAML text, or the name of a shipped config with or without ``.yaml`` and a leading ``configs/``.

    Raises:
        FileNotFoundError: With the names of all shipped configs.
    """
    # What is no plain path (a YAML text, a remote file) is for jsonargparse to read.
    if _is_file(name) or not re.fullmatch(r"[\w./\\-]+", name):
        return name
    shipped = shipped_configs()
    bare = name.removeprefix("configs/").removesuffix(".yaml")
    if bare not in shipped:
        raise FileNotFoundError(f"config {name!r} is neither a file nor one of {', '.join(sorted(shipped))}")
    return str(shipped[bare])


def shipped_configs() -> dict[str, Path]:
    """Return the path of every config in the package by its name, such as ``demo`` or ``compression/topk``."""
    root = Path(str(files("lightning_compress.configs")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def _top_keys(config: str) -> set[Any]:
    """The top-level keys of a file or YAML text; none if it is not a mapping, which the parser will say better."""
    try:
        content = yaml.safe_load(Path(config).read_text() if _is_file(config) else config)
    except (yaml.YAMLError, UnicodeDecodeError):
        return set()
    return set(content) if isinstance(content, dict) else set()


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a YAML text may be longer than a file name can be
        return False


if __name__ == "__main__":
    main()

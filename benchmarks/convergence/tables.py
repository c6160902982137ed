"""The tables: which methods, seeds and lengths one command runs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.convergence.evidence import NO_LOSS, Margin
from benchmarks.convergence.methods import ADAMW, CANDIDATES, CLAN, CLAN_CANDIDATES, RELAXED, SEARCH, SGD

RESNET, VGG, BERT = "resnet8_fashion_mnist", "vgg_fashion_mnist", "tiny_bert_python_docs"
SCREEN_STEPS = 500


@dataclass(frozen=True)
class Table:
    """The runs that one command makes.

    Attributes:
        methods: Names from ``METHODS``; the first is what the others are compared with.
        seeds: Every method runs with each.
        steps: Length of a run.
        about: What the table shows.
        task: Name from ``tasks.TASKS``.
        control: A method that has to be found worse, or the table says nothing about the others. None: no claim is made.
        margin: What counts as no loss.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    about: str
    task: str = RESNET
    control: str | None = None
    margin: Margin = NO_LOSS


def _rates(*methods: str) -> tuple[str, ...]:
    """These methods under all learning rates that are searched for them."""
    return tuple(name for name in SEARCH if name.rpartition("_lr_")[0] in methods)


def _amplitudes(name: str, task: str) -> Table:
    methods = ("dense", "centered_0.03", "centered_0.01", "topk_0.01", "onebit", *RELAXED)
    return Table(methods, (0, 1), SCREEN_STEPS, f"{name}: where is the best amplitude under error feedback?", task)


def _finalists(methods: tuple[str, ...], name: str, task: str) -> Table:
    """At most four methods between dense and the control, with seeds that did not choose them."""
    return Table(methods, tuple(range(10, 18)), 2000, f"{name}: finalists against dense", task, methods[-1])


TABLES: dict[str, Table] = {
    "dgc": Table(
        ("dense", "dgc_0.01", *(f"dgc_0.01_no_{part}" for part in ("correction", "clipping", "masking", "warmup"))),
        (0, 1, 2),
        2000,
        "Deep Gradient Compression at 1 %, and without each of its parts",
    ),
    "dgc_curve": Table(
        ("dense", "dgc_0.001"), (0,), 4000, "Deep Gradient Compression at 0.1 % over the steps of one run"
    ),
    "dgc_settings": Table(
        ("dense", "dgc_0.01", *CANDIDATES),
        (0, 1, 2),
        2000,
        "Settings of Deep Gradient Compression: which cost nothing that can be seen?",
    ),
    "clan": Table(
        (
            *("lans_dense", "clan_onebit", "clan_topk_0.001", "clan_topk_0.01", "clan_dithering_7"),
            *("adamw_dense", "adamw_onebit", "onebit_adam"),
        ),
        (0, 1, 2),
        1000,
        "CLAN and 1-bit Adam on a tiny BERT, masked words of Python's documentation",
        BERT,
    ),
    "clan_lr": Table(
        _rates("lans_dense", "clan_onebit", "clan_topk_0.01", "clan_dithering_7", "adamw_dense", "adamw_onebit"),
        (100,),
        400,
        "Learning rates of CLAN's table, searched alike for each kind of method",
        BERT,
    ),
    "clan_settings": Table(
        (
            *("lans_dense", "clan_onebit", *CLAN_CANDIDATES),
            *("clan_onebit_momentum", "clan_centered_0.06", "clan_ternary", "clan_quantize_4", "ternary_adam"),
        ),
        (0, 1, 2),
        1000,
        "What closes the difference between CLAN and dense training?",
        BERT,
    ),
    "rates_resnet": Table(
        _rates("dense", "ternary", "centered_0.06", "dgc_0.01"),
        (100,),
        SCREEN_STEPS,
        "Learning rates of ResNet-8",
        RESNET,
    ),
    "rates_vgg": Table(
        _rates("dense", "ternary", "centered_0.06", "dgc_0.01"),
        (100,),
        SCREEN_STEPS,
        "Learning rates of the small VGG",
        VGG,
    ),
    "rates_bert": Table(
        _rates(
            "lans_dense", "clan_ternary", "clan_centered_0.06", "adamw_dense", "adamw_ternary", "adamw_centered_0.06"
        ),
        (100,),
        SCREEN_STEPS,
        "Learning rates of the tiny BERT under our own codes",
        BERT,
    ),
    "screen_resnet": Table(
        tuple(SGD), (0, 1), SCREEN_STEPS, "Every exchange on ResNet-8: not evidence, a choice of finalists", RESNET
    ),
    "screen_vgg": Table(
        tuple(SGD), (0, 1), SCREEN_STEPS, "Every exchange on the small VGG: not evidence, a choice of finalists", VGG
    ),
    "screen_lans": Table(
        tuple(CLAN),
        (0, 1),
        SCREEN_STEPS,
        "Every exchange on the tiny BERT under LANS: not evidence, a choice of finalists",
        BERT,
    ),
    "screen_adamw": Table(
        tuple(ADAMW),
        (0, 1),
        SCREEN_STEPS,
        "Every exchange on the tiny BERT under AdamW: not evidence, a choice of finalists",
        BERT,
    ),
    "amplitude_resnet": _amplitudes("ResNet-8", RESNET),
    "amplitude_vgg": _amplitudes("The small VGG", VGG),
    "finalists_resnet": _finalists(
        ("dense", "quantize_4", "ternary", "centered_0.06", "centered_0.03_dense_0.1", "control"),
        "ResNet-8",
        RESNET,
    ),
    "finalists_vgg": _finalists(
        ("dense", "quantize_4", "quantize_2", "centered_0.06", "centered_0.03_dense_0.1", "control"),
        "The small VGG",
        VGG,
    ),
    "finalists_lans": _finalists(
        ("lans_dense", "clan_ternary", "clan_centered_0.06", "clan_quantize_4", "clan_control"),
        "The tiny BERT, LANS",
        BERT,
    ),
    "finalists_adamw": _finalists(
        ("adamw_dense", "adamw_ternary", "adamw_quantize_4", "ternary_adam", "adamw_control"),
        "The tiny BERT, AdamW",
        BERT,
    ),
}

"""The tables: which methods, seeds and lengths one command runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.convergence.methods import CANDIDATES, CLAN, CLAN_CANDIDATES, SEARCH


@dataclass(frozen=True)
class Table:
    """The runs that one command makes.

    Attributes:
        methods: Names from ``METHODS``; the first is what the others are compared with.
        seeds: Every method runs with each.
        steps: Length of a run.
        about: What the table shows.
        task: Name from ``tasks.TASKS``.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    about: str
    task: str = field(default="resnet8_fashion_mnist")


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
        tuple(CLAN),
        (0, 1, 2),
        1000,
        "CLAN and 1-bit Adam on a tiny BERT, masked words of Python's documentation",
        "tiny_bert_python_docs",
    ),
    "clan_lr": Table(
        tuple(SEARCH),
        (100,),
        400,
        "Learning rates of CLAN's table: three for each kind of method",
        "tiny_bert_python_docs",
    ),
    "clan_settings": Table(
        ("lans_dense", "clan_onebit", *CLAN_CANDIDATES),
        (0, 1, 2),
        1000,
        "What closes the difference between CLAN and dense training?",
        "tiny_bert_python_docs",
    ),
}

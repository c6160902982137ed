"""``plan(model, data)``: measures, predicts every gradient exchange, and recommends one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner import units
from lightning_compress.planner.advice import explain, recommend
from lightning_compress.planner.costs import measure_costs
from lightning_compress.planner.link import GivenLink, Link, host_cost, measure_link
from lightning_compress.planner.methods import Method, check_names, method_names
from lightning_compress.planner.predict import Prediction, predict
from lightning_compress.planner.profile import Profile
from lightning_compress.planner.progress import progress
from lightning_compress.planner.training import WARM_UP, Ranks, group_left_as_found, measure_training

_PIECES_OF_A_METHOD = 4
_PIECES_OF_A_LINK = 18
"""Of each level."""


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        recommended: A preset without ``compressed_``, with ``hierarchical_`` before it where that is better, or "fp32" or
            "bf16" for uncompressed DDP.
        reason: One sentence.
        predictions: Of every method, mildest first.
        link: The network, in one line.
    """

    recommended: str
    reason: str
    predictions: tuple[Prediction, ...]
    link: str

    def rows(self) -> list[dict[str, str | float | int]]:
        """method, step_ms, low_ms, high_ms, exposed_ms and bytes of every method."""
        return [prediction.as_row() for prediction in self.predictions]

    def to_json(self) -> str:
        """One line: ``recommended`` and ``rows``."""
        return json.dumps({"recommended": self.recommended, "rows": self.rows()})

    def table(self) -> Any:
        """A table for ``rich.print``. Needs rich."""
        from lightning_compress.planner.report import make_table

        return make_table(self.predictions, self.recommended, self.link)

    def plot(self, path: str | Path, methods: Sequence[str] = ()) -> None:
        """Draws the timelines of some methods into a picture: fp32, bf16 and the recommended one. Needs matplotlib."""
        from lightning_compress.planner.plot import draw

        known = {p.method for p in self.predictions}
        if unknown := sorted(set(methods) - known):
            raise ValueError(f"{unknown[0]!r} was not compared: plan(..., methods=[{unknown[0]!r}, ...]).")
        wanted = set(methods) or {"fp32", "bf16", self.recommended}
        draw([p for p in self.predictions if p.method in wanted], Path(path))


def plan(
    model: Any,
    data: Any = None,
    *,
    bandwidth: str | None = None,
    latency: str = "50us",
    nodes: int | None = None,
    methods: Sequence[str] | None = None,
    steps: int = 10,
    ddp: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Plan:
    """Says whether compressing the gradient exchange of a model pays, and which exchange to take.

    Measures training steps (exchanging nothing), the network, and the encoding and decoding of every method at the model's
    bucket sizes on this device, then simulates a step of each method. The model's weights are left as they were.

    Started on several ranks (``torchrun``, SLURM), it measures their network; called alike on all ranks, which get the same
    answer. On one process name a link: ``plan(model, data, bandwidth="10gbit", latency="100us", nodes=16)``.

    Args:
        model: A LightningModule.
        data: A LightningDataModule, a DataLoader, one batch, or None for the model's own ``train_dataloader``.
        bandwidth: What each node can send, such as "10gbit"; None: measure it.
        latency: Of a message on the named link.
        nodes: Number of ranks on the named link, one per node; None: 2.
        methods: To compare; None: all of ``lightning_compress.planner.method_names()``.
        steps: Training steps to measure.
        ddp: Arguments of ``DDPStrategy``, such as ``find_unused_parameters``.
        trainer: Arguments of the Trainer that change a step: accelerator, precision, accumulate_grad_batches, ...

    Raises:
        ValueError: No link to measure and none named, or a wrong argument.
    """
    if steps < 1:
        raise ValueError(f"steps is the number of measured training steps and must be 1 or more, got {steps}.")
    ranks = Ranks.started()
    named = _named_link(bandwidth, latency, nodes, ranks.world_size)
    places = ranks.nodes if named is None else Nodes.alone(named.world_size)
    names = method_names(places) if methods is None else check_names(methods, places)
    links = 0 if named else 3 if places.nested else 1
    work = WARM_UP + steps + len(names) * _PIECES_OF_A_METHOD + links * _PIECES_OF_A_LINK
    with group_left_as_found(), progress(work) as advance:
        profile = measure_training(model, data, steps, ranks, ddp or {}, trainer or {}, advance)
        rank, link = _rank_and_link(named, places, profile, advance)
        found = compare(names, model, profile, link, rank, places, advance)
        if ranks.world_size > 1:  # each has measured with its own clock: all take rank 0's
            message = [found]
            dist.broadcast_object_list(message, src=0)
            found = message[0]
        return found


def compare(
    names: Sequence[str],
    model: Any,
    profile: Profile,
    link: Link,
    rank: int,
    nodes: Nodes,
    advance: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Measures the costs of some methods for a model whose steps and link are known, and predicts.

    Args:
        names: The methods.
        model: The module that DDP wraps.
        profile: Its steps.
        link: Its network.
        rank: This rank.
        nodes: Where all ranks are.
        advance: Told of each piece of work.
    """
    predictions = tuple(
        predict(method, profile, measure_costs(method, model, profile, rank, nodes, advance), link)
        for method in map(Method.named, names)
    )
    chosen = recommend(predictions)
    return Plan(chosen.method, explain(chosen, predictions), predictions, link.describe())


def _named_link(bandwidth: str | None, latency: str, nodes: int | None, world_size: int) -> GivenLink | None:
    if bandwidth is None:
        if world_size == 1:
            raise ValueError(
                "There is one process and so no link to measure: name one with bandwidth='10gbit' (--bandwidth 10gbit "
                "--latency 100us --nodes 16), or start several ranks with torchrun."
            )
        if nodes is not None:
            raise ValueError("nodes belongs to a named link: give bandwidth='10gbit' (--bandwidth 10gbit) too.")
        return None
    count = (max(2, world_size)) if nodes is None else nodes
    if count < 2:
        raise ValueError(f"nodes={count}: an exchange needs 2 nodes or more.")
    return GivenLink(units.bandwidth(bandwidth), units.duration(latency), count)


def _rank_and_link(
    named: GivenLink | None, nodes: Nodes, profile: Profile, advance: Callable[[str], None]
) -> tuple[int, Link]:
    if named is None:
        group = dist.group.WORLD
        assert group is not None
        return dist.get_rank(), measure_link(group, profile.device, nodes, advance)
    host = host_cost() if profile.device.type == "cpu" else 0.0
    return 0, GivenLink(named.bandwidth, named.latency, named.world_size, host)

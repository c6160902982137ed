"""A training that is disturbed at random, against one that is not: overflows, accumulation, saves, resumes, world sizes.

python benchmarks/soak.py [--methods compressed ...] [--steps 600] [--seed 0] [--json] [--save]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.methods import make_exchange
from benchmarks.report import Row, add_output_options, make_table, publish, short
from lightning_compress.checkpoint import replaced_at_once
from lightning_compress.planner.progress import progress
from lightning_compress.state import SIDES, merge

METHODS = ("compressed", "compressed_topk", "compressed_onebit")
"""Codes without dice: their numbers count exchanges, and a skipped exchange would shift them."""
BATCH = 24
"""Of all ranks together: 1, 2, 3 and 4 divide it, so that the true gradient is the same on any number of ranks."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: how many batches it accumulates, and whether one rank's gradient overflows (then: which)."""

    number: int
    batches: int
    overflow: int | None


@dataclass(frozen=True)
class Leg:
    """Steps from a start of the processes to their end, and the number of ranks."""

    world_size: int
    steps: tuple[Step, ...]


def draw(steps: int, largest: int, seed: int) -> list[Leg]:
    """A random course; every third leg goes on with as many ranks as before."""
    dice = random.Random(seed)
    legs: list[Leg] = []
    number = 0
    while number < steps:
        size = legs[-1].world_size if legs and dice.random() < 1 / 3 else dice.randint(1, largest)
        count = min(steps - number, dice.randint(5, 40))
        drawn = [
            Step(n, dice.choice([1, 1, 2, 3]), dice.randrange(size) if dice.random() < 0.08 else None)
            for n in range(number, number + count)
        ]
        legs.append(Leg(size, tuple(drawn)))
        number += count
    return legs


def undisturbed(legs: Sequence[Leg]) -> list[Leg]:
    """The same course without the steps that overflow, and without a restart where the number of ranks stays."""
    return [
        Leg(size, tuple(step for leg in same for step in leg.steps if step.overflow is None))
        for size, same in groupby(legs, key=lambda leg: leg.world_size)
    ]


class Trainee(nn.Module):
    """A small network with tensors of several blocks, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 110), nn.LayerNorm(110), nn.Tanh(), nn.Linear(110, 60), nn.Tanh())
        self.head = nn.Linear(60, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 20] -> [batch, 5]."""
        return self.head(self.body(x))


def model() -> Trainee:
    """The same start everywhere."""
    torch.manual_seed(0)
    return Trainee()


def batch(step: int, part: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of a global batch of a fixed task."""
    generator = torch.Generator().manual_seed(100 * step + part)
    x = torch.randn(BATCH, 20, generator=generator)
    y = torch.stack([torch.sin(x[:, i] + 2 * x[:, i + 5]) for i in range(5)], dim=1)
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def run_leg(rank: int, leg: Leg, method: str, folder: str) -> None:
    """What one rank does: resumes from ``checkpoint.pt`` if it is there, trains, leaves its state in ``rankN.pt``."""
    torch.set_num_threads(1)
    store = Path(folder) / f"store{leg.steps[0].number}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=leg.world_size)
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
    exchange = make_exchange(method).attach(ddp, grad_scaler=scaler)
    saved = Path(folder) / "checkpoint.pt"
    loaded: dict[str, Any] = {}
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        exchange.load_state_dict(state["exchange"])
        loaded = exchange.state_dict()
    for step in leg.steps:
        optimizer.zero_grad()
        for part in range(step.batches):
            x, y = batch(step.number, part, rank, leg.world_size)
            with ExitStack() as stack:
                if part + 1 < step.batches:
                    stack.enter_context(ddp.no_sync())
                loss = (ddp(x) - y).square().mean() / step.batches
                # finite, but its scaled gradient is not
                scaler.scale(loss * 1e38 if step.overflow == rank else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    mine = {
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "exchange": exchange.state_dict(),
        "loaded": loaded,
    }
    torch.save(mine, Path(folder) / f"rank{rank}.pt")
    exchange.close()
    dist.barrier()
    dist.destroy_process_group()


def run(legs: Sequence[Leg], method: str, folder: Path, advance: Any) -> tuple[dict[str, Tensor], float]:
    """Runs legs one after the other in new processes; returns the parameters, and the worst error of what is owed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning_compress", "benchmarks.soak"])
    worst, owed_before = 0.0, None
    parameters: dict[str, Tensor] = {}
    for leg in legs:
        if not leg.steps:
            continue
        ranks = [
            context.Process(target=run_leg, args=(rank, leg, method, str(folder))) for rank in range(leg.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{method}: a rank has failed in the leg that begins at step {leg.steps[0].number}")
        states = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(leg.world_size)]
        parameters = states[0]["model"]
        for state in states[1:]:
            if any(not torch.equal(state["model"][name], p) for name, p in parameters.items()):
                raise RuntimeError(f"{method}: the ranks have drifted apart by step {leg.steps[-1].number}")
        if owed_before is not None:
            worst = max(worst, distance(owed(merge(s["loaded"] for s in states)), owed_before))
        exchange = merge(s["exchange"] for s in states)
        owed_before = owed(exchange)
        with replaced_at_once(folder / "checkpoint.pt") as path:
            torch.save({**states[0], "exchange": exchange}, path)
        advance(f"{method}, {leg.world_size} ranks")
    return parameters, worst


def owed(state: dict[str, Any]) -> dict[str, Tensor]:
    """What is owed to each parameter, float64: the mean of the workers' residuals, and the owners'."""
    names = sorted({name for side in SIDES for name in state[side]})
    return {
        name: sum(
            (r.double() / len(state["worker"][name]) for r in state["worker"].get(name, [])),
            start=state["owner"].get(name, torch.zeros(())).double(),
        )
        for name in names
    }


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    errors = [
        float((found[name] - e).abs().max() / e.abs().max().clamp_min(1e-30)) if name in found else 1.0
        for name, e in expected.items()
        if e.any()
    ]
    return max(errors, default=0.0)


def dense_loss(legs: Sequence[Leg], steps: bool) -> float:
    """Loss of dense training on one process over the same batches; of the untrained model if not ``steps``."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in (step for leg in legs for step in leg.steps if steps and step.overflow is None):
        optimizer.zero_grad()
        for part in range(step.batches):
            x, y = batch(step.number, part)
            ((net(x) - y).square().mean() / step.batches).backward()
        optimizer.step()
    return held_out_loss(net.state_dict())


def held_out_loss(parameters: dict[str, Tensor]) -> float:
    """Mean square error on batches that nobody trains on."""
    net = model()
    net.load_state_dict(parameters)
    with torch.no_grad():
        losses = [(net(x) - y).square().mean() for x, y in (batch(10**6 + i, 0) for i in range(50))]
    return float(torch.stack(losses).mean())


def soak(method: str, legs: Sequence[Leg], advance: Any) -> Row:
    """One method's line of the result."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        found, worst = run(legs, method, Path(one), advance)
        expected, _ = run(undisturbed(legs), method, Path(other), advance)
    steps = [step for leg in legs for step in leg.steps]
    return {
        "method": method,
        "steps": len(steps),
        "overflows": sum(step.overflow is not None for step in steps),
        "accumulating_steps": sum(step.batches > 1 for step in steps),
        "resumes": len(legs) - 1,
        "changes_of_world_size": len(list(groupby(legs, key=lambda leg: leg.world_size))) - 1,
        "world_sizes": sorted({leg.world_size for leg in legs}),
        "bit_identical": all(torch.equal(found[name], p) for name, p in expected.items()),
        "owed_error": worst,
        "loss": held_out_loss(found),
        "dense_loss": dense_loss(legs, True),
        "untrained_loss": dense_loss(legs, False),
        "seconds": round(time.perf_counter() - start, 1),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all of them")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 3, 4), help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances (default: %(default)s)")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be 1 or more, got {args.steps}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Soaks and prints; exits with 1 if a disturbed run is not the undisturbed one."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    legs = draw(args.steps, args.ranks, args.seed)
    with progress(len(args.methods) * (len(legs) + len(undisturbed(legs)))) as advance:
        rows = [soak(method, legs, advance) for method in args.methods]
    columns = ["method", "identical", "steps", "overflows", "resumes", "other ranks", "owed error", "loss", "dense"]
    caption = (
        "Identical: to the bit, to the run without overflows and restarts. Other ranks: resumes on another number."
    )
    table = make_table("Disturbed against undisturbed training", columns, caption)
    for r in rows:
        counts = (r["steps"], r["overflows"], r["resumes"], r["changes_of_world_size"])
        cells = (*map(str, counts), f"{r['owed_error']:.1e}", short(r["loss"]), short(r["dense_loss"]))
        table.add_row(r["method"], "yes" if r["bit_identical"] else "NO", *cells)
    publish(args, rows, table, ["soak", *argv])
    if not all(r["bit_identical"] for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

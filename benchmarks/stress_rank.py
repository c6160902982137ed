"""What ``stress.py`` draws, and what each of its ranks does."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_compress import DensityWarmup, GradientExchange, MomentumCorrection
from lightning_compress.compressors import Compressor, compressor_names, get_compressor
from lightning_compress.exchange.topology import ReduceAll
from lightning_compress.state import SIDES
from lightning_compress.testing import SimulatedExchange

STEPS = 3
"""Of each exchange: in the second one there is something to remember, in the third DDP may have made other buckets."""
FORMATS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_EXCHANGES = ("auto", "all_reduce", "all_gather", "two_way")
_BUCKET_MB = (1e-6, 1e-6, 1e-6, 0.01, 25.0)
"""The first gives every parameter a bucket of its own."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One random exchange.

    Attributes:
        number: Seeds its gradients.
        world_size: Number of ranks.
        shapes: Of the parameters.
        dtype: Of the parameters.
        bucket_mb: DDP's bucket_cap_mb.
        absent: Share of its parameters that a rank's backward does not reach.
        ranks_per_node: For a hierarchical exchange.
        arguments: Of ``GradientExchange``.
    """

    number: int
    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bucket_mb: float
    absent: float
    ranks_per_node: int
    arguments: dict[str, Any] = field(hash=False)


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        way: The exchange that was chosen.
        buckets: Of its last step.
        bucket_exchanges: Of all steps.
        bits: Whether the order of sums cannot matter, so that all bits have to be the same.
        differs: What is not as simulated, empty if nothing.
    """

    way: str
    buckets: int
    bucket_exchanges: int
    bits: bool
    differs: str


def draw(count: int, world_size: int, seed: int) -> list[Case]:
    """So many random exchanges, the same at every call."""
    dice, names = random.Random(f"{seed} {world_size}"), compressor_names()
    return [_case(number, world_size, names, dice) for number in range(count)]


def _case(number: int, world_size: int, names: Sequence[str], dice: random.Random) -> Case:
    sizes = [0, 1, 2, 3, 17, 40, 90]
    shapes = tuple(tuple(dice.choice(sizes) for _ in range(dice.choice([1, 2, 2]))) for _ in range(dice.randint(1, 50)))
    nodes = [size for size in range(2, world_size) if world_size % size == 0]
    ranks_per_node = dice.choice([1, *nodes])
    return Case(
        number,
        world_size,
        ((30, 40), *shapes[1:]),  # of the first one there is a gradient in every backward
        dice.choice(["float32", "float32", *FORMATS]),
        dice.choice(_BUCKET_MB),
        dice.choice([0.0, 0.0, 0.0, 0.3]),
        ranks_per_node,
        _arguments(names, dice, ranks_per_node > 1),
    )


def _arguments(names: Sequence[str], dice: random.Random, hierarchical: bool) -> dict[str, Any]:
    """Arguments that go together: those that do not are errors, and drawn again."""
    while True:
        way = dice.choice(_EXCHANGES)
        arguments: dict[str, Any] = {
            "compressor": _compressor(names, dice),
            "memory": dice.choice(["auto", "auto", "none", "error_feedback", _correction(dice)]),
            "exchange": f"hierarchical_{way}".removesuffix("_auto") if hierarchical else way,
            "dense": dice.choice(["auto", "auto", "fp32", "fp8", 0, 100]),
            "start_step": dice.choice([0, 0, 0, 0, 0, 1]),
            "schedule": dice.choice([None, None, None, None, DensityWarmup((0.5, 0.3), steps=1)]),
            "verify_every": dice.choice([0, 0, 1]),
        }
        with suppress(ValueError), _silence():
            GradientExchange(**arguments)
            return arguments


def _compressor(names: Sequence[str], dice: random.Random) -> Compressor:
    compressor = get_compressor(dice.choice(names))
    for name, choices in {
        "bits": (2, 3, 4, 8),
        "ratio": (0.001, 0.05, 0.3),
        "block_size": (64, 250, 1024, None),
    }.items():
        if hasattr(compressor, name) and dice.random() < 0.5:
            setattr(compressor, name, dice.choice(choices))
    return compressor


def _correction(dice: random.Random) -> MomentumCorrection:
    clip = dice.choice([None, 1.0])
    return MomentumCorrection(0.9, nesterov=dice.random() < 0.5, factor_masking=dice.random() < 0.5, clip_norm=clip)


class _silence(warnings.catch_warnings):  # noqa: N801  # used as a function
    """Of settings that are worse than others, and of small models: here they are meant."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def serve(
    rank: int, world_size: int, cases: Sequence[Case], limit: float, folder: str, pipe: Connection | None
) -> None:
    """A process of its own: carries out all cases; the one with a pipe says what came of each."""
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    timeout = timedelta(seconds=limit)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    for outcome in outcomes(cases):
        if pipe is not None:
            pipe.send(outcome)
    dist.barrier()
    dist.destroy_process_group()


def outcomes(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Carries out one case after the other, as one of the ranks; every rank yields the same.

    The ranks simulate in turns, and each compares what it has itself.
    """
    for case in cases:
        found = exchange(case)
        mine = (found.digest, "")
        if case.number % case.world_size == dist.get_rank():
            mine = (found.digest, compare(case, found))
        everyone = [mine] * case.world_size
        dist.all_gather_object(everyone, mine)
        differs = next((text for _, text in everyone if text), "")
        if len({digest for digest, _ in everyone}) > 1:
            differs = "the ranks hold different gradients"
        yield Outcome(found.way, found.buckets, found.bucket_exchanges, found.bits, differs)


@dataclass
class Found:
    """What one rank holds after a case: the gradients of every step, and its memories."""

    gradients: list[Gradients]
    state: dict[str, Any]
    way: str
    buckets: int
    bucket_exchanges: int
    bits: bool

    @property
    def digest(self) -> str:
        """Of all gradients."""
        digest = hashlib.sha256()
        for name, gradient in ((n, g) for step in self.gradients for n, g in sorted(step.items())):
            digest.update(name.encode() + gradient.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def exchange(case: Case) -> Found:
    """The real thing: DDP, process groups, threads."""
    model = Parts(case)
    ddp = DistributedDataParallel(model, bucket_cap_mb=case.bucket_mb, find_unused_parameters=case.absent > 0)
    with _silence():
        counting = Counting(**case.arguments)
        counting.attach(ddp, ranks_per_node=case.ranks_per_node)
        found = []
        for step in range(STEPS):
            ddp.zero_grad()
            counting.buckets = 0
            ddp(gradients(case, dist.get_rank(), step)).backward()
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    state = counting.state_dict()
    settings = counting._runtime.exchange.settings  # type: ignore[union-attr]
    counting.close()
    way = settings.topology.name if settings.topology else "none"
    return Found(
        found,
        state,
        f"hierarchical_{way}" if settings.hierarchical else way,
        counting.buckets,
        counting.total,
        _exact(settings, case),
    )


def _exact(settings: Any, case: Case) -> bool:
    """Whether no all-reduce adds up more than two numbers, whose order is gloo's."""
    peers = case.world_size // case.ranks_per_node if settings.hierarchical else case.world_size
    dense = settings.start_step or settings.schedule is not None
    return (settings.topology not in (None, ReduceAll) or peers == 2) and (not dense or case.world_size == 2)


class Counting(GradientExchange):
    """Counts its buckets: of this step, and of all."""

    buckets = total = 0

    # DDP inspects the signature
    @override
    def _hook(self, _state, bucket):  # type: ignore[no-untyped-def]
        self.buckets += 1
        self.total += 1
        return super()._hook(_state, bucket)  # type: ignore[no-untyped-call]


class Parts(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=FORMATS[case.dtype])) for s in case.shapes)

    def forward(self, gradients: Gradients) -> Tensor:
        """The sum of all products."""
        return torch.stack([(p * gradients[n]).sum() for n, p in self.named_parameters() if n in gradients]).sum()


def gradients(case: Case, rank: int, step: int) -> Gradients:
    """A rank's gradients: of very different sizes, in part zero, and some missing."""
    dice = random.Random(f"{case.number} {rank} {step}")
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    drawn: Gradients = {}
    for index, shape in enumerate(case.shapes):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** dice.randint(-4, 2)
        gradient *= torch.rand(shape, generator=generator) < dice.choice([0.1, 1.0, 1.0])
        if index == 0 or dice.random() >= case.absent:
            drawn[f"parts.{index}"] = gradient.to(FORMATS[case.dtype])
    return drawn


def compare(case: Case, found: Found) -> str:
    """What of a rank's gradients and memories is not as simulated; empty if nothing."""
    arguments = {name: value for name, value in case.arguments.items() if name != "verify_every"}
    with _silence():
        simulated = SimulatedExchange(Parts(case), case.world_size, ranks_per_node=case.ranks_per_node, **arguments)
        largest = 0.0
        for step, mine in enumerate(found.gradients):
            of_all = [gradients(case, rank, step) for rank in range(case.world_size)]
            expected = simulated.mean(of_all)
            if expected.keys() != mine.keys():
                return f"step {step} has other gradients: {sorted(expected.keys() ^ mine.keys())}"
            largest = max(largest, *(float(g.abs().max()) for of_one in of_all for g in of_one.values() if g.numel()))
            allowed = 0.0 if found.bits else _rounding(case, largest)
            for name, gradient in expected.items():
                if not torch.allclose(gradient, mine[name], rtol=0.0, atol=allowed):
                    return f"step {step}, {name}"
    state = simulated.workers[dist.get_rank()].state()
    return next((f"the memory {side}" for side in SIDES if not _equal(state[side], found.state[side])), "")


def _rounding(case: Case, largest: float) -> float:
    """What the order of a sum of N numbers can change; 16-bit codes are added up in their own format.

    A summand is no larger than a few of the largest gradients so far: it holds what is remembered of them.
    """
    formats = (FORMATS[case.dtype], case.arguments["compressor"].value_dtype)
    eps = max(torch.finfo(one).eps for one in formats if one.is_floating_point)
    return (case.world_size - 1) * eps / 2 * (6 * largest + 1e-4)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other)

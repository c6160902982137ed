"""Time of every compressor's encode and decode against one pass over memory, ``residual.add_(gradient)``.

python benchmarks/kernels.py [--numel N] [--threads T] [--dtype float32] [--device cuda] [--compressors quantize_4 ...]
    [--json] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

if not __package__:  # run as a script: this folder's kernels.py must not hide the package `kernels` from transformers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.report import Row, add_output_options, make_table, publish, short
from lightning_compress.compressors import CenteredTopK, Compressor, TopK, compressor_names, get_compressor
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.exchange.plan import BlockPlan, ParameterSpec
from lightning_compress.exchange.threads import Threads
from lightning_compress.kernels.batch import MemoryView
from lightning_compress.kernels.table import PRESENT
from lightning_compress.planner.progress import progress

MORE_BITS = {"quantize": (2, 3, 4, 8), "dithering": (4, 5, 8), "natural": (3, 4)}
"""Widths that get a row of their own by default; of other compressors it is the default width."""
LARGEST = (TopK, CenteredTopK)
"""Compressors that look for the largest elements: ``torch.topk`` is what they replace."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}
WHOLE = "_tensor"
"""End of the name of a row whose block is the whole tensor."""
ROW = 1024
"""Elements of a row of the imagined weight; codes that have no zero carry one bit for each."""
WARM_UP = 2
"""Rounds before measuring: they compile, touch the pages, and fill the residual."""
_SLACK = 65536


class Arena:
    """The arrays that everything is measured on, allocated once.

    Args:
        numel: Elements of the gradient.
        dtype: Their type; residuals are float32, float64 beside float64 gradients.
        device: Where they are.
        threads: How many work on one encode or decode.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: str = "cpu", threads: int = 1) -> None:
        self.numel, self.dtype, self.device, self.threads = numel, dtype, device, Threads(threads)
        self.ms = _cuda_ms if device == "cuda" else _ms
        self.state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(0)
        self._noise = (torch.randn(numel + _SLACK, generator=generator) * 1e-3).to(device, dtype)
        self.out = torch.zeros(numel, dtype=dtype, device=device)
        self._residual = torch.zeros(numel, dtype=self.state_dtype, device=device)

    def gradient(self, number: int) -> Tensor:
        """A different random gradient for every ``number``, for nothing: another window of the same noise."""
        start = number * 4096 % _SLACK
        return self._noise[start : start + self.numel]

    def add(self, gradient: Tensor) -> None:
        """The pass over memory that everything is compared with."""
        self._residual.add_(gradient)

    def copy(self, gradient: Tensor) -> None:
        """The pass that a GPU's bandwidth is measured by."""
        self.out.copy_(gradient)


class Case(ABC):
    """One thing to measure."""

    operations: ClassVar[tuple[str, ...]]
    name: str
    moved: dict[str, int]
    """Bytes that each operation must read and write."""

    @abstractmethod
    def round(self, number: int, gradient: Tensor) -> dict[str, float]:
        """Milliseconds of each operation on ``gradient``, in repetition ``number``."""


class CodecCase(Case):
    """A compressor as the exchange runs it: through the block codec, with error feedback if it is biased.

    Args:
        name: Name of its row.
        compressor: What to measure.
        arena: On what.
    """

    operations = ("encode", "decode")

    def __init__(self, name: str, compressor: Compressor, arena: Arena) -> None:
        self.name = name
        row = min(ROW, arena.numel) if compressor.block_size else arena.numel
        spec = ParameterSpec("weight", arena.numel, row, dense=False)
        blocks = BlockPlan([spec], compressor, compressor, owners=1, whole_tensors=True)
        plan = blocks.bucket(["weight"], {"weight": 0}, {"weight": 0})
        (part,) = plan.parts
        self._codec = BlockCodec(compressor, part.table.to(arena.device), per_tensor=True, threads=arena.threads)
        self._payload = torch.zeros(plan.section_nbytes[0], dtype=torch.uint8, device=arena.device)
        self._status = torch.full((1,), PRESENT, dtype=torch.uint8, device=arena.device)
        self._arena = arena
        self.moved = dict.fromkeys(self.operations, arena.out.nbytes + self._payload.nbytes)
        if compressor.unbiased:
            self._memory = MemoryView.nothing(arena.gradient(0))
        else:
            state = torch.zeros(arena.numel, dtype=arena.state_dtype, device=arena.device)
            zero = torch.zeros(1, dtype=torch.int64, device=arena.device)
            self._memory = MemoryView(state, zero, zero, compensate=True, update=True)
            self.moved["encode"] += 2 * state.nbytes

    @override
    def round(self, number: int, gradient: Tensor) -> dict[str, float]:
        codec, payload, status, arena = self._codec, self._payload, self._status, self._arena
        payload.zero_()  # the codec wants zeros; the exchange gets them from the allocator
        return {
            "encode": arena.ms(codec.encode, gradient, self._memory, payload, status, salt=number),
            "decode": arena.ms(codec.decode, payload, arena.out, status, salt=number),
        }


class TorchTopK(Case):
    """``torch.topk`` of the same share of the same gradient: the baseline of the top-k compressors.

    Only the search: without its magnitudes, residual, packing and decoding.
    """

    operations = ("encode",)

    def __init__(self, ratio: float, arena: Arena) -> None:
        self.name = f"torch.topk_{ratio:g}"
        self._k = max(1, round(ratio * arena.numel))
        self._magnitudes = torch.empty(arena.numel, dtype=arena.dtype, device=arena.device)
        self._arena = arena
        self.moved = {"encode": self._magnitudes.nbytes}

    @override
    def round(self, number: int, gradient: Tensor) -> dict[str, float]:
        torch.abs(gradient, out=self._magnitudes)
        return {"encode": self._arena.ms(torch.topk, self._magnitudes, self._k, sorted=False)}


@dataclass
class Timing:
    """Milliseconds of an operation and of the memory passes that took turns with it.

    ``copied`` and ``moved`` are the bytes that a copy and the operation read and write.
    """

    case: str
    operation: str
    ms: list[float]
    add_ms: list[float]
    copy_ms: list[float]
    copied: int
    moved: int

    @property
    def ratio(self) -> float:
        """Least time over least time: what else runs on the machine only ever adds."""
        return min(self.ms) / min(self.add_ms)

    @property
    def share_of_copy(self) -> float:
        """Bytes per second over those of a copy: 1 is the memory's bandwidth."""
        return self.moved / min(self.ms) / (self.copied / min(self.copy_ms))


def measure(case: Case, arena: Arena, repeat: int) -> list[Timing]:
    """Times ``case``, in turns with the memory pass so that a drift of the machine hits both."""
    for number in range(WARM_UP):
        arena.add(arena.gradient(number))
        case.round(number, arena.gradient(number))
    add, copy, rounds = [], [], []
    for number in range(WARM_UP, WARM_UP + repeat):
        gradient = arena.gradient(number)
        add.append(arena.ms(arena.add, gradient))
        copy.append(arena.ms(arena.copy, gradient))
        rounds.append(case.round(number, gradient))
    copied = 2 * arena.out.nbytes
    return [
        Timing(case.name, operation, [r[operation] for r in rounds], add, copy, copied, case.moved[operation])
        for operation in case.operations
    ]


def _ms(work: Callable[..., object], *arguments: object, **options: object) -> float:
    start = time.perf_counter()
    work(*arguments, **options)
    return (time.perf_counter() - start) * 1e3


def _cuda_ms(work: Callable[..., object], *arguments: object, **options: object) -> float:
    """Time on the device alone: it is kept busy until everything is enqueued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(3_000_000)  # clock cycles, more than a millisecond
    start.record()
    work(*arguments, **options)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def default_rows() -> list[str]:
    """A row for every registered compressor, and for every width of MORE_BITS."""
    rows = []
    for name in compressor_names():
        bits = getattr(get_compressor(name), "bits", None)
        rows += [name] if bits is None else [f"{name}_{b}" for b in sorted({bits, *MORE_BITS.get(name, ())})]
    return rows


def compressor_of(row: str) -> tuple[str, Compressor]:
    """The compressor behind NAME, NAME_BITS or (share of kept elements) NAME_RATIO, and the full name of its row.

    Any of them may end in "_tensor": one scale and one selection for the whole tensor instead of one per block.

    Raises:
        ValueError: It is none of these.
    """
    if row.endswith(WHOLE):
        name, compressor = compressor_of(row.removesuffix(WHOLE))
        compressor.block_size = None
        return name + WHOLE, compressor
    if row in compressor_names():
        compressor = get_compressor(row)
        return (f"{row}_{compressor.bits}" if hasattr(compressor, "bits") else row), compressor
    name, _, number = row.rpartition("_")
    if name not in compressor_names():
        raise ValueError(f"{row!r} is unknown; known are {', '.join(default_rows())}; or NAME_RATIO: topk_0.001")
    default = get_compressor(name)
    kind: Any = type(default)
    for argument, number_type in (("bits", int), ("ratio", float)):
        if hasattr(default, argument):
            try:
                value = number_type(number)
            except ValueError:
                raise ValueError(f"{row!r}: {argument}={number!r} is not a number") from None
            return f"{name}_{value:g}", kind(**{argument: value})
    raise ValueError(f"{row!r}: the compressor {name!r} has neither bits nor a ratio to set")


def make_cases(compressors: Sequence[tuple[str, Compressor]], arena: Arena) -> list[Callable[[], Case]]:
    """The cases, each made when its turn comes: a residual weighs as much as the gradient."""

    def case(name: str, compressor: Compressor) -> Callable[[], Case]:
        return lambda: CodecCase(name, compressor, arena)

    def baseline(ratio: float) -> Callable[[], Case]:
        return lambda: TorchTopK(ratio, arena)

    ratios: dict[float, None] = dict.fromkeys(c.ratio for _, c in compressors if isinstance(c, LARGEST))
    return [case(*named) for named in compressors] + [baseline(ratio) for ratio in ratios]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ``args.compressors`` becomes a list of (row, compressor)."""
    parser = argparse.ArgumentParser(prog="kernels.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the gradient (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="its type (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of one encode or decode (default: 1)")
    parser.add_argument("--repeat", type=int, default=7, help="measured repetitions (default: %(default)s)")
    parser.add_argument(
        "--compressors", nargs="+", default=default_rows(), metavar="ROW", help=f"default: {' '.join(default_rows())}"
    )
    add_output_options(parser)
    args = parser.parse_args(argv)
    if args.device == "cuda" and args.threads != 1:
        parser.error(f"--threads {args.threads}: threads are the CPU's; leave the option out with --device cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch finds no CUDA device here; leave the option out to measure the CPU's kernels"
        )
    for option in ("numel", "threads", "repeat"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} must be 1 or more, got {getattr(args, option)}")
    try:
        args.compressors = [compressor_of(row) for row in dict.fromkeys(args.compressors)]
    except ValueError as error:
        parser.error(f"--compressors: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    torch.set_num_threads(args.threads)
    arena = Arena(args.numel, DTYPES[args.dtype], args.device, args.threads)
    cases = make_cases(args.compressors, arena)
    timings: list[Timing] = []
    with progress(len(cases)) as advance:
        for make in cases:
            timings += measure(case := make(), arena, args.repeat)
            advance(case.name)
    nbytes = args.numel * arena.dtype.itemsize
    columns = ["compressor", "operation", "least ms", "median ms", "ratio to add_", "median ratio", "GB/s"]
    if args.device == "cuda":
        columns.append("share of copy")
    table = make_table(_title(args, nbytes, timings), columns, "Ratio and GB/s (of gradient) from the least times.")
    for timing in timings:
        table.add_row(*_cells(timing, nbytes)[: len(columns)])
    raw = [
        {"compressor": t.case, "op": t.operation, "ms": t.ms, "add_ms": t.add_ms, "copy_ms": t.copy_ms} for t in timings
    ]
    publish(args, [_row(timing, args) for timing in timings], table, ["kernels", *argv], repetitions=raw)


def _title(args: argparse.Namespace, nbytes: int, timings: Sequence[Timing]) -> str:
    add = min(ms for timing in timings for ms in timing.add_ms)
    size = f"{args.numel:,} random {args.dtype} ({nbytes / 1e6:g} MB)"
    where = f"{args.threads} thread{'s' * (args.threads > 1)}" if args.device == "cpu" else torch.cuda.get_device_name()
    return f"{size}, {where}; residual.add_(gradient) takes {add:.3g} ms"


def _row(timing: Timing, args: argparse.Namespace) -> Row:
    row: Row = {
        "compressor": timing.case,
        "op": timing.operation,
        "numel": args.numel,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "ms": round(min(timing.ms), 4),
        "ratio_to_add": round(timing.ratio, 3),
    }
    return row if args.device == "cpu" else row | {"share_of_copy": round(timing.share_of_copy, 3)}


def _cells(timing: Timing, nbytes: int) -> list[str]:
    least, middle = min(timing.ms), median(timing.ms)
    ratios = (timing.ratio, middle / median(timing.add_ms), nbytes / least / 1e6, timing.share_of_copy)
    return [timing.case, timing.operation, *map(short, (least, middle, *ratios))]


if __name__ == "__main__":
    main()

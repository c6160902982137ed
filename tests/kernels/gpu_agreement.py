"""The Triton kernels against the torch functions: ``test_gpu.py`` runs this file in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_compress.compressors import (
    Cast,
    CenteredTopK,
    LinearDithering,
    NaturalDithering,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    Ternary,
    TopK,
)
from lightning_compress.exchange.backends import TritonBackend
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((1, 1), (63, 7), (30, 1), (40, 10), (36, 9), (26, 13))
"""Elements and row length of parameters; the last three are absent, non-finite, and of zeros."""
SILENT = 3
GAP = 3
"""Elements between parameters and bytes between codes that nothing may touch; no code is aligned."""

COMPRESSORS = [
    NoCompression(),
    *(Cast(dtype, block_size=37) for dtype in ("fp16", "bf16", "fp32", "fp8")),
    *(Quantize(bits, block_size=37) for bits in (2, 3, 4, 8)),
    Ternary(block_size=37),
    OneBit(block_size=37),
    LinearDithering(5, block_size=37),
    LinearDithering(7, "l2", block_size=37),
    NaturalDithering(3, block_size=37),
    NaturalDithering(8, "l2", block_size=37),
    RandomK(0.1, block_size=37),
    RandomK(0.3, block_size=37, unbiased=True),
    TopK(0.2, block_size=37),
    TopK(0.9, block_size=37, dtype="fp32"),
    TopK(0.01, block_size=37, dtype="fp16"),
    CenteredTopK(0.3, block_size=37),
    # one scale or one selection for a whole tensor
    Cast("fp8", block_size=None),
    Quantize(4, block_size=None),
    Ternary(block_size=None),
    OneBit(block_size=None),
    LinearDithering(5, "l2", block_size=None),
    NaturalDithering(4, block_size=None),
    CenteredTopK(0.06, block_size=None),
]
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)
CASES = [(compressor, torch.float32) for compressor in COMPRESSORS]
CASES += [(one, OTHER_DTYPES[number % 3]) for number, one in enumerate(COMPRESSORS[::2])]


def table_of(compressor, shapes):
    """Block table of parameters, length of the value buffer, bytes of the payload."""
    lines, source, payload = [], GAP, GAP
    for parameter, (numel, row) in enumerate(shapes):
        size = compressor.block_size or numel
        for start in range(0, numel, size):
            line, length = [0] * col.COLUMNS, min(size, numel - start)
            line[col.SOURCE] = line[col.STATE] = source + start
            line[col.LENGTH], line[col.PAYLOAD], line[col.PARAMETER] = length, payload, parameter
            line[col.START], line[col.ROW], line[col.KEY] = start, row, 0x9ABCDEF0 + parameter
            lines.append(line)
            payload += compressor.payload_nbytes(length, row) + GAP
        source += numel + GAP
    return torch.tensor(lines, device=DEVICE), source, payload


def numbers(numel, dtype, seed):
    """Of several magnitudes, some tied, some zero, and rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-2, 2, (numel,), generator=generator)
    values[::3] = values[::3].round()
    values[GAP + 1 + GAP + 7 : GAP + 1 + GAP + 28] = 0  # rows 1 to 3 of the second parameter
    return values.to(dtype)


def exchange(codec, values, nbytes, *, memory, scale, ranks=2):
    """One encoding and one decoding of ``ranks`` payloads: everything that was written."""
    real = torch.float64 if values.dtype == torch.float64 else torch.float32
    status = torch.full((len(SHAPES),), col.PRESENT, dtype=torch.uint8, device=DEVICE)
    status[SILENT] = col.ABSENT
    payload = torch.zeros(ranks * nbytes, dtype=torch.uint8, device=DEVICE)
    view = MemoryView.nothing(values)
    if memory:
        copies = 1 + (real == torch.float32)  # two under a loss scaler: read from the second, written to the first
        state = numbers(copies * len(values), real, 1).to(DEVICE) / 4
        state[-GAP - 26 :] = 0
        read = torch.full((len(SHAPES),), (copies - 1) * len(values), device=DEVICE)
        view = MemoryView(state, read, torch.zeros_like(read), compensate=True, update=True)
    for rank in range(ranks):
        said = status.clone()
        part = payload[rank * nbytes : (rank + 1) * nbytes]
        codec.encode(values / (rank + 1), view, part, said, weight=1 / 3, scale=scale, salt=0xFFFFFFF0 + rank)
    out = torch.full_like(values, 7)
    codec.decode(payload, out, said, stride=nbytes, ranks=ranks, weight=0.5, salt=0xFFFFFFF0)
    kept = torch.ones(len(view.state), dtype=torch.bool, device=DEVICE)
    if len(view.state) > len(values):  # what is written for the absent and the non-finite one is never made current
        kept[-GAP - 26 - len(values) - 2 * GAP - 40 - 36 : -GAP - 26 - len(values)] = False
    return payload, view.state[kept], said, out


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(5), b.nan_to_num(5))


@contextlib.contextmanager
def no_synchronisation():
    """On CUDA, whatever waits for the device is an error."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("compressor", "dtype"), CASES, ids=repr)
def test_agrees_with_the_reference(compressor, dtype):
    table, numel, nbytes = table_of(compressor, SHAPES)
    values = numbers(numel, dtype, 2)
    values[-GAP - 26 - GAP - 1] = torch.inf
    values[-GAP - 26 :] = 0
    values = values.to(DEVICE)
    found, expected = (BlockCodec(compressor, table, per_tensor=True, use_reference=path) for path in (False, True))
    assert isinstance(found.backend, TritonBackend)
    memory, on_device = dtype != torch.bfloat16, dtype == torch.float32
    how = {"memory": memory, "scale": torch.tensor(4.0, device=DEVICE) if on_device else 4.0}
    with no_synchronisation():
        results = exchange(found, values, nbytes, **how)
    both = zip(exchange(expected, values, nbytes, **how), results, strict=True)
    for what, (a, b) in zip(("payload", "state", "status", "out"), both, strict=True):
        assert same(a, b), f"{what} differs in {(a != b).nonzero().flatten().tolist()}"
    assert results[2].tolist() == [1, 1, 1, col.ABSENT, col.NONFINITE, 1]
    noise = torch.randint(0, 256, (2 * nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    a, b = torch.full((2, numel), 7, dtype=dtype, device=DEVICE)
    for codec, out in ((expected, a), (found, b)):
        codec.decode(noise.to(DEVICE), out, results[2], stride=nbytes, ranks=2, weight=0.5, salt=1)
    assert same(a, b), f"random bytes differ in {(a != b).nonzero().flatten().tolist()}"


@pytest.mark.parametrize(
    "compressor", [TopK(0.01), CenteredTopK(0.06, block_size=4096), OneBit(block_size=4096), Ternary(4096)], ids=repr
)
def test_the_longest_blocks(compressor):
    table = torch.zeros(1, col.COLUMNS, dtype=torch.int64, device=DEVICE)
    table[0, col.LENGTH], table[0, col.ROW] = 4096, 64
    values = torch.randn(4096, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    status = torch.ones(1, dtype=torch.uint8, device=DEVICE)
    found = []
    for path in (False, True):
        codec = BlockCodec(compressor, table, use_reference=path)
        payload = torch.zeros(compressor.payload_nbytes(4096, 64), dtype=torch.uint8, device=DEVICE)
        codec.encode(values, MemoryView.nothing(values), payload, status)
        out = torch.zeros_like(values)
        codec.decode(payload, out, status)
        found.append((payload, out))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_longer_blocks_go_to_another_backend():
    table = torch.zeros(1, col.COLUMNS, dtype=torch.int64, device=DEVICE)
    table[0, col.LENGTH] = table[0, col.ROW] = 4097
    assert not isinstance(BlockCodec(Quantize(4, block_size=None), table).backend, TritonBackend)

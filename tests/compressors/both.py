"""Runs a compressor's torch functions and its CPU kernels on the same blocks, and compares them bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from lightning_compress.compressors import Blocks
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView

KINDS = ("normal", "tied", "few", "zero", "tiny", "wide")
PATHS = (True, False)
"""Values of ``use_reference``."""


class Coded(NamedTuple):
    payload: torch.Tensor
    residual: torch.Tensor
    decoded: torch.Tensor


@st.composite
def tensors(draw, longest=5000):
    """A flat gradient, float32 or float64.

    Ordinary, of few different magnitudes, mostly or wholly zero, subnormal, or of every order of magnitude (in float64
    beyond those that float32 has).
    """
    numel, kind = draw(st.integers(1, longest)), draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    g = torch.randn(numel, dtype=dtype, generator=generator)
    if kind == "tied":
        g = g.round()
    elif kind == "few":
        g *= torch.rand(numel, generator=generator) < 0.02
    elif kind == "zero":
        g.zero_()
    elif kind == "tiny":
        g *= 1e-39
    elif kind == "wide":
        g *= 10.0 ** (
            (torch.rand(numel, dtype=dtype, generator=generator) - 0.5) * (70 if dtype == torch.float32 else 500)
        )
    return g


def table_of(compressor, numel):
    """Block table of one parameter of ``numel`` elements, and the bytes of its payload."""
    size, rows, at = compressor.block_size or numel, [], 0
    for start in range(0, numel, size):
        row = [0] * col.COLUMNS
        row[col.SOURCE] = row[col.STATE] = row[col.START] = start
        row[col.LENGTH], row[col.ROW], row[col.KEY], row[col.PAYLOAD] = min(size, numel - start), numel, 1234567, at
        at += compressor.payload_nbytes(row[col.LENGTH], numel)
        rows.append(row)
    return torch.tensor(rows), at


def code(compressor, g, *, use_reference=False, salt=0):
    """One exchange of the flat tensor ``g`` under error feedback that starts from nothing."""
    table, nbytes = table_of(compressor, len(g))
    codec = BlockCodec(compressor, table, per_tensor=True, use_reference=use_reference)
    payload, status = torch.zeros(nbytes, dtype=torch.uint8), torch.tensor([col.PRESENT], dtype=torch.uint8)
    residual, decoded, offset = torch.zeros_like(g), torch.zeros_like(g), torch.zeros(1, dtype=torch.int64)
    codec.encode(g, MemoryView(residual, offset, offset, True, True), payload, status, salt=salt)
    codec.decode(payload, decoded, status, salt=salt)
    return Coded(payload, residual, decoded)


def decode(compressor, payload, numel, *, use_reference=False, ranks=1):
    table, nbytes = table_of(compressor, numel)
    out, status = torch.zeros(numel), torch.tensor([col.PRESENT], dtype=torch.uint8)
    codec = BlockCodec(compressor, table, per_tensor=True, use_reference=use_reference)
    codec.decode(payload, out, status, stride=nbytes, ranks=ranks)
    return out


def assert_kernels_agree(compressor, g, salt=0):
    """Payload, residual and values are the same; so is what random bytes of two ranks decode to."""
    expected, found = (code(compressor, g, use_reference=path, salt=salt) for path in PATHS)
    for what, a, b in zip(Coded._fields, expected, found, strict=True):
        assert torch.equal(a, b), f"{what} of {compressor!r}"
    noise = torch.randint(0, 256, (2 * len(found.payload),), dtype=torch.uint8)
    a, b = (decode(compressor, noise, len(g), use_reference=path, ranks=2) for path in PATHS)
    assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), f"random bytes of {compressor!r}"


def assert_unbiased(compressor, x, draws=20000):
    """The mean over ``draws`` independent draws is ``x`` [n] within 5 standard errors, element by element."""
    blocks = Blocks(len(x), len(x), torch.zeros(draws, dtype=torch.int64), torch.arange(draws), salt=99)
    decoded = compressor.decode(compressor.encode(x.expand(draws, -1), blocks), blocks).double()
    error = (decoded.mean(0) - x).abs()
    allowed = 5 * decoded.std(0) / draws**0.5 + 2e-7 * x.abs().max()
    assert (error <= allowed).all(), f"{compressor!r}: mean error {error.max()}"

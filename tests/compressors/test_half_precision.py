"""Half-precision buckets: read and written by the kernels as they are, to the bit what a float32 copy would give."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.compressors import NoCompression, Quantize
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView
from tests.compressors.coding import block_table

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch):
    """A pass over the bucket before or after the kernel would need one of these."""

    def refuse(self, *_):
        raise AssertionError("the bucket is converted outside the kernel")

    monkeypatch.setattr(torch.Tensor, "float", refuse)


def codec_of(numel):
    table, nbytes = block_table(NoCompression(), numel, numel, 100)
    return BlockCodec(NoCompression(), table), nbytes


def encoded(values):
    """What a rank sends without compression, as float32."""
    codec, nbytes = codec_of(len(values))
    payload, status = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    codec.encode(values, MemoryView.nothing(values), payload, status)
    return payload[1:].clone().view(torch.float32), status


def decoded(numbers, dtype, status=col.PRESENT):
    """What float32 numbers become in a bucket of sevens."""
    codec, nbytes = codec_of(len(numbers))
    payload, out = torch.zeros(nbytes, dtype=torch.uint8), torch.full((len(numbers),), 7, dtype=dtype)
    payload[1:] = numbers.view(torch.uint8)
    codec.decode(payload, out, torch.tensor([status], dtype=torch.uint8))
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_read(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = every[torch.isfinite(every)]
    found, _ = encoded(every)
    assert torch.equal(found.view(torch.int32), every.to(torch.float32).view(torch.int32))  # to the sign of zero
    for special in (torch.inf, torch.nan):
        assert encoded(torch.tensor([1, special], dtype=dtype))[1].tolist() == [col.NONFINITE]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_rounding_is_to_nearest_even_and_ends_in_inf(dtype):
    every = torch.arange(0, 2**15, dtype=torch.int16).view(dtype).to(torch.float32)
    finite = every[torch.isfinite(every)]
    limit = torch.tensor([torch.finfo(dtype).max, 65519.99, 65520.0, 65536.0, 1e6, 3.4e38, torch.inf])
    middles = torch.cat([finite, finite[:-1] / 2 + finite[1:] / 2, limit])
    close = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(torch.inf))])
    numbers = torch.cat([close, -close])
    expected, found = numbers.to(dtype), decoded(numbers, dtype)
    assert torch.equal(found, expected)
    strange = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert decoded(strange, dtype).isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parameters_that_take_no_part_or_overflowed(dtype):
    ones = torch.ones(150)
    assert (decoded(ones, dtype, col.ABSENT) == 7).all()
    assert decoded(ones, dtype, col.NONFINITE).isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block_size", [100, None])
def test_error_feedback_is_that_of_a_float32_copy(dtype, block_size):
    compressor = Quantize(4, block_size)
    table, nbytes = block_table(compressor, 250, 10, block_size or 250)
    codec, zero = BlockCodec(compressor, table, per_tensor=True), torch.zeros(1, dtype=torch.int64)
    gradient = torch.randn(250, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for values in (gradient, gradient.to(torch.float32)):
        state = torch.linspace(-0.1, 0.1, 250)
        payload, status = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
        out = torch.zeros_like(values)
        codec.encode(values, MemoryView(state, zero, zero, True, True), payload, status, weight=1 / 3, scale=4.0)
        codec.decode(payload, out, status, weight=0.3)
        results.append((payload, state, out.to(dtype)))
    for mine, copy in zip(*results, strict=True):
        assert torch.equal(mine, copy)
    assert results[0][1].dtype == torch.float32

"""What holds for any length, row, type and width: packing, kernels against the torch functions, conservation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_compress.compressors.base import Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.onebit import OneBit
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.ternary import Ternary
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col
from lightning_compress.kernels.cpu import bits as cpu_bits
from lightning_compress.kernels.reference import bits
from tests.compressors.coding import block_table, code_parameter

# compiling a kernel, or loading it, makes the first example slow
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

compressors = st.one_of(
    st.builds(Quantize, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 7, 64, 256, None])),
    st.builds(Ternary, st.sampled_from([1, 4, 64, 256, None])),
    st.builds(OneBit, st.sampled_from([1, 7, 64, 256, None])),
    st.builds(Cast, st.sampled_from(["fp16", "bf16", "fp32", "fp8"]), st.sampled_from([1, 7, 64, 256, None])),
)
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**31)


def draw_values(numel: int, dtype: torch.dtype, seed: int, row: int) -> torch.Tensor:
    """Normal numbers of mixed magnitudes, some of them zero, some rows all zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    values[torch.rand(numel, generator=generator) < 0.1] = 0
    silent = torch.rand(-(-numel // row), generator=generator) < 0.3
    values[silent.repeat_interleave(row)[:numel]] = 0
    return values.to(dtype)


@quick
@given(st.integers(1, 300), st.integers(1, 32), seeds)
def test_packing_is_undone_at_every_width(count, width, seed):
    codes = torch.randint(0, 2**width, (3, count), generator=torch.Generator().manual_seed(seed))
    packed = bits.pack(codes, width)
    assert packed.shape == (3, bits.packed_nbytes(count, width))
    assert torch.equal(bits.unpack(packed, count, width), codes)
    # lowest bits first: the row is one long number
    number = sum(code << (width * i) for i, code in enumerate(codes[0].tolist()))
    assert packed[0].numpy().tobytes() == number.to_bytes(packed.shape[1], "little")


@quick
@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 9), seeds)
def test_compiled_packing_is_the_reference_at_any_offset(count, width, offset, seed):
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, count).astype(np.uint8)  # bits above the width do not count
    codes = raw & (2**width - 1)
    expected = bits.pack(torch.from_numpy(codes.astype(np.int64)).unsqueeze(0), width)[0].numpy()
    payload = np.zeros(offset + len(expected) + 9, np.uint8)
    word = np.zeros(count // 8 + 1, np.uint64)
    scratch = cpu_bits.Codes(word.view(np.uint8), word)
    scratch.byte[:count] = raw
    cpu_bits.pack_block(scratch, count, width, payload, offset)
    np.testing.assert_array_equal(payload[offset : offset + len(expected)], expected)
    assert not payload[:offset].any()
    assert not payload[offset + len(expected) :].any()

    noise = random.integers(0, 256, len(payload)).astype(np.uint8)
    noise[offset : offset + len(expected)] = expected
    cpu_bits.unpack_block(noise, offset, count, width, scratch)
    np.testing.assert_array_equal(scratch.byte[:count], codes)


@quick
@given(
    compressors,
    st.integers(1, 40),
    st.integers(1, 40),
    dtypes,
    seeds,
    st.sampled_from([1.0, 1 / 3]),
    st.sampled_from([1.0, 4.0]),
)
def test_kernels_are_the_reference(compressor, rows, row, dtype, seed, weight, scale):
    gradient = draw_values(rows * row, dtype, seed, row)
    state = draw_values(rows * row, dtype, seed + 1, row) / 8
    expected = code_parameter(compressor, gradient, state, row, True, weight, scale)
    found = code_parameter(compressor, gradient, state, row, False, weight, scale)
    for what, a, b in zip(("payload", "state", "decoded"), expected, found, strict=True):
        assert torch.equal(a, b), f"{what} differs in {(a != b).nonzero().flatten().tolist()}"


@quick
@given(compressors, st.integers(1, 40), st.integers(1, 40), dtypes, seeds)
def test_kernels_read_any_bytes_as_the_reference_does(compressor, rows, row, dtype, seed):
    table, nbytes = block_table(compressor, rows * row, row, compressor.block_size or rows * row)
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    status = torch.tensor([col.PRESENT], dtype=torch.uint8)
    found = torch.zeros(2, rows * row, dtype=dtype)
    for reference in (True, False):
        BlockCodec(compressor, table, use_reference=reference).decode(payload, found[int(reference)], status)
    assert torch.equal(found[0].isnan(), found[1].isnan())
    assert torch.equal(found[0].nan_to_num(7.0), found[1].nan_to_num(7.0))


@quick
@given(compressors, st.integers(1, 20), st.integers(1, 20), seeds, st.booleans())
def test_what_is_sent_and_what_is_remembered_is_what_was_given(compressor, rows, row, seed, reference):
    numel = rows * row
    given_, sent, magnitude, state = torch.zeros(4, numel, dtype=torch.float64)
    for step in range(8):
        gradient = draw_values(numel, torch.float64, seed + step, row)
        _, state, out = code_parameter(compressor, gradient, state, row, reference)
        given_, sent, magnitude = given_ + gradient, sent + out, magnitude + gradient.abs()
    assert ((sent + state - given_).abs() <= 1e-9 * magnitude.sum()).all()


@quick
@given(
    st.one_of(st.builds(Quantize, st.sampled_from([2, 3, 4, 8])), st.builds(Ternary), st.builds(OneBit)),
    st.integers(1, 200),
    seeds,
)
def test_contraction(compressor: Compressor, numel, seed):
    p = draw_values(numel, torch.float64, seed, numel)
    _, left, _ = code_parameter(compressor, p, torch.zeros_like(p), numel, False)
    delta = compressor.contraction(numel)
    assert delta is not None
    assert left.square().sum() <= (1 - delta + 1e-6) * p.square().sum()


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 6, 1023, 1024, 1025])
def test_trits_fill_a_byte_with_five(numel):
    assert Ternary().payload_nbytes(numel) == 4 + (numel + 4) // 5

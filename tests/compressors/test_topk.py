"""TopK: the largest magnitudes, exactly, and nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.compressors import TopK
from lightning_compress.kernels.reference.bits import pack, unpack
from lightning_compress.kernels.reference.selection import sample_stride
from tests.compressors.both import PATHS, assert_kernels_agree, code, decode, tensors

RATIOS = st.sampled_from([0.001, 0.01, 0.06, 0.2, 0.7, 1.0])
FORMATS = st.sampled_from(["bf16", "fp16", "fp32"])


@given(tensors(), RATIOS, st.sampled_from([1, 64, 1000, 4096, None]), FORMATS)
@settings(deadline=None, max_examples=100)
def test_kernels_are_the_reference(g, ratio, block_size, dtype):
    assert_kernels_agree(TopK(ratio, block_size, dtype), g)


@given(tensors(), RATIOS, st.sampled_from(PATHS))
@settings(deadline=None, max_examples=60)
def test_what_is_sent_are_the_largest_magnitudes(g, ratio, use_reference):
    g = g.float().nan_to_num()  # no subnormal is lost in float32
    k = max(1, int(ratio * len(g) + 0.5))
    sent = code(TopK(ratio, 65536, "fp32"), g, use_reference=use_reference).decoded
    expected = g.abs().topk(k).values
    assert torch.equal(sent.abs().topk(k).values, expected)
    assert torch.equal(sent[sent != 0], g[sent != 0])
    # of equal magnitudes at the threshold the first ones
    level = (g.abs() == expected[-1]) & (g != 0)
    taken = sent[level] != 0
    assert not (taken[1:] & ~taken[:-1]).any()


@pytest.mark.parametrize("use_reference", PATHS)
@pytest.mark.parametrize("shape", ["normal", "one large", "sample too high", "sample of zeros", "equal"])
def test_a_sampled_threshold_takes_the_largest_and_never_more_than_k(use_reference, shape):
    k, ratio = 500, 0.01
    g = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).exp()
    sampled = torch.arange(50_000) % sample_stride(50_000, ratio) == 0
    assert 1000 < sampled.sum() < 10_000
    if shape == "one large":
        g[77] = 1e9
    elif shape == "sample too high":
        g[sampled.nonzero()[:40]] = 1e6
    elif shape == "sample of zeros":
        g[sampled] = 0.0
    elif shape == "equal":
        g[:] = 1.0
    sent = code(TopK(ratio, None, "fp32"), g, use_reference=use_reference).decoded
    count = int(sent.count_nonzero())
    assert count <= k
    assert count >= 0.8 * k or shape == "sample too high"
    assert torch.equal(sent[sent != 0], g[sent != 0])
    assert sent[sent != 0].min() >= g[sent == 0].max()
    if shape == "sample too high":
        assert 0 < count < k  # an exact selection would send k


@pytest.mark.parametrize("use_reference", PATHS)
def test_truncation_is_by_magnitude_not_by_index(use_reference):
    g = torch.linspace(1, 2, 4096)
    sent = code(TopK(0.01, 4096, "fp32"), g, use_reference=use_reference).decoded
    assert sent.nonzero().flatten().tolist() == list(range(4096 - 41, 4096))
    ones = code(TopK(0.01, 4096, "fp32"), torch.ones(4096), use_reference=use_reference).decoded
    assert ones.nonzero().flatten().tolist() == list(range(41))


@pytest.mark.parametrize("use_reference", PATHS)
def test_slots_that_are_not_needed_hold_nothing(use_reference):
    g = torch.zeros(1000)
    g[[0, 700]] = torch.tensor([3.0, -4.0])
    coded = code(TopK(0.01, 1000), g, use_reference=use_reference)
    assert torch.equal(coded.decoded, g)
    assert unpack(coded.payload[:13].unsqueeze(0), 10, 10).tolist() == [[0, 700, *[0] * 8]]
    assert coded.payload[13:].clone().view(torch.bfloat16).tolist() == [3, -4, *[0] * 8]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_rounding_error_of_a_value_stays_in_the_residual(dtype, scale):
    g = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale  # 1e6: beyond fp16
    coded = code(TopK(0.1, 1000, dtype), g)
    assert torch.equal(coded.decoded.double() + coded.residual.double(), g.double())
    assert coded.residual[coded.decoded != 0].any() == (dtype != "fp32")


def test_bf16_is_the_default_since_it_keeps_tiny_gradients():
    g = torch.full((8,), 1e-9)
    assert code(TopK(1.0), g).decoded.allclose(g, rtol=2**-8)
    assert not code(TopK(1.0, dtype="fp16"), g).decoded.any()


@given(tensors(2000), RATIOS, st.sampled_from(["bf16", "fp32"]))
@settings(deadline=None, max_examples=60)
def test_contraction(g, ratio, dtype):
    g = g.float().nan_to_num().clamp(-1e15, 1e15)
    if g.abs().max() < 1e-15:
        return  # values below the formats' normal numbers
    compressor = TopK(ratio, None, dtype)
    left, whole = (x.double().square().sum() for x in (code(compressor, g).residual, g))
    assert left <= (1 - compressor.contraction(len(g)) + 1e-12) * whole


@pytest.mark.parametrize("use_reference", PATHS)
def test_a_whole_tensor_needs_wider_indices(use_reference):
    compressor, g = TopK(3e-5, None, "fp32"), torch.zeros(100_000)
    g[65535:65537], g[99_999] = 1.0, -2.0
    coded = code(compressor, g, use_reference=use_reference)
    assert len(coded.payload) == 7 + 3 * 4  # three indices of 17 bits
    assert torch.equal(coded.decoded, g)
    assert compressor.payload_nbytes(65536) == 2 * (2 + 4)
    assert TopK(0.01).payload_nbytes(4096) == 62 + 41 * 2  # 41 indices of 12 bits


@pytest.mark.parametrize("use_reference", PATHS)
def test_indices_count_only_if_they_ascend_inside_the_block(use_reference):
    index = pack(torch.tensor([[3, 3, 2, 9, 120, 50]]), 7)[0]
    value = torch.arange(1.0, 7.0)
    payload = torch.cat([index, value.view(torch.uint8)])
    out = decode(TopK(0.06, 100, "fp32"), payload, 100, use_reference=use_reference)
    assert {i: out[i].item() for i in out.nonzero().flatten().tolist()} == {3: 1.0, 9: 4.0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.01}, "ratio"),
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": True}, "ratio"),
        ({"ratio": "1%"}, "ratio"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 65537}, "block_size"),
        ({"dtype": "fp8"}, "dtype"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        TopK(**arguments)

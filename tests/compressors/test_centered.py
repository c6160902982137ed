"""CenteredTopK: signs at twice the threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.compressors import CenteredTopK
from tests.compressors.both import PATHS, assert_kernels_agree, code, decode, tensors

RATIOS = st.sampled_from([0.001, 0.03, 0.06, 0.3, 1.0])


@given(tensors(), RATIOS, st.sampled_from([1, 3, 64, 256, 1000, None]))
@settings(deadline=None, max_examples=100)
def test_kernels_are_the_reference(g, ratio, block_size):
    assert_kernels_agree(CenteredTopK(ratio, block_size), g)


@pytest.mark.parametrize("use_reference", PATHS)
def test_signs_at_twice_the_kth_magnitude(use_reference):
    g = torch.randn(256, generator=torch.Generator().manual_seed(0))
    largest = g.abs().topk(15)
    amplitude = 2 * largest.values[-1]
    coded = code(CenteredTopK(), g, use_reference=use_reference)
    assert coded.decoded.nonzero().flatten().tolist() == largest.indices.sort().values.tolist()
    sent = coded.decoded[largest.indices]
    assert torch.equal(sent.sign(), g[largest.indices].sign())
    assert sent.abs().unique().numel() == 1
    assert amplitude * (1 - 2**-7) < sent[0].abs() <= amplitude  # bf16, cut
    assert torch.equal(coded.residual, g - coded.decoded)
    assert len(coded.payload) == 19


@pytest.mark.parametrize(
    ("numel", "ratio", "nbytes"),
    [(256, 0.06, 2 + 15 + 2), (1024, 0.03, 2 + 39 + 4), (1, 1.0, 2 + 1 + 1), (257, 1 / 257, 2 + 2 + 1)],
)
def test_indices_take_as_many_bits_as_the_block_needs(numel, ratio, nbytes):
    assert CenteredTopK(ratio).payload_nbytes(numel) == nbytes


@pytest.mark.parametrize("use_reference", PATHS)
def test_zeros_are_never_sent(use_reference):
    g = torch.zeros(256)
    g[[10, 200, 255]] = torch.tensor([1.0, -1.0, 2.0])
    coded = code(CenteredTopK(), g, use_reference=use_reference)
    assert coded.decoded.nonzero().flatten().tolist() == [10, 200, 255]
    assert coded.decoded[[10, 200, 255]].tolist() == [1.0, -1.0, 1.0]  # the threshold is a quarter of the peak
    assert coded.payload[2:17].tolist() == [10, 200, 255, *[0] * 12]
    assert not code(CenteredTopK(), torch.zeros(256), use_reference=use_reference).payload.any()


def owed(compressor, alive, numel, steps=400):
    """Largest residual of a block in which ``alive`` elements carry a noisy gradient and the rest next to none."""
    generator, residual, worst = torch.Generator().manual_seed(0), torch.zeros(numel), 0.0
    for _ in range(steps):
        g = (torch.arange(numel) < alive) * (0.3 + torch.randn(numel, generator=generator))
        g += 1e-4 * torch.randn(numel, generator=generator)
        residual = code(compressor, g + residual, use_reference=True).residual
        worst = max(worst, residual.abs().max().item())
    return worst


@pytest.mark.parametrize(
    ("ratio", "numel", "alive", "bound"),
    [
        (0.06, 256, 1, 10),  # without the floor 140: the amplitude follows the noise
        (0.06, 256, 8, 10),  # without the floor 140
        (0.06, 256, 256, 15),
        (1.0, 1, 1, 6),  # without the cap 9, and more with every step: the sign flips for ever
        (0.06, 16, 16, 15),  # without the cap 46
    ],
)
def test_no_residual_grows_without_bound(ratio, numel, alive, bound):
    assert owed(CenteredTopK(ratio, numel), alive, numel) < bound


@given(tensors(2000), RATIOS)
@settings(deadline=None, max_examples=100)
def test_contraction(g, ratio):
    g = g.float().nan_to_num().clamp(-1e15, 1e15)
    if g.abs().max() < 1e-15:
        return  # sent as zeros
    compressor = CenteredTopK(ratio, None)
    left, whole = (x.double().square().sum() for x in (code(compressor, g).residual, g))
    assert left <= (1 - compressor.contraction(len(g)) + 1e-9) * whole


@pytest.mark.parametrize("use_reference", PATHS)
def test_indices_count_only_if_they_ascend_inside_the_block(use_reference):
    one = torch.tensor([1.0], dtype=torch.bfloat16).view(torch.uint8)
    index = torch.tensor([3, 3, 2, 9, 200, 50], dtype=torch.uint8)  # 8 bits: 130 elements
    payload = torch.cat([one, index, torch.tensor([0b001001], dtype=torch.uint8)])
    out = decode(CenteredTopK(6 / 130, 130), payload, 130, use_reference=use_reference)
    assert {i: out[i].item() for i in out.nonzero().flatten().tolist()} == {3: -1.0, 9: -1.0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 6}, "ratio"),
        ({"block_size": -1}, "block_size"),
        ({"block_size": 1.5}, "block_size"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        CenteredTopK(**arguments)

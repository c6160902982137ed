"""NaturalDithering: right on average, in powers of two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.compressors import NaturalDithering
from lightning_compress.kernels.reference.hashing import salt
from tests.compressors.both import PATHS, assert_kernels_agree, assert_unbiased, code, tensors


@given(
    tensors(),
    st.integers(2, 8),
    st.sampled_from(["max", "l2"]),
    st.sampled_from([1, 64, 1000, None]),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=100)
def test_kernels_are_the_reference(g, bits, norm, block_size, salt):
    assert_kernels_agree(NaturalDithering(bits, norm, block_size), g, salt)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_unbiased(bits, norm):
    x = torch.randn(48, generator=torch.Generator().manual_seed(bits))
    x[::5] *= 0.05
    assert_unbiased(NaturalDithering(bits, norm), x)


@pytest.mark.parametrize("use_reference", PATHS)
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_levels_are_exact(bits, use_reference):
    top = 2 ** (bits - 1) - 1
    levels = 3.0 * 2.0 ** -torch.arange(top).float()
    g = torch.cat([levels, torch.zeros(1), -levels])  # numbers on a level are no matter of chance
    for step in range(10):
        coded = code(NaturalDithering(bits), g, use_reference=use_reference, salt=salt(0, step))
        # 3 * 2**-126 is the last level of 8 bits; 3 has no exact reciprocal, so one in 2**22 draws may err
        assert torch.equal(coded.decoded, g)


@given(tensors(), st.integers(2, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_an_element_goes_to_one_of_its_two_neighbours(g, bits, salt):
    g = g.float().nan_to_num().clamp(-1e30, 1e30)
    g[0] = 2.0**100  # a power of two: shares are exact
    decoded = code(NaturalDithering(bits, block_size=None), g, salt=salt).decoded.double() * 2.0**-100
    share = g.double().abs() * 2.0**-100
    lowest = 2.0 ** (2 - 2 ** (bits - 1))
    below = torch.where(share < lowest, 0.0, 2.0 ** torch.log2(share.clamp_min(lowest)).floor())
    above = torch.where(share < lowest, lowest, 2 * below).clamp_max(1.0)
    assert ((decoded.abs() == below) | (decoded.abs() == above)).all()
    assert not decoded[g == 0].any()
    assert (decoded * g.sign() >= 0).all()


@pytest.mark.parametrize("use_reference", PATHS)
def test_below_the_last_level_of_8_bits_shares_are_subnormal(use_reference):
    g = torch.full((4000,), 2.0**-128)  # a quarter of the last level
    g[0] = 1.0
    decoded = code(NaturalDithering(8, block_size=None), g, use_reference=use_reference).decoded[1:]
    assert decoded.unique().tolist() == [0.0, 2.0**-126]
    assert 0.2 < (decoded > 0).float().mean() < 0.3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"norm": 2}, "norm"),
        ({"seed": 0.0}, "seed"),
        ({"block_size": 65537}, "block_size"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        NaturalDithering(**arguments)

"""LinearDithering: right on average, in equal steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.compressors import LinearDithering
from lightning_compress.kernels.reference.bits import TINY
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
    assert_kernels_agree(LinearDithering(bits, norm, block_size), g, salt)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_unbiased(bits, norm):
    x = torch.randn(48, generator=torch.Generator().manual_seed(bits))
    x[::5] *= 0.05
    assert_unbiased(LinearDithering(bits, norm), x)


@pytest.mark.parametrize("use_reference", PATHS)
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_levels_are_exact_and_the_peak_is_the_last_one(bits, use_reference):
    s = 2 ** (bits - 1) - 1
    g = torch.arange(-s, s + 1.0)  # numbers on a level are no matter of chance
    for step in range(20):
        coded = code(LinearDithering(bits), g, use_reference=use_reference, salt=salt(0, step))
        assert torch.equal(coded.decoded, g)
    assert len(coded.payload) == 4 + -(-(2 * s + 1) * bits // 8)


@given(tensors(), st.integers(2, 8), st.sampled_from(["max", "l2"]))
@settings(deadline=None, max_examples=60)
def test_an_element_moves_by_less_than_a_step_and_zeros_not_at_all(g, bits, norm):
    g = g.float().nan_to_num().clamp(-1e30, 1e30)
    decoded = code(LinearDithering(bits, norm, None), g).decoded.double()
    size = g.abs().max().double() if norm == "max" else g.double().norm()
    step = (size if size >= TINY else 1.0) / (2 ** (bits - 1) - 1)  # below TINY nothing is sent
    assert ((decoded - g).abs() <= step * (1 + 1e-5)).all()
    assert not decoded[g == 0].any()
    assert (decoded * g.sign() >= 0).all()


def test_ranks_and_steps_draw_different_numbers():
    g = torch.full((1000,), 0.5).index_fill(0, torch.tensor(0), 15.0)
    draws = [
        code(LinearDithering(5), g, salt=word).decoded
        for word in (salt(0, 0, 0), salt(0, 0, 1), salt(0, 1, 0), salt(1, 0, 0))
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"bits": True}, "bits"),
        ({"norm": "l1"}, "norm"),
        ({"seed": "0"}, "seed"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        LinearDithering(**arguments)

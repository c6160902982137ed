"""RandomK: the same elements on all ranks, none twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.compressors import Blocks, RandomK
from lightning_compress.kernels.reference.hashing import salt
from tests.compressors.both import PATHS, assert_kernels_agree, assert_unbiased, code, tensors

RATIOS = st.sampled_from([0.001, 1 / 32, 0.3, 0.7, 1.0])


@given(tensors(), RATIOS, st.sampled_from([1, 64, 1000, None]), st.booleans(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_kernels_are_the_reference(g, ratio, block_size, unbiased, salt):
    assert_kernels_agree(RandomK(ratio, 0, block_size, unbiased), g, salt)


@pytest.mark.parametrize("use_reference", PATHS)
@pytest.mark.parametrize(("numel", "ratio"), [(1024, 1 / 32), (1000, 0.3), (7, 1.0), (5, 0.01)])
def test_one_element_of_each_stratum(numel, ratio, use_reference):
    compressor, k = RandomK(ratio, block_size=1024), max(1, round(ratio * numel))
    for step in range(5):
        sent = code(compressor, torch.ones(numel), use_reference=use_reference, salt=salt(0, step)).decoded
        chosen = sent.nonzero().flatten()
        strata = [sum(j * numel // k <= i < (j + 1) * numel // k for i in chosen.tolist()) for j in range(k)]
        assert strata == [1] * k
        assert (sent[chosen] == 1).all()


def test_every_element_has_its_turn_and_steps_and_blocks_differ():
    compressor = RandomK(1 / 32, block_size=256)
    sent = torch.stack([code(compressor, torch.ones(1024), salt=salt(0, step)).decoded for step in range(640)])
    counts = sent.sum(0)  # binomial: mean 20, deviation 4.4
    assert counts.min() > 0
    assert counts.max() < 45
    assert (sent[0] != sent[1]).any()
    assert (sent[0, :256] != sent[0, 256:512]).any()


def test_payloads_may_be_added_up():
    compressor = RandomK(0.1)
    g = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)).mul(8).round()  # sums are exact
    payloads = torch.stack([code(compressor, x, salt=5).payload for x in g])
    assert payloads.shape[1] % 4 == 0
    total = payloads.view(torch.float32).sum(0).view(torch.uint8)
    assert torch.equal(total, code(compressor, g.sum(0), salt=5).payload)
    assert compressor.linear
    assert compressor.value_dtype is torch.float32
    assert not compressor.per_rank


@pytest.mark.parametrize(("numel", "ratio"), [(64, 1 / 32), (50, 0.3)])
def test_unbiased(numel, ratio):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    assert_unbiased(RandomK(ratio, unbiased=True), x)


@pytest.mark.parametrize(("numel", "ratio"), [(64, 1 / 32), (50, 0.3), (8, 1.0)])
def test_contraction_in_expectation(numel, ratio):
    compressor, draws = RandomK(ratio), 5000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    blocks = Blocks(numel, numel, torch.zeros(draws, dtype=torch.int64), torch.arange(draws))
    left = (x - compressor.decode(compressor.encode(x.expand(draws, -1), blocks), blocks)).square().sum(1)
    assert left.mean() <= (1 - compressor.contraction(numel)) * x.square().sum() + 5 * left.std() / draws**0.5
    assert RandomK(ratio, unbiased=True).contraction(numel) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ratio": 32}, "ratio"),
        ({"seed": 1.5}, "seed"),
        ({"seed": None}, "seed"),
        ({"seed": True}, "seed"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        RandomK(**arguments)

"""Many buckets at once: they finish, in order, with the right numbers, and leave no threads behind."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress.compressors import compressor_names
from lightning_compress.exchange import topology
from lightning_compress.exchange.codec import BlockCodec
from tests.exchange.training import content, residuals, wrap
from tests.ranks import run_ranks


class Random(nn.Module):
    """Parameters of random shapes whose gradients are random numbers of very different sizes."""

    def __init__(self, count, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(0, 90, (count, 2), generator=generator).tolist()
        flat = torch.randint(0, 4, (count,), generator=generator).tolist()
        shapes = [(m,) if one == 0 else (m, n) for (m, n), one in zip(sizes, flat, strict=False)]
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for p in self.parts:
            size = 10.0 ** float(torch.randint(-6, 3, (), generator=generator))
            total = total + (p * torch.randn(p.shape, generator=generator) * size).sum()
        return total


def run_random(count, seed, steps, **settings):
    """Every bucket holds one or two parameters; returns a digest of all gradients and memories, and the number of exchanges."""
    ddp, exchange = wrap(Random(count, seed), {"bucket_cap_mb": 1e-6}, **settings)
    digests = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(1000 * step + dist.get_rank()).backward()
        digests.append(content(p.grad for p in ddp.parameters()))
    digests.append(content(residuals(exchange).values()))
    exchange.close()
    return digests, 1 + (steps - 1) * (len(exchange.layouts) - 1)


def many_buckets(counts):
    found = {}
    for count in counts:
        for way in ("two_way", "all_gather"):
            digests, exchanges = run_random(count, count, 3, compressor="quantize", exchange=way)
            found[count, way] = digests[:-1], exchanges
        found[count, "all_reduce"] = run_random(count, count, 3, compressor="bf16")[0][:-1], exchanges
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_to_fifty_buckets_finish(ranks):
    first, *others = run_ranks(many_buckets, ranks, [1, 2, 7, 50])
    assert all(other == first for other in others)
    assert first[50, "two_way"][1] > 90  # exchanges: nearly every parameter has a bucket of its own


class ReferenceCodec(BlockCodec):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, use_reference=True)


def kernels_and_reference(cases, steps):
    found = {}
    for name, way, count, seed in cases:
        both = []
        for codec in (BlockCodec, ReferenceCodec):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(topology, "BlockCodec", codec)
                both.append(run_random(count, seed, steps, compressor=name, exchange=way))
        found[name, way, count, seed] = both[0] == both[1], both[0][1]
    return found


def assert_equal(found, exchanges):
    for result in found:
        assert {case for case, (same, _) in result.items() if not same} == set()
        assert sum(count for _, count in result.values()) >= exchanges


def test_hundreds_of_random_exchanges_equal_the_reference():
    cases = [
        ("quantize", way, count, seed) for seed, count in enumerate((40, 25, 12)) for way in ("two_way", "all_gather")
    ]
    assert_equal(run_ranks(kernels_and_reference, 2, cases, 4), 400)


def test_every_compressor_equals_its_reference_in_flight():
    cases = [(name, way, 8, 5) for name in compressor_names() for way in ("two_way", "all_gather")]
    assert_equal(run_ranks(kernels_and_reference, 2, cases, 3), 200)


def our_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("lightning-compress"))


def threads_of(settings):
    before = our_threads()
    ddp, exchange = wrap(Random(5, 0), **settings)
    ddp(0).backward()
    during = our_threads()
    groups = len(dist.distributed_c10d._world.pg_map)
    exchange.close()
    exchange.close()  # twice is harmless
    with pytest.raises(RuntimeError, match="was closed"):
        ddp(0).backward()
    return before, len(during), our_threads(), groups - len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("settings", "collectives"),
    [({}, 1), ({"exchange": "two_way"}, 2), ({"compressor": "bf16"}, 1), ({"compressor": "none"}, 1)],
)
def test_close_ends_threads_and_process_groups(settings, collectives):
    # one group for each collective of a bucket, one thread more
    assert run_ranks(threads_of, 2, settings) == [([], collectives + 1, [], collectives)] * 2


def test_one_rank_starts_nothing():
    assert run_ranks(threads_of, 1, {}) == [([], 0, [], 0)]

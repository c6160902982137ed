"""The plan: which slice of which parameter is which block, where it stands in the payload, who owns it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_compress.compressors import Cast, Quantize
from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.plan import BlockPlan, ParameterSpec, parameter_specs
from lightning_compress.kernels import table as col

CODED, DENSE = Quantize(4, block_size=64), Cast("bf16", block_size=32)


def offsets(sizes):
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))


def bucket_of(plan, names, rank=0):
    return plan.bucket(names, offsets(plan.worker_sizes()), offsets(plan.owner_sizes(rank)))


def blocks_of(bucket):
    """{(parameter, start): (length, row, key, owner, compressor)} of a bucket plan."""
    return {
        (bucket.names[row[col.PARAMETER]], row[col.START]): (
            row[col.LENGTH],
            row[col.ROW],
            row[col.KEY],
            owner,
            part.compressor,
        )
        for part in bucket.parts
        for row, owner in zip(part.table.tolist(), part.owner.tolist(), strict=False)
    }


def assert_tiles(start, length, total):
    """The runs [start, start + length) cover [0, total) once."""
    at = 0
    for first, count in sorted(zip(start, length, strict=False)):
        assert first == at
        at += count
    assert at == total


@st.composite
def models(draw):
    """Parameters with 0, 1 and many elements, and a partition of them into buckets in some order."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 200, 700]), min_size=1, max_size=12))
    specs = [ParameterSpec(f"p{i}", n, max(1, n // 3), draw(st.booleans())) for i, n in enumerate(sizes)]
    order = draw(st.permutations([spec.name for spec in specs]))
    cuts = sorted({0, len(order), *draw(st.lists(st.integers(0, len(order)), max_size=3))})
    return specs, [list(order[a:b]) for a, b in itertools.pairwise(cuts)]


@given(models(), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_blocks_cover_every_element_once_and_never_cross_parameters(model, owners):
    specs, buckets = model
    plan = BlockPlan(specs, CODED, DENSE, owners)
    numel = {spec.name: spec.numel for spec in specs}
    for names in buckets:
        bucket = bucket_of(plan, names)
        first = dict(zip(names, itertools.accumulate((numel[name] for name in names), initial=0), strict=False))
        rows = [row for part in bucket.parts for row in part.table.tolist()]
        assert_tiles([r[col.SOURCE] for r in rows], [r[col.LENGTH] for r in rows], sum(numel[name] for name in names))
        for row in rows:
            name = names[row[col.PARAMETER]]
            assert row[col.SOURCE] == first[name] + row[col.START]
            assert 0 < row[col.LENGTH] <= numel[name] - row[col.START]


@given(models(), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_codes_fill_the_payload_without_overlap_or_gap(model, owners):
    specs, buckets = model
    plan = BlockPlan(specs, CODED, DENSE, owners)
    for names in buckets:
        bucket = bucket_of(plan, names)
        assert bucket.header_nbytes == math.ceil(2 * len(names) / 8)
        for owner in range(owners):
            start, length = [], []
            for part in bucket.parts:
                mine = part.owner == owner
                start += (part.table[mine, col.PAYLOAD] - bucket.header_nbytes).tolist()
                sizes = part.table[mine][:, [col.LENGTH, col.ROW]].tolist()
                length += [part.compressor.payload_nbytes(n, row) for n, row in sizes]
            assert_tiles(start, length, bucket.section_nbytes[owner] - bucket.header_nbytes)


@given(models(), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_memories_have_one_place_for_every_element(model, owners):
    specs, buckets = model
    plan = BlockPlan(specs, CODED, DENSE, owners)
    total = sum(spec.numel for spec in specs)
    assert sum(plan.worker_sizes().values()) == total
    assert sum(sum(plan.owner_sizes(rank).values()) for rank in range(owners)) == total
    for rank in range(owners):
        start, length, owned, owned_length = [], [], [], []
        for names in buckets:
            for part in bucket_of(plan, names, rank).parts:
                mine = part.owner == rank
                start += part.table[:, col.STATE].tolist()
                length += part.table[:, col.LENGTH].tolist()
                owned += part.owner_state[mine].tolist()
                owned_length += part.table[mine, col.LENGTH].tolist()
        assert_tiles(start, length, total)
        assert_tiles(owned, owned_length, sum(plan.owner_sizes(rank).values()))


@given(models(), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_blocks_and_owners_do_not_depend_on_buckets_or_on_the_order_of_calls(model, owners, random):
    specs, buckets = model
    whole = blocks_of(bucket_of(BlockPlan(specs, CODED, DENSE, owners), [spec.name for spec in specs]))
    plan, again = (BlockPlan(specs, CODED, DENSE, owners) for _ in range(2))
    found = {}
    for names in buckets:
        found |= blocks_of(bucket_of(plan, names))
    assert found == whole
    first = [bucket_of(plan, names) for names in buckets]
    order = list(range(len(buckets)))
    random.shuffle(order)
    second = {i: bucket_of(again, buckets[i]) for i in order}
    for i, bucket in enumerate(first):
        assert bucket.section_nbytes == second[i].section_nbytes
        for mine, other in zip(bucket.parts, second[i].parts, strict=True):
            assert torch.equal(mine.table, other.table)
            assert torch.equal(mine.owner, other.owner)
            assert torch.equal(mine.owner_state, other.owner_state)


@given(models(), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_owner_is_the_running_block_number_modulo_the_owners(model, owners):
    specs, _ = model
    bucket = bucket_of(BlockPlan(specs, CODED, DENSE, owners), [spec.name for spec in specs])
    expected, running = {}, {True: 0, False: 0}  # small tensors are dealt out on their own
    for spec in specs:
        size = (DENSE if spec.dense else CODED).block_size
        for start in range(0, spec.numel, size):
            expected[spec.name, start] = running[spec.dense] % owners
            running[spec.dense] += 1
    assert {block: value[3] for block, value in blocks_of(bucket).items()} == expected


@pytest.mark.parametrize("owners", [2, 3, 8])
@pytest.mark.parametrize("coded", [Quantize(4), Quantize(4, block_size=None)], ids=repr)
@pytest.mark.parametrize("depth", ["resnet18", "resnet50"])
def test_sections_differ_by_a_few_blocks(depth, coded, owners):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        module = getattr(models, depth)()
    dense = Cast("bf16")
    plan = BlockPlan(parameter_specs(module, DenseRule(), keeps_zero=True), coded, dense, owners)
    names = [name for name, _ in module.named_parameters()]
    # the whole model as in DDP's first step, and buckets in reverse order as later
    for bucket in (names, *([*reversed(names[i : i + 40])] for i in range(0, len(names), 40))):
        sizes = bucket_of(plan, bucket).section_nbytes
        block = coded.payload_nbytes(coded.block_size or 65536) + dense.payload_nbytes(1024)
        assert max(sizes) - min(sizes) <= 3 * block


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,), (1, 1)])
def test_degenerate_parameters_have_a_place_in_header_and_memory(shape):
    module = nn.ParameterDict({"odd": nn.Parameter(torch.zeros(shape)), "even": nn.Parameter(torch.zeros(40, 40))})
    specs = parameter_specs(module, DenseRule(), keeps_zero=True)
    plan = BlockPlan(specs, CODED, DENSE, 2)
    numel = math.prod(shape)
    assert plan.worker_sizes() == {"odd": numel, "even": 1600}
    assert len(blocks_of(bucket_of(plan, ["even", "odd"]))) == 25 + numel
    alone = bucket_of(plan, ["odd"])
    assert alone.header_nbytes == 1
    assert sum(alone.section_nbytes) == 2 * alone.header_nbytes + 2 * numel


def test_whole_tensors_are_one_block_only_for_selections_without_a_block_size():
    class Selection(Quantize):
        selects = True

    spec = ParameterSpec("p", 200_000, 200_000, dense=False)
    lengths = {
        (whole, cls.__name__): [
            value[0] for value in blocks_of(bucket_of(BlockPlan([spec], cls(4, None), DENSE, 1, whole), ["p"])).values()
        ]
        for whole in (False, True)
        for cls in (Quantize, Selection)
    }
    pieces = [65536, 65536, 65536, 200_000 - 3 * 65536]
    assert lengths == {
        (False, "Quantize"): pieces,
        (False, "Selection"): pieces,
        (True, "Quantize"): pieces,
        (True, "Selection"): [200_000],
    }


def test_small_and_one_dimensional_tensors_are_dense():
    module = nn.ModuleDict({"conv": nn.Conv2d(3, 64, 7), "norm": nn.BatchNorm2d(2000), "head": nn.Linear(32, 32)})
    by_name = {spec.name: spec for spec in parameter_specs(module, DenseRule(patterns=["*conv*"]), keeps_zero=True)}
    assert {name for name, spec in by_name.items() if spec.dense} == set(by_name)
    by_name = {spec.name: spec for spec in parameter_specs(module, DenseRule(), keeps_zero=True)}
    assert {name for name, spec in by_name.items() if not spec.dense} == {"conv.weight"}
    assert by_name["conv.weight"].row == 3 * 7 * 7
    assert by_name["norm.weight"].row == 2000


def test_specs_name_tied_weights_once_and_leave_out_frozen_and_sparse_ones():
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(50, 30),
            "sparse": nn.Embedding(50, 30, sparse=True),
            "head": nn.Linear(30, 50),
            "complex": nn.Linear(40, 40, dtype=torch.complex64),
        }
    )
    module["head"].weight = module["embedding"].weight
    module["head"].bias.requires_grad_(False)
    specs = {spec.name: spec.numel for spec in parameter_specs(module, DenseRule(), keeps_zero=True)}
    assert specs == {"embedding.weight": 1500, "complex.weight": 3200, "complex.bias": 80}


def test_codes_without_a_zero_take_rows_that_are_runs_of_memory():
    module = nn.ParameterDict(
        {
            "plain": nn.Parameter(torch.zeros(64, 48)),
            "transposed": nn.Parameter(torch.zeros(48, 64).t()),
            "channels_last": nn.Parameter(torch.zeros(64, 8, 3, 3).to(memory_format=torch.channels_last)),
        }
    )
    for keeps_zero, dense in ((True, set()), (False, {"transposed"})):
        specs = parameter_specs(module, DenseRule(), keeps_zero)
        assert {spec.name for spec in specs if spec.dense} == dense

"""``compression_threads``: threads take ranges of blocks, and their number changes no bit."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from lightning_compress import GradientExchange
from lightning_compress.compressors import OneBit, Quantize, compressor_names, get_compressor
from lightning_compress.exchange import threads
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.exchange.plan import BlockPlan, ParameterSpec
from lightning_compress.exchange.threads import Threads
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import MemoryView
from tests.exchange.training import content, make_net, residuals, train, wrap
from tests.ranks import run_ranks

SIZES = {"a": 30_100, "absent": 9000, "b": 12_300, "nonfinite": 20_000, "c": 7}
RANKS = 2


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch):
    monkeypatch.setattr(threads, "LEAST", 5000)


def coded(compressor, dtype, count):
    """Payloads, memory, marks and decoded mean of two ranks' gradients."""
    plan = BlockPlan(
        [ParameterSpec(n, size, min(size, 100), False) for n, size in SIZES.items()], compressor, compressor, 1
    )
    first = torch.tensor([0, *SIZES.values()]).cumsum(0).tolist()
    bucket = plan.bucket(list(SIZES), dict(zip(SIZES, first, strict=False)), dict.fromkeys(SIZES, 0))
    pool = Threads(count)
    codec = BlockCodec(compressor, bucket.parts[0].table, per_tensor=True, threads=pool)
    parts = len(codec.backend._ranges)
    assert parts == count or (compressor.block_size is None and 1 < parts < count)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(
        first[-1], generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    zero = torch.zeros(len(SIZES), dtype=torch.int64)
    nbytes = bucket.section_nbytes[0]
    payload = torch.zeros(RANKS * nbytes, dtype=torch.uint8)
    status = torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8)
    for rank in range(RANKS):
        values = torch.randn(first[-1], generator=generator).to(dtype)
        values[first[3] + 15_000] = torch.inf
        said, part = status.clone(), payload[rank * nbytes : (rank + 1) * nbytes]
        codec.encode(values, MemoryView(state, zero, zero, True, True), part, said, weight=0.5, scale=8.0, salt=rank)
    out = torch.full_like(values, 7)
    codec.decode(payload, out, said, stride=nbytes, ranks=RANKS, weight=0.5, salt=1)
    pool.close()
    assert said.tolist() == [1, col.ABSENT, 1, col.NONFINITE, 1]
    return payload, state, out.nan_to_num(9)


COMPRESSORS = [*map(get_compressor, compressor_names()), Quantize(4, block_size=None), OneBit(block_size=None)]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_any_number_of_threads_gives_the_same_bits(compressor):
    alone = coded(compressor, torch.float32, 1)
    for count in (2, 5):
        assert all(map(torch.equal, alone, coded(compressor, torch.float32, count)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_formats_too(dtype):
    assert all(map(torch.equal, coded(Quantize(4), dtype, 1), coded(Quantize(4), dtype, 3)))


@pytest.mark.parametrize("lengths", [[4096] * 100, [1], [70_000, 1, 1, 1], [1] * 30_000, [3, 90_000, 3, 90_000, 3]])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranges_follow_each_other_and_are_about_equal(lengths, count):
    lengths = torch.tensor(lengths)
    ranges = Threads(count).ranges(lengths)
    assert [one.start for one in ranges] == [0, *(one.stop for one in ranges[:-1])]
    assert ranges[-1].stop == len(lengths)
    assert 1 <= len(ranges) <= count
    each = [int(lengths[one].sum()) for one in ranges]
    assert min(each) > 0
    assert max(each) <= int(lengths.sum()) / len(ranges) + int(lengths.max()) or len(lengths) < 6


def test_an_error_is_raised_when_all_have_ended():
    pool, ended = Threads(3), threading.Event()
    waits = threading.Event()

    def fails():
        waits.set()
        raise ZeroDivisionError

    def slow():
        waits.wait(10)
        ended.set()

    with pytest.raises(ZeroDivisionError):
        pool.run([fails, slow])
    assert ended.is_set()
    ended.clear()
    with pytest.raises(ZeroDivisionError):
        pool.run([slow, fails])
    assert ended.is_set()
    pool.close()


def threads_of_codec():
    return [t.name for t in threading.enumerate() if t.name.startswith("lightning-compress-codec")]


def train_with(counts):
    threads.LEAST = 1000
    found = []
    for count in counts:
        ddp, exchange = wrap(
            make_net(), {"bucket_cap_mb": 25}, compressor="quantize", compression_threads=count[dist.get_rank()]
        )
        parameters = train(ddp, 3)
        during = len(threads_of_codec())
        found.append((content([*parameters, *residuals(exchange).values()]), during))
        exchange.close()
        assert threads_of_codec() == []
    return found


def test_ranks_may_have_different_numbers_and_close_ends_the_threads():
    for found in run_ranks(train_with, 2, [(1, 1), (1, 3), (4, 2)]):
        (one, alone), *others = found
        assert alone == 0
        assert all(digest == one for digest, _ in others)
    assert [during for _, during in found] == [0, 2, 1]  # of the last rank; its own thread is one of them


def test_a_device_that_codes_itself_refuses_them(monkeypatch):
    def on_meta():
        ddp = torch.nn.parallel.DistributedDataParallel(make_net())
        monkeypatch.setattr(ddp, "module", make_net().to("meta"))
        with pytest.raises(
            ValueError, match=r"compression_threads=2 is for gradients on the CPU.*leave compression_threads out"
        ):
            GradientExchange(compression_threads=2).attach(ddp)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on_meta()
    finally:
        dist.destroy_process_group()

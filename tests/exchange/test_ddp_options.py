"""Every way DDP can be asked to work: same results where they should be, and nothing lost."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_compress import GradientExchange, Quantize
from tests.exchange.training import Ledger, batch, content, make_net, mean_square, residuals, train, wrap
from tests.ranks import run_ranks

WAYS = {
    "two_way": {"compressor": Quantize(4), "exchange": "two_way"},
    "all_gather": {"compressor": Quantize(4), "exchange": "all_gather"},
    "all_reduce": {"compressor": "bf16"},
}
OPTIONS = {
    "several buckets": {},
    "one bucket": {"bucket_cap_mb": 25},
    "static_graph": {"static_graph": True},
    "static_graph, one bucket": {"static_graph": True, "bucket_cap_mb": 25},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "all of them": {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
}


def train_with_options(settings):
    found = {}
    for name, options in OPTIONS.items():
        ddp, exchange = wrap(make_net(), options, **settings)
        train(ddp, 5)
        found[name] = content([*ddp.parameters(), *residuals(exchange).values()])
        exchange.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["two_way", "all_gather"])
def test_options_and_buckets_change_nothing(way, ranks):
    # blocks, scales and owners know nothing of buckets; a ring's order of summation does (all_reduce)
    for found in run_ranks(train_with_options, ranks, WAYS[way]):
        assert set(found.values()) == {found["several buckets"]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_options_and_buckets_change_only_the_order_of_an_all_reduce(ranks):
    found = run_ranks(train_with_options, ranks, WAYS["all_reduce"])
    assert all(rank.keys() == OPTIONS.keys() for rank in found)
    if ranks == 2:  # two numbers have one order
        assert all(len(set(rank.values())) == 1 for rank in found)


class Layouts(nn.Module):
    """Parameters whose memory is not what their shape says."""

    def __init__(self, complex_dtype, real_dtype):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(16, 24, 3, dtype=real_dtype).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(40, 50, dtype=real_dtype).t() / 10)
        self.complex = nn.Parameter(torch.randn(20, 60, dtype=complex_dtype))
        self.tied = nn.Linear(50, 50, bias=False, dtype=real_dtype)
        self.same = nn.Linear(50, 50, dtype=real_dtype)
        self.same.weight = self.tied.weight
        self.empty = nn.Parameter(torch.zeros(3, 0, dtype=real_dtype))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=real_dtype))

    def forward(self, x):
        image = x[:, :16, None, None].expand(-1, -1, 4, 4) * torch.arange(1, 5)
        wide = self.conv(image.to(self.scalar.dtype)).flatten(1)[:, :40] @ self.transposed.t()
        wide = self.same(torch.tanh(self.tied(wide)))
        waves = torch.view_as_real(x.to(self.complex.dtype) @ self.complex).sum(-1)[:, :50]
        return (wide * self.scalar + waves + self.empty.sum()).square().mean()


def conservation_of_layouts(real_dtype, complex_dtype):
    found = {}
    for way in ("two_way", "all_gather"):
        ddp, exchange = wrap(Layouts(complex_dtype, real_dtype), **WAYS[way])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        ledger = Ledger(ddp, exchange)
        strides = [p.stride() for p in ddp.parameters()]
        for step in range(6):
            x = batch(step, dtype=real_dtype)
            optimizer.zero_grad()
            ledger.expect(ddp.module(x))
            ddp(x).backward()
            ledger.note()
            optimizer.step()
        assert [p.stride() for p in ddp.parameters()] == strides
        found[way] = ledger.errors(), content(ddp.parameters())
        exchange.close()
    return found


@pytest.mark.parametrize(
    ("real_dtype", "complex_dtype", "tolerance"),
    [(torch.float32, torch.complex64, 1e-6), (torch.float64, torch.complex128, 1e-13)],
    ids=["float32", "float64"],
)
def test_layouts_number_formats_and_tied_weights_lose_nothing(real_dtype, complex_dtype, tolerance):
    found = run_ranks(conservation_of_layouts, 3, real_dtype, complex_dtype)
    for way in ("two_way", "all_gather"):
        assert len({rank[way][1] for rank in found}) == 1
        errors = found[0][way][0]
        assert "same.weight" not in errors  # tied: one parameter, under its first name
        assert len(errors) == 7
        assert {name: error for name, error in errors.items() if error > tolerance} == {}


def half_precision(dtype):
    found = []
    for settings in WAYS.values():
        ddp, exchange = wrap(make_net(dtype), **settings)
        exact, _ = wrap(make_net(dtype), compressor="none")
        for step in range(3):
            for model in (ddp, exact):
                model.zero_grad()
                mean_square(model, batch(step, dtype=dtype)).backward()
        sized = [(p, q) for p, q in zip(ddp.parameters(), exact.parameters(), strict=True) if p.numel() > 1]
        errors = [float((p.grad.double() - q.grad).norm() / q.grad.double().norm()) for p, q in sized]
        memory_dtypes = {m.dtype for m in residuals(exchange).values()}
        gradient_dtypes = {p.grad.dtype for p in ddp.parameters()}
        found.append((max(errors), memory_dtypes, gradient_dtypes, content(train(ddp, 3))))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_low_and_high_precision_models(dtype):
    first, second = run_ranks(half_precision, 2, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for (error, memories, gradients, parameters), (*_, other) in zip(first, second, strict=True):
        assert error < 0.6  # with error feedback a single gradient may be far off, but not wrong
        assert memories == {wide}
        assert gradients == {dtype}
        assert parameters == other


class Words(nn.Module):
    """An embedding with sparse gradients beside dense layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 50, sparse=True)
        self.head = nn.Linear(50, 50)

    def forward(self, x):
        return self.head(self.table((x.abs() * 10).long().clamp_max(39)).mean(1)).square().mean()


def sparse_gradients(settings):
    ddp, exchange = wrap(Words(), **settings)
    exact, _ = wrap(Words(), compressor="none")
    same = True
    for step in range(4):
        for model in (ddp, exact):
            model.zero_grad()
            model(batch(step)).backward()
        same = same and ddp.module.table.weight.grad.to_dense().equal(exact.module.table.weight.grad.to_dense())
        assert ddp.module.table.weight.grad.is_sparse
    names = {name.split()[1] for name in residuals(exchange)}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return same, names, content(train(ddp, 3, loss=lambda model, x: model(x), optimizer=optimizer))


@pytest.mark.parametrize("way", ["two_way", "all_reduce"])
def test_sparse_gradients_pass_uncompressed_and_need_no_memory(way):
    first, second = run_ranks(sparse_gradients, 2, WAYS[way])
    for same, names, _ in (first, second):
        assert same
        assert names == {"head.weight", "head.bias"}
    assert first[2] == second[2]


class Checkpointed(nn.Module):
    def __init__(self, reentrant, times):
        super().__init__()
        self.net, self.reentrant, self.times = make_net(), reentrant, times

    def forward(self, x):
        x = x.clone().requires_grad_()  # reentrant checkpoints need an input with gradients
        return sum(self.once(x) for _ in range(self.times)) / self.times

    def once(self, x):
        return self.net(x) if self.reentrant is None else checkpoint(self.net, x, use_reentrant=self.reentrant)


def train_checkpointed(settings):
    found = {}
    for name, reentrant, times, static in (
        ("plain", None, 1, False),
        ("reentrant", True, 1, False),
        ("not reentrant", False, 1, False),
        ("static, reentrant, used twice", True, 2, True),
    ):
        ddp, exchange = wrap(Checkpointed(reentrant, times), {"static_graph": static}, **settings)
        found[name] = content(train(ddp, 4))
        assert exchange.stats()["steps"] == 4
        exchange.close()
    return found


@pytest.mark.parametrize("way", ["two_way", "all_reduce"])
def test_checkpointing_changes_nothing(way):
    first, second = run_ranks(train_checkpointed, 2, WAYS[way])
    assert first == second
    # twice the same output, halved, is the same to the bit
    assert set(first.values()) == {first["plain"]}


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(20, 90), nn.ReLU(), nn.Linear(90, 20))
        self.judge = nn.Sequential(nn.Linear(20, 90), nn.ReLU(), nn.Linear(90, 1))

    def forward(self, x, generate):
        return self.judge(self.generator(x)) if generate else self.judge(x)


def train_gan(settings, ddp_options):
    ddp, exchange = wrap(Gan(), ddp_options, **settings)
    module = ddp.module
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (module.generator, module.judge)
    ]
    before = content(module.parameters())
    moved = []
    for step in range(4):
        x = batch(step)
        module.judge.requires_grad_(False)
        optimizers[0].zero_grad()
        (-ddp(x, True).mean()).backward()
        optimizers[0].step()
        module.judge.requires_grad_(True)
        kept = content(module.generator.parameters())
        optimizers[1].zero_grad()
        (ddp(x, False).mean() + ddp(x.flip(0), False).square().mean()).backward()
        optimizers[1].step()
        moved.append(content(module.generator.parameters()) != kept)
    finite = all(torch.isfinite(p).all() for p in module.parameters())
    return (
        content(module.parameters()) != before,
        moved,
        finite,
        content(module.parameters()),
        exchange.stats()["steps"],
    )


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket view"])
@pytest.mark.parametrize("way", WAYS)
def test_two_optimizers_that_take_turns(way, view):
    found = run_ranks(train_gan, 2, WAYS[way], {"find_unused_parameters": True, "gradient_as_bucket_view": view})
    assert len({parameters for *_, parameters, _ in found}) == 1
    for changed, moved, finite, _, steps in found:
        assert changed
        assert finite
        assert moved == [False] * 4
        assert steps == 8  # every backward is an exchange


def two_exchanges_per_step(settings):
    """Without no_sync each backward is exchanged; DDP then sees the old average plus the new gradient."""
    ddp, exchange = wrap(make_net(torch.float64), **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    ledger = Ledger(ddp, exchange)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            x = batch(2 * step + part, dtype=torch.float64)
            ledger.expect(mean_square(ddp.module, x))
            mean_square(ddp, x).backward()
        ledger.note()
        optimizer.step()
    return ledger.errors(), content(ddp.parameters())


@pytest.mark.parametrize("way", ["two_way", "all_gather"])
def test_two_exchanges_before_one_step_lose_nothing(way):
    found = run_ranks(two_exchanges_per_step, 2, WAYS[way])
    assert len({parameters for _, parameters in found}) == 1
    assert max(found[0][0].values()) < 1e-13


def warm_up():
    ddp, exchange = wrap(make_net(), compressor=Quantize(4), start_step=2)
    exact, _other = wrap(make_net(), compressor="none")
    same, ratios = [], []
    for step in range(4):
        train(ddp, 1, first=step)
        train(exact, 1, first=step)
        same.append(content(ddp.parameters()) == content(exact.parameters()))
        ratios.append(exchange.stats()["last"]["ratio"])
    return same, ratios


def test_start_step_exchanges_dense_before():
    for same, ratios in run_ranks(warm_up, 2):
        assert same == [True, True, False, False]
        assert ratios[:2] == [1.0, 1.0]
        assert min(ratios[2:]) > 4


def frozen_before_attaching():
    ddp = nn.parallel.DistributedDataParallel(make_net(), find_unused_parameters=True)
    ddp.module.last.requires_grad_(False)
    GradientExchange().attach(ddp)
    with pytest.raises(RuntimeError, match=r"frozen when the exchange was attached.*right after wrapping"):
        mean_square(ddp, batch(0)).backward()
    return True


def test_a_parameter_frozen_before_attaching_is_an_error_that_names_the_remedy():
    assert run_ranks(frozen_before_attaching, 1) == [True]


def two_models():
    """A generator and a judge that are wrapped apart, each with an exchange of its own, both at work in one backward."""
    gan = Gan()
    generator, first = wrap(gan.generator, compressor=Quantize(4))
    judge, second = wrap(gan.judge, compressor="bf16")
    optimizer = torch.optim.SGD(gan.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        judge(generator(batch(step))).square().mean().backward()
        optimizer.step()
    names = {name.split()[1] for exchange in (first, second) for name in residuals(exchange)}
    return content(gan.parameters()), first.stats()["steps"], second.stats()["steps"], names


def test_two_models_with_an_exchange_each():
    first, second = run_ranks(two_models, 2)
    assert first == second
    assert first[1:] == (3, 3, {"0.weight", "0.bias", "2.weight", "2.bias"})


def subgroups():
    """Two pairs of ranks, each with a DDP model of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp, exchange = wrap(make_net(), {"process_group": pairs[dist.get_rank() // 2]}, compressor=Quantize(4))
    parameters = content(train(ddp, 3))
    exchange.close()
    assert exchange.stats()["bytes_sent"] > 0
    return parameters


def test_a_model_on_a_part_of_the_ranks():
    first, second, third, fourth = run_ranks(subgroups, 4, timeout=40)
    assert first == second != third == fourth


def pickled():
    """The exchange of a model that is being trained: its threads and groups stay where they are."""
    ddp, exchange = wrap(make_net(), compressor=Quantize(3), start_step=1)
    train(ddp, 3)
    copy = pickle.loads(pickle.dumps(exchange))
    train(ddp, 1)
    assert residuals(exchange)
    return copy.stats()["steps"], exchange.stats()["steps"], copy.settings == exchange.settings, residuals(copy)


def test_an_exchange_can_be_pickled_while_it_works():
    assert run_ranks(pickled, 2) == [(3, 4, True, {})] * 2


def wrapped_again():
    """A second wrap of the same module goes on with its memories; another module starts anew."""
    module = make_net()
    first, exchange = wrap(module, compressor=Quantize(4))
    train(first, 3)
    before = residuals(exchange)
    exchange.close()
    readable = residuals(exchange)
    second = nn.parallel.DistributedDataParallel(module)
    exchange.attach(second)
    kept = residuals(exchange)
    dist.barrier()  # a group that one rank closes while the other still connects to it is an error there
    exchange.close()
    other = nn.parallel.DistributedDataParallel(make_net())
    exchange.attach(other)
    forgotten = residuals(exchange)
    dist.barrier()
    return [all(before[n].equal(found[n]) for n in before) for found in (readable, kept)], len(forgotten)


def test_memories_belong_to_the_module():
    assert run_ranks(wrapped_again, 2) == [([True, True], 0)] * 2

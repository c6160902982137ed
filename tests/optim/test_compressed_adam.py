"""CompressedAdam: its updates, the settings it brings along, and the exchange of momenta."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_compress import GradientExchange, MomentumCorrection, OneBit, TopK
from lightning_compress.memory import SharedMomentum
from lightning_compress.optim import LANS, CompressedAdam
from lightning_compress.testing import SimulatedExchange, simulate
from tests.models import loss_of, make_batches, make_model

ADAM = {"lr": 3e-3, "weight_decay": 0.1}


def train(optimizer: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, SimulatedExchange]:
    model = make_model(dtype)
    chosen = optimizer(model.parameters())
    exchange = SimulatedExchange(model, 2, **settings, optimizer=chosen)
    simulate(model, chosen, loss_of, make_batches(2, 8, dtype), exchange)
    return model, exchange


def distance(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("lans", lambda p: LANS(p, **ADAM)),
        ("adam", lambda p: torch.optim.AdamW(p, eps=1e-6, foreach=False, **ADAM)),
    ],
)
def test_a_dense_exchange_is_the_plain_optimizer(update: Any, expected: Any) -> None:
    # in double: Adam enlarges the rounding errors of a gradient that should be zero (a bias before batch norm)
    reference, _ = train(expected, torch.float64, compressor="none")
    model, _ = train(lambda p: CompressedAdam(p, update=update, **ADAM, compressor="none"), torch.float64)
    assert distance(model, reference) < 1e-9
    assert distance(model, make_model(torch.float64)) > 1e-3


def test_the_default_is_clan() -> None:
    model, exchange = train(lambda p: CompressedAdam(p, **ADAM))
    assert exchange.settings == GradientExchange(OneBit(block_size=256), "error_feedback").settings
    reference, _ = train(lambda p: LANS(p, **ADAM), compressor=OneBit(block_size=256))
    assert distance(model, reference) == 0.0
    assert exchange.stats()["ratio"] > 20


def test_settings_of_both_are_put_together() -> None:
    optimizer = CompressedAdam(make_model().parameters(), compressor=TopK(0.1), start_step=3)
    exchange = GradientExchange(dense="bf16", start_step=3)
    exchange.configure([optimizer])
    assert exchange.settings == GradientExchange(TopK(0.1), dense="bf16", start_step=3).settings
    exchange.configure([])
    assert exchange.settings == GradientExchange(dense="bf16", start_step=3).settings


@pytest.mark.parametrize(
    ("theirs", "arguments", "shown"),
    [
        ({"compressor": "onebit"}, {"compressor": TopK(0.1)}, ("'onebit'", "TopK(ratio=0.1")),
        ({"start_step": 5}, {"start_step": 3}, ("start_step=5", "start_step=3")),
        # also where it is what would hold if nobody said anything
        ({"compressor": TopK(0.1)}, {"compressor": "quantize"}, ("'quantize'", "TopK(ratio=0.1")),
        ({"start_step": 5}, {"start_step": 0}, ("start_step=5", "start_step=0")),
        ({"memory": "none"}, {"memory": "error_feedback", "compressor": "dithering"}, ("'none'", "'error_feedback'")),
        (
            {"exchanged": "momentum", "freeze_step": 4},
            {"memory": MomentumCorrection()},
            ("Shared", "MomentumCorrection"),
        ),
    ],
)
def test_a_disagreement_shows_both(theirs: Any, arguments: Any, shown: tuple[str, ...]) -> None:
    optimizer = CompressedAdam(make_model().parameters(), **theirs)
    with pytest.raises(ValueError, match="leave one of them out") as error:
        GradientExchange(**arguments).configure([optimizer])
    assert all(text in str(error.value) for text in shown)


def test_what_only_looks_different_agrees() -> None:
    optimizer = CompressedAdam(make_model().parameters(), compressor=OneBit(), exchange="auto", dense="auto")
    exchange = GradientExchange("onebit", "error_feedback", "two_way")
    exchange.configure([optimizer])
    assert exchange.settings.compressor == OneBit()
    momentum = CompressedAdam(make_model().parameters(), exchanged="momentum", freeze_step=4)
    exchange.configure([momentum])
    assert exchange.settings.memory == SharedMomentum(4)
    assert exchange.settings.start_step == 4


def test_what_the_exchange_was_given_holds_also_where_it_is_the_default() -> None:
    optimizer = CompressedAdam(make_model().parameters())
    exchange = GradientExchange(compressor="quantize")
    exchange.configure([optimizer])
    assert exchange.settings == GradientExchange("quantize").settings
    later = CompressedAdam(make_model().parameters(), exchanged="momentum", freeze_step=4)
    exchange = GradientExchange(memory="auto", start_step=0)
    exchange.configure([later])
    assert (exchange.settings.compressor, exchange.settings.start_step) == (OneBit(block_size=256), 0)


def test_several_must_say_the_same() -> None:
    one, other = (CompressedAdam(make_model().parameters(), compressor=c) for c in ("onebit", "topk"))
    with pytest.raises(ValueError, match="share one exchange"):
        GradientExchange().configure([one, other])


def test_without_an_exchange_it_says_once_that_it_is_dense() -> None:
    tensor = torch.ones(3)
    tensor.grad = torch.ones(3)
    optimizer = CompressedAdam([tensor], update="adam", lr=0.1, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"runs dense.*compressed_clan"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.allclose(tensor, torch.full((3,), 0.8), atol=1e-5)


def test_a_copy_works_without_the_exchange() -> None:
    model = make_model()
    optimizer = CompressedAdam(model.parameters(), compressor="topk")
    SimulatedExchange(model, 2, optimizer=optimizer)
    other = copy.deepcopy(optimizer)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="runs dense"):
        other.step()
    assert SimulatedExchange(make_model(), 2, optimizer=other).settings.compressor == TopK(0.01)


def one_bit_adam(batches: list[Any], freeze: int, lans: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """1-bit Adam without compression: Adam, then a frozen variance; in float64. Also gives the momenta."""
    model, m, v = make_model(torch.float64), {}, {}
    parameters = dict(model.named_parameters())
    for step, of_workers in enumerate(batches):
        model.zero_grad()
        for images, labels in of_workers:
            (loss_of(model, (images, labels)) / len(of_workers)).backward()
        t = step + 1
        for name, p in parameters.items():
            g = p.grad
            m[name] = 0.9 * m.get(name, 0.0) + 0.1 * g
            if step < freeze:
                v[name] = 0.999 * v.get(name, 0.0) + 0.001 * g * g
            elif step == freeze:
                v[name] = torch.where(v[name] == 0, v[name].mean(), v[name])
            den = (v[name] / (1 - 0.999 ** min(t, freeze))).sqrt() + 1e-6
            u = m[name] / (1 - 0.9**t) / den + (0.1 * p.detach() if lans else 0.0)
            q, x = (p.norm() / u.norm() if p.norm() > 0 else 1.0), p.detach()
            w = g / den + 0.1 * x
            qw = x.norm() / w.norm() if x.norm() > 0 else 1.0
            with torch.no_grad():
                if not lans:
                    p.mul_(1 - 3e-3 * 0.1).sub_(3e-3 * u)
                elif step < freeze:
                    p.sub_(3e-3 * (0.9 * q * u + 0.1 * qw * w))
                else:
                    p.sub_(3e-3 * q * u)
    return {name: p.detach() for name, p in parameters.items()}, m


@pytest.mark.parametrize("update", ["adam", "lans"])
def test_momenta_without_compression_equal_the_reference(update: Any) -> None:
    model = make_model(torch.float64)
    optimizer = CompressedAdam(
        model.parameters(),
        **ADAM,
        update=update,
        exchanged="momentum",
        freeze_step=4,
        compressor=TopK(1.0, dtype="fp32"),
        dense="fp32",
    )
    exchange = SimulatedExchange(model, 3, optimizer=optimizer)
    simulate(model, optimizer, loss_of, make_batches(3, 8, torch.float64), exchange)
    expected, momenta = one_bit_adam(make_batches(3, 8, torch.float64), 4, update == "lans")
    for name, p in model.named_parameters():
        assert torch.allclose(p, expected[name], rtol=1e-4, atol=1e-6), name
        assert torch.allclose(optimizer.state[p]["exp_avg"], momenta[name], rtol=1e-4, atol=1e-7), name
        assert optimizer.state[p]["frozen_at"] == 4
        assert optimizer.state[p]["step"] == 8


def test_the_switch_zeroes_residuals_and_momenta_are_conserved() -> None:
    """Mean of what the ranks had to send = what has arrived + what is still owed, from the switch on."""
    torch.manual_seed(0)
    model = nn.Linear(300, 40, bias=False).double()
    optimizer = CompressedAdam(
        model.parameters(), exchanged="momentum", freeze_step=3, start_step=0, compressor=TopK(0.05, block_size=256)
    )
    exchange = SimulatedExchange(model, 2, optimizer=optimizer)
    arrived = asked = torch.zeros(40, 300).double()
    for step in range(7):
        gradients = [torch.randn(40, 300).double() for _ in range(2)]
        m = optimizer.state[model.weight]["exp_avg"].clone() if step else 0.0
        model.weight.grad = exchange.mean([{"weight": g} for g in gradients])["weight"]
        if step >= 3:
            asked = asked + 0.9 * m + 0.1 * torch.stack(gradients).mean(0)
            arrived = arrived + model.weight.grad
        optimizer.step()
        states = [worker.state() for worker in exchange.workers]
        owed = torch.stack([s["worker"]["weight"][0] for s in states]).mean(0) + sum(
            s["owner"]["weight"] for s in states
        )
        assert float(owed.abs().sum()) > 0
        if step >= 3:
            assert torch.allclose(arrived + owed, asked, atol=1e-12), step


@pytest.mark.parametrize("first", ["gradient", "momentum"])
def test_resuming_with_another_exchanged_quantity_starts_without_residuals(first: str) -> None:
    made = {}
    for exchanged, more in (
        ("gradient", {}),
        ("momentum", {"exchanged": "momentum", "freeze_step": 1, "start_step": 0}),
    ):
        model = nn.Linear(300, 40, bias=False)
        optimizer = CompressedAdam(model.parameters(), compressor=TopK(0.05), **more)
        exchange = SimulatedExchange(model, 2, optimizer=optimizer)
        for _ in range(3):
            model.weight.grad = exchange.mean([{"weight": torch.randn(40, 300)}] * 2)["weight"]
            optimizer.step()
        made[exchanged] = exchange.workers[0]
    state = made[first].state()
    for exchanged, worker in made.items():
        worker.restore(state)
        worker.begin_step(3)
        kept = bool(worker.state()["worker"]["weight"][0].any())
        assert kept == (exchanged == first), exchanged


def test_gradients_after_momenta_go_on_with_the_frozen_variance() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = CompressedAdam([weight], exchanged="momentum", freeze_step=2)
    optimizer.attach({"weight": weight})
    for momenta in (False, False, True, True, True, False, False):
        weight.grad = torch.ones(4)
        optimizer.receive(momenta)
        optimizer.step()
    state = optimizer.state[weight]
    corrected = state["exp_avg_sq"] / (1 - 0.999 ** state["frozen_at"])  # as the step does: 1 where every gradient is 1
    assert torch.allclose(corrected, torch.ones(4))
    assert state["step"] == 7


def test_rows_that_are_never_hit_stay_and_late_ones_do_not_explode() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(6, 8)
    before = table.weight.detach().clone()
    optimizer = CompressedAdam(
        table.parameters(), lr=0.01, weight_decay=0.0, update="adam", exchanged="momentum", freeze_step=3
    )
    exchange = SimulatedExchange(table, 2, optimizer=optimizer, dense=0)
    target = torch.randn(8)
    for step in range(12):
        rows = torch.tensor([0, 1, 2] if step < 6 else [0, 1, 2, 3])  # row 3 comes after the variance was frozen
        table.zero_grad()
        (table(rows) - target).square().mean().backward()
        table.weight.grad = exchange.mean([{"weight": table.weight.grad}] * 2)["weight"]
        optimizer.step()
    moved = (table.weight.detach() - before).abs().amax(1)
    assert torch.equal(moved[4:], torch.zeros(2))
    assert bool((moved[:4] > 0).all())
    assert float(moved.max()) < 1.0


def test_a_tensor_without_a_variance_stays_until_something_arrives_and_then_is_an_error() -> None:
    model = make_model()
    optimizer = CompressedAdam(model.parameters(), weight_decay=0.0, exchanged="momentum", freeze_step=2)
    exchange = SimulatedExchange(model, 2, optimizer=optimizer)
    before = model[2].weight.detach().clone()
    for step in range(6):
        gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        if step < 5:
            gradients["2.weight"].zero_()
        for name, mean in exchange.mean([gradients, gradients]).items():
            model.get_parameter(name).grad = mean
        if step == 5:
            with pytest.raises(ValueError, match=r"'2.weight' has none.*raise freeze_step.*exchanged='gradient'"):
                optimizer.step()
        else:
            optimizer.step()
    assert torch.equal(model[2].weight, before)
    assert optimizer.state[model[0].weight]["frozen_at"] == 2


def test_a_gradient_that_is_missing_on_a_rank_is_an_error() -> None:
    model = make_model()
    optimizer = CompressedAdam(model.parameters(), exchanged="momentum", freeze_step=1)
    exchange = SimulatedExchange(model, 2, optimizer=optimizer)
    whole = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    exchange.mean([whole, whole])
    del whole["0.bias"]
    with pytest.raises(ValueError, match=r"every parameter on every rank.*exchanged='gradient'"):
        exchange.mean([whole, whole])


def test_every_parameter_needs_a_momentum() -> None:
    model = make_model()
    optimizer = CompressedAdam(model[0].parameters(), exchanged="momentum", freeze_step=1)
    with pytest.raises(ValueError, match=r"2.weight is in none"):
        SimulatedExchange(model, 2, optimizer=optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"update": "sgd"}, "update"),
        ({"exchanged": "weights"}, "exchanged"),
        ({"update": "adam", "normalize_grad": True}, "normalize_grad"),
        ({"freeze_step": 3}, "freeze_step"),
        ({"exchanged": "momentum"}, "freeze_step"),
        ({"exchanged": "momentum", "freeze_step": 0}, "freeze_step"),
        ({"exchanged": "momentum", "freeze_step": 3, "normalize_grad": True}, "normalize_grad"),
        ({"exchanged": "momentum", "freeze_step": 3, "maximize": True}, "maximize"),
        ({"exchanged": "momentum", "freeze_step": 3, "memory": "none"}, "memory"),
        ({"exchanged": "momentum", "freeze_step": 3, "start_step": 4}, "start_step=4 lies behind freeze_step=3"),
        ({"exchanged": "momentum", "freeze_step": 3, "compressor": "none"}, "needs a compressor"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientExchange().configure([CompressedAdam(make_model().parameters(), **arguments)])


@pytest.mark.parametrize(
    ("group", "arguments", "message"),
    [
        ({"update": "sgd"}, {}, "update"),
        ({"betas": (1.5, 2.0)}, {}, "betas"),
        ({"normalize_grad": True}, {"exchanged": "momentum", "freeze_step": 3}, "normalize_grad"),
        ({"maximize": True}, {"exchanged": "momentum", "freeze_step": 3}, "maximize"),
    ],
)
def test_bad_settings_of_a_group_are_named(group: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedAdam([{"params": make_model().parameters(), **group}], **arguments)


def test_the_state_of_torchs_adam_goes_on() -> None:
    models = make_model(torch.float64), make_model(torch.float64)
    before, after = torch.optim.AdamW(models[0].parameters(), **ADAM, eps=1e-6), None
    for step, (batch,) in enumerate(make_batches(1, 6, torch.float64)):
        if step == 3:
            models[1].load_state_dict(models[0].state_dict())
            after = CompressedAdam(models[1].parameters(), update="adam")
            after._attached = True  # says nothing about being dense
            after.load_state_dict(before.state_dict())
        for model, optimizer in zip(models, (before, after), strict=True):
            if optimizer is not None:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    assert after is not None
    assert after.param_groups[0]["lr"] == ADAM["lr"]
    assert distance(*models) < 1e-12

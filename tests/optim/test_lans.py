"""LANS against a reference of fifteen lines in float64, in every corner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_compress.optim import LANS, lans, moments

CORNERS: list[dict[str, Any]] = [
    {},
    {"normalize_grad": False},
    {"grad_averaging": False},
    {"bias_correction": False},
    {"decoupled_weight_decay": False, "weight_decay": 0.1},
    {"decoupled_weight_decay": False, "normalize_grad": False, "weight_decay": 0.1},
    {"weight_decay": 0.0},
    {"trust_clip": (0.5, 2.0)},
    {"maximize": True, "weight_decay": 0.3},
    {"betas": (0.0, 0.5), "eps": 1e-3, "lr": 0.1},
]


def reference(x: Tensor, gradients: list[Tensor | None], **of_group: Any) -> Tensor:
    """arXiv 2006.13484, algorithm 2, in float64."""
    o = {**LANS([torch.zeros(1)]).defaults, **of_group}
    x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    (b1, b2), eps, decay = o["betas"], o["eps"], o["weight_decay"]
    b3 = 1 - b1 if o["grad_averaging"] else 1.0
    decoupled = decay if o["decoupled_weight_decay"] else 0.0
    for t, raw in enumerate((gradient for gradient in gradients if gradient is not None), start=1):
        g = raw.double() * (-1 if o["maximize"] else 1)
        normal = g / (g.norm() + eps) if o["normalize_grad"] and g.norm() != 0 else g
        g = normal + (decay - decoupled) * x
        m, v = b1 * m + b3 * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1.0, 1.0)
        den = (v / c2).sqrt() + eps
        u, w = m / c1 / den + decoupled * x, g / den + decoupled * x
        phi = x.norm().clamp(*o["trust_clip"]) if o["trust_clip"] else x.norm()
        q = [phi / d.norm() if x.norm() != 0 and d.norm() != 0 else 1.0 for d in (u, w)]
        x = x - o["lr"] * (b1 * q[0] * u + b3 * q[1] * w)
    return x


def make_tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Matrices, one that is not contiguous, a bias, a scalar, and a tensor of zeros."""
    torch.manual_seed(0)
    tensors = [torch.randn(40, 30), torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(7)]
    return [t.to(dtype) for t in (*tensors, torch.tensor(1.5), torch.zeros(6))]


def make_gradients(steps: int = 4) -> list[list[Tensor | None]]:
    """For every step a gradient of every tensor: also zeros, none, and one that is zero at first."""
    generator = torch.Generator().manual_seed(1)
    result: list[list[Tensor | None]] = []
    for step in range(steps):
        of_step: list[Tensor | None] = [torch.randn(t.shape, generator=generator) for t in make_tensors()]
        if step == 1:
            of_step[0] = None
        if step in (0, 2):
            of_step[2] = torch.zeros(7)
        result.append(of_step)
    return result


def train(tensors: list[Tensor], gradients: list[list[Tensor | None]], optimizer: LANS) -> list[Tensor]:
    for of_step in gradients:
        for tensor, gradient in zip(tensors, of_step, strict=True):
            tensor.grad = None if gradient is None else gradient.to(tensor.dtype)
        optimizer.step()
    return tensors


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes compiled code for every tensor that it serves, or for none."""
    if way == "compiled":
        monkeypatch.setattr(moments, "_CPU_NUMEL", 1)  # every tensor comes alone: one is not contiguous
    else:
        monkeypatch.setattr(lans._Compiled, "serves", lambda _: False)
    if way == "foreach in pieces":
        monkeypatch.setattr(moments, "_CPU_NUMEL", 100)


@pytest.mark.parametrize("options", CORNERS, ids=str)
@pytest.mark.parametrize("way", ["compiled", "foreach", "foreach in pieces"])
def test_equals_the_reference(options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    tensors, gradients = make_tensors(), make_gradients()
    train(tensors, gradients, LANS(tensors, **options))
    for i, (tensor, start) in enumerate(zip(tensors, make_tensors(), strict=True)):
        expected = reference(start, [of_step[i] for of_step in gradients], **options)
        assert torch.allclose(tensor.double(), expected, rtol=2e-6, atol=1e-6), i
        assert not torch.equal(tensor, start)


def test_a_tensor_without_any_gradient_and_decay_stays() -> None:
    tensor = torch.ones(5)
    tensor.grad = torch.zeros(5)
    LANS([tensor], weight_decay=0.0).step()
    assert torch.equal(tensor, torch.ones(5))


@pytest.mark.parametrize("way", ["compiled", "foreach"])
def test_double_precision_is_exact(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    tensors, gradients = make_tensors(torch.float64), make_gradients()
    train(tensors, gradients, LANS(tensors))
    for i, start in enumerate(make_tensors(torch.float64)):
        expected = reference(start, [of_step[i] for of_step in gradients])
        assert torch.allclose(tensors[i], expected, rtol=1e-12, atol=1e-12), i


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_keep_wide_moments_across_a_checkpoint(dtype: torch.dtype) -> None:
    tensors, gradients = make_tensors(dtype), make_gradients(6)
    optimizer = LANS(tensors, lr=0.1)
    train(tensors, gradients[:3], optimizer)
    copies = [t.detach().clone() for t in tensors]
    resumed = LANS(copies, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in ((optimizer, tensors), (resumed, copies)):
        assert {one.state[t][name].dtype for t in other for name in moments.MOMENTS} == {torch.float32}
        train(other, gradients[3:], one)
    assert resumed.param_groups[0]["lr"] == 0.1
    for one, other in zip(tensors, copies, strict=True):
        assert torch.equal(one, other)
        assert all(
            torch.equal(optimizer.state[one][name], resumed.state[other][name]) for name in ("exp_avg", "exp_avg_sq")
        )


def test_groups_schedules_and_tensor_rates() -> None:
    tensors, gradients = make_tensors(), make_gradients()
    groups = [{"params": tensors[:2]}, {"params": tensors[2:], "weight_decay": 0.0, "lr": torch.tensor(0.02)}]
    optimizer = LANS(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    for of_step in gradients:
        train(tensors, [of_step], optimizer)
        schedule.step()
    for i, start in enumerate(make_tensors()):
        options = {"lr": 0.01} if i < 2 else {"lr": 0.02, "weight_decay": 0.0}
        expected = reference(start, [of_step[i] for of_step in gradients], **options)
        assert torch.allclose(tensors[i].double(), expected, rtol=2e-6, atol=1e-6), i


def test_closure_and_loss_scaler() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = LANS(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((2, 4), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["step"] == 1
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lr", -1.0),
        ("lr", "0.1"),
        ("lr", float("nan")),
        ("betas", (1.0, 0.9)),
        ("betas", 0.9),
        ("eps", -1.0),
        ("weight_decay", -1.0),
        ("trust_clip", (2.0, 1.0)),
        ("trust_clip", (-1.0, 1.0)),
    ],
)
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        LANS([torch.zeros(1)], **{argument: value})
    with pytest.raises(ValueError, match=argument):
        LANS([{"params": [torch.zeros(1)], argument: value}])


def test_unsupported_tensors_are_named() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        LANS(embedding.parameters()).step()
    number = torch.ones(2, dtype=torch.complex64)
    number.grad = torch.ones_like(number)
    with pytest.raises(ValueError, match="complex"):
        LANS([number]).step()

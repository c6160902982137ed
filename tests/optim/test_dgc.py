"""Deep Gradient Compression: momentum correction, clipping, masking, warm-up, and the optimizer that goes with them."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import (
    DenseRule,
    DensityWarmup,
    ErrorFeedback,
    GradientExchange,
    MomentumCorrection,
    TopK,
    register_comm_hook,
)
from lightning_compress.exchange.correction import LocalClip
from lightning_compress.optim import DGCSGD, CompressedAdam
from lightning_compress.optim.compatibility import require_compatible
from lightning_compress.testing import SimulatedExchange, simulate
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}


def train_simulated(
    optimizer: type[torch.optim.Optimizer], sgd: dict[str, Any], steps: int = 15, **settings: Any
) -> nn.Module:
    model = make_model()
    exchange = SimulatedExchange(model, 3, **settings)
    simulate(model, optimizer(model.parameters(), **sgd), loss_of, make_batches(3, steps), exchange)
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("exchange", ["two_way", "all_gather"])
def test_at_density_1_it_is_momentum_sgd(nesterov: bool, exchange: str) -> None:
    expected = train_simulated(torch.optim.SGD, {**SGD, "nesterov": nesterov}, compressor="none")
    correction = MomentumCorrection(0.9, nesterov, factor_masking=False)
    settings = {
        "compressor": TopK(1.0, dtype="fp32"),
        "dense": "fp32",
        "memory": correction,
        "exchange": exchange,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all_gather at density 1 cannot pay, and says so
        model = train_simulated(DGCSGD, {**SGD, "nesterov": nesterov}, **settings)
    assert distance(model, expected) < 2e-5
    assert distance(expected, make_model()) > 1e-2


def test_dense_steps_of_the_warmup_are_momentum_sgd() -> None:
    expected = train_simulated(torch.optim.SGD, SGD, compressor="none")
    settings = {"compressor": TopK(0.01), "memory": MomentumCorrection(0.9), "start_step": 15}
    assert distance(train_simulated(DGCSGD, SGD, **settings), expected) < 2e-5


def reference_step(g: Tensor, u: Tensor, v: Tensor, k: int, mu: float, nesterov: bool) -> Tensor:
    """Lin et al. 2017, algorithm 4 with momentum correction and factor masking, one tensor, one rank."""
    if nesterov:
        u.add_(g).mul_(mu)
        v.add_(u + g)
    else:
        u.mul_(mu).add_(g)
        v.add_(u)
    mask = torch.zeros_like(v, dtype=torch.bool)
    mask[v.abs().topk(k).indices] = True
    sent = torch.where(mask, v, 0.0)
    v[mask] = 0.0
    u[mask] = 0.0
    return sent


def exchange_on_one_rank(nesterov: bool, block_size: int | None) -> list[Tensor]:
    model = nn.Linear(200, 20, bias=False)
    ddp = DistributedDataParallel(model)
    compressor = TopK(0.02, block_size=block_size, dtype="fp32")
    exchange = register_comm_hook(ddp, compressor, MomentumCorrection(0.9, nesterov))
    sent = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        model.zero_grad()
        (ddp(torch.zeros(1, 200)).sum() + (model.weight * torch.randn(20, 200, generator=generator)).sum()).backward()
        sent.append(model.weight.grad.flatten().clone())
    exchange.close()
    return sent


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("block_size", [None, 4096])
def test_one_rank_equals_the_reference(nesterov: bool, block_size: int | None) -> None:
    sent = run_ranks(exchange_on_one_rank, 1, nesterov, block_size)[0]
    u, v = torch.zeros(4000), torch.zeros(4000)
    generator = torch.Generator().manual_seed(0)
    for step in range(10):
        gradient = torch.randn(20, 200, generator=generator).flatten()
        expected = reference_step(gradient, u, v, 80, 0.9, nesterov)
        assert int((sent[step] != 0).sum()) == 80
        assert torch.allclose(sent[step], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masking", [False, True])
def test_velocity_sum_is_conserved_without_masking(masking: bool) -> None:
    """sum of applied updates + mean(v) + owner residual = sum over steps of the mean velocity."""
    torch.manual_seed(0)
    model = nn.Linear(300, 40, bias=False).double()
    exchange = SimulatedExchange(
        model, 3, TopK(0.05, block_size=256), MomentumCorrection(0.9, factor_masking=masking), "two_way"
    )
    applied, velocities, total = torch.zeros(40, 300).double(), [torch.zeros(40, 300).double()] * 3, 0.0
    size = 0.0
    for _ in range(8):
        gradients = [torch.randn(40, 300).double() for _ in range(3)]
        velocities = [0.9 * u + g for u, g in zip(velocities, gradients, strict=True)]
        total = total + torch.stack(velocities).mean(0)
        size += torch.stack(velocities).abs().sum()
        applied += exchange.mean([{"weight": g} for g in gradients])["weight"]
    states = [worker.state() for worker in exchange.workers]
    owed = torch.stack([s["worker"]["weight"][0] for s in states]).mean(0) + sum(s["owner"]["weight"] for s in states)
    error = float((applied + owed - total).abs().sum() / size)
    assert (error < 1e-12) is not masking


def test_clipping_scales_the_whole_local_gradient() -> None:
    model = make_model()
    free = SimulatedExchange(model, 2, TopK(1.0, dtype="fp32"), MomentumCorrection(0.0), "two_way", dense="fp32")
    clipped = SimulatedExchange(
        model, 2, TopK(1.0, dtype="fp32"), MomentumCorrection(0.0, clip_norm=0.5), "two_way", dense="fp32"
    )
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    norm = sum(p.numel() for p in model.parameters()) ** 0.5
    expected, mean = free.mean([gradient, gradient]), clipped.mean([gradient, gradient])
    # every rank's gradient / N is clipped to clip_norm / sqrt(N)
    factor = (0.5 / 2**0.5) / (norm / 2)
    for name, value in mean.items():
        assert torch.allclose(value, expected[name] * factor, rtol=1e-5), name


@pytest.mark.parametrize(
    ("norms", "skipped", "factor"),
    [
        ([4.0], False, 0.25),
        ([torch.inf], False, 1.0),
        ([4.0, torch.inf], False, 0.25),  # the last norm that says anything
        ([4.0, 8.0], True, 0.25),
        ([4.0], torch.tensor(True), 1.0),
    ],
)
def test_the_norm_of_a_step_that_counts_clips_the_next(norms: list[float], skipped: Any, factor: float) -> None:
    clip = LocalClip(MomentumCorrection(clip_norm=1.0, clip_norm_from="previous_step"), world_size=1)
    for norm in norms:
        clip.begin_step()
        clip.add([torch.tensor([norm])])
        clip.end_step(1.0)
    clip.settle(skipped)
    clip.begin_step()
    assert float(clip.factor) == factor


def train_with_scaler(clip: Any, overflow: bool) -> list[Tensor]:
    """Eight steps, of which a loss scaler skips the fourth, or seven."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    ddp = DistributedDataParallel(make_model())
    correction = MomentumCorrection(0.9, clip_norm=0.3, clip_norm_from=clip)
    exchange = register_comm_hook(ddp, TopK(0.1), correction, grad_scaler=scaler)
    optimizer = DGCSGD(ddp.parameters(), **SGD)
    for step, batches in enumerate(make_batches(2, 8)):
        if step == 3 and not overflow:
            continue
        optimizer.zero_grad()
        loss = loss_of(ddp, batches[dist.get_rank()])
        scaler.scale(loss * 1e38 if step == 3 and dist.get_rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    exchange.close()
    return [p.detach().clone() for p in ddp.parameters()]


def with_and_without_overflow() -> list[bool]:
    return [
        all(map(torch.equal, train_with_scaler(clip, True), train_with_scaler(clip, False)))
        for clip in ("this_step", "previous_step")
    ]


def test_a_step_that_the_scaler_skips_leaves_no_trace() -> None:
    assert run_ranks(with_and_without_overflow, 2) == [[True, True]] * 2


class Turns(nn.Module):
    """Two layers, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.layers[turn](x).square().sum()


def norms_of_turns() -> list[tuple[float, float]]:
    ddp = DistributedDataParallel(Turns(), find_unused_parameters=True)
    exchange = register_comm_hook(ddp, TopK(0.1), MomentumCorrection(0.9, clip_norm=1.0))
    found = []
    for step in range(4):
        x, layer = torch.randn(8, 40), ddp.module.layers[step % 2]
        layer.zero_grad()  # its own optimizer's: the other layer keeps its old gradient
        own = torch.autograd.grad(ddp.module(x, step % 2), list(layer.parameters()))
        ddp(x, step % 2).backward()
        found.append((exchange.state_dict()["norms"][0], float(torch.cat([g.flatten() for g in own]).norm())))
    exchange.close()
    return found


def accumulate() -> list[str | None]:
    """What two backwards before a step are told: one of them under no_sync, both synchronized, zeroed between."""
    ((batch,),) = make_batches(1, 1)
    said: list[str | None] = []
    for momenta in (False, True):
        ddp = DistributedDataParallel(make_model())
        optimizer: torch.optim.Optimizer = DGCSGD(ddp.parameters(), **SGD)
        if momenta:
            optimizer = CompressedAdam(ddp.parameters(), exchanged="momentum", freeze_step=1)
        memory: Any = "auto" if momenta else MomentumCorrection(0.9)
        exchange = register_comm_hook(ddp, TopK(0.1), memory, optimizer=optimizer)
        for way in ("step", "no_sync", "step", "zero_grad", "synchronized"):
            with ddp.no_sync() if way == "no_sync" else nullcontext():
                loss_of(ddp, batch).backward()
            if way == "step":
                optimizer.step()
            if way in ("step", "zero_grad"):
                optimizer.zero_grad()
        try:
            loss_of(ddp, batch).backward()
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
        exchange.close()
    return said


def on_one_rank() -> tuple[Any, Any]:
    return norms_of_turns(), accumulate()


def test_stale_gradients_are_neither_clipped_by_nor_added_to() -> None:
    ((norms, said),) = run_ranks(on_one_rank, 1)
    for found, own in norms:
        assert found == pytest.approx(own, rel=1e-5)
    assert all(message and "no_sync" in message for message in said)


def train_on_ranks(settings: dict[str, Any]) -> dict[str, Tensor]:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    exchange = register_comm_hook(model, **settings)
    optimizer = DGCSGD(model.parameters(), **SGD)
    for batches in make_batches(2, 15):
        optimizer.zero_grad()
        loss_of(model, batches[dist.get_rank()]).backward()
        optimizer.step()
    exchange.close()
    return dict(model.module.state_dict())


@pytest.mark.parametrize("clip", [None, "this_step", "previous_step"])
def test_real_processes_equal_the_simulator(clip: Any) -> None:
    correction = (
        MomentumCorrection(0.9) if clip is None else MomentumCorrection(0.9, clip_norm=1.0, clip_norm_from=clip)
    )
    warmup = DensityWarmup((1.0, 0.25, 0.0625), steps=3)
    settings = {"compressor": TopK(0.01), "memory": correction, "schedule": warmup, "exchange": "two_way"}
    model = make_model()
    simulated = SimulatedExchange(model, 2, **settings)
    simulate(model, DGCSGD(model.parameters(), **SGD), loss_of, make_batches(2, 15), simulated)
    ranks = run_ranks(train_on_ranks, 2, settings)
    for name, value in model.state_dict().items():
        if "running" not in name:  # batch statistics are each rank's own, DDP copies rank 0's before every forward
            assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert torch.equal(value, ranks[0][name]), name


def test_the_density_warms_up_and_starts_dense_where_sparse_does_not_pay() -> None:
    model = make_model()
    warmup = DensityWarmup((0.5, 0.3, 0.0625), steps=2)
    exchange = SimulatedExchange(model, 8, TopK(0.01), MomentumCorrection(0.9), "all_gather", schedule=warmup)
    # 28 bits per kept element of a whole block, 16 of them its value: an all-gather on 8 ranks pays below 2/8 x 32/28
    densities = [exchange.workers[0].density(step) for step in range(8)]
    assert densities == [1.0, 1.0, 1.0, 1.0, 0.0625, 0.0625, None, None]


def test_the_exchange_is_chosen_by_bytes() -> None:
    for world_size, name in ((2, "all_gather"), (3, "two_way"), (8, "two_way")):
        exchange = SimulatedExchange(make_model(), world_size, TopK(0.001), MomentumCorrection(0.9))
        topology = exchange.workers[0].settings.topology
        assert topology is not None
        assert topology.name == name


@pytest.mark.parametrize(
    ("optimizer", "accepted"),
    [
        (lambda p: DGCSGD(p, momentum=0.9), True),
        (lambda p: torch.optim.SGD(p, 0.1), False),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), False),
        (lambda p: torch.optim.SGD([{"params": p, "momentum": 0.5}], 0.1), False),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), False),
        (torch.optim.AdamW, False),
        (lambda p: DGCSGD(p, momentum=0.8), False),
        (lambda p: DGCSGD(p, momentum=0.9, nesterov=True), False),
    ],
)
def test_optimizers_that_would_apply_momentum_twice_are_refused(optimizer: Any, accepted: bool) -> None:
    chosen = optimizer(make_model().parameters())
    require_compatible(chosen, ErrorFeedback())
    if accepted:
        require_compatible(chosen, MomentumCorrection(0.9))
    else:
        with pytest.raises(ValueError, match=r"DGCSGD|same"):
            require_compatible(chosen, MomentumCorrection(0.9))


def test_without_momentum_plain_sgd_will_do() -> None:
    require_compatible(torch.optim.SGD(make_model().parameters(), 0.1, weight_decay=0.1), MomentumCorrection(0.0))


def step_with_adam() -> str:
    model = DistributedDataParallel(make_model())
    exchange = register_comm_hook(model, "topk", MomentumCorrection(0.9))
    loss_of(model, make_batches(2, 1)[0][0]).backward()
    with pytest.raises(ValueError, match="DGCSGD") as error:
        torch.optim.Adam(model.parameters()).step()
    exchange.close()
    torch.optim.Adam(model.parameters()).step()
    return str(error.value)


def test_plain_ddp_refuses_such_an_optimizer_at_its_first_step() -> None:
    assert all("DGCSGD" in message for message in run_ranks(step_with_adam, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MomentumCorrection(1.0), "momentum"),
        (lambda: MomentumCorrection(-0.1), "momentum"),
        (lambda: MomentumCorrection(clip_norm=-1.0), "clip_norm"),
        (lambda: MomentumCorrection(clip_norm_from="last"), "clip_norm_from"),  # type: ignore[arg-type]
        (lambda: DensityWarmup((0.5, 0.0)), "densities"),
        (lambda: DensityWarmup((0.1, 0.2)), "rise"),
        (lambda: DensityWarmup((1.5,)), "densities"),
        (lambda: DensityWarmup(()), "densities"),
        (lambda: DensityWarmup(epochs=1, steps=1), "not both"),
        (lambda: DensityWarmup(steps=0), "steps"),
        (lambda: DensityWarmup().stage_steps(None), "steps="),
        (lambda: GradientExchange("quantize", schedule=DensityWarmup()), "ratio"),
        (lambda: GradientExchange("none", MomentumCorrection()), "compressor"),
        (lambda: DGCSGD(make_model().parameters(), momentum=1.0), "momentum"),
        (lambda: DGCSGD(make_model().parameters(), lr=-1.0), "lr"),
        (lambda: DGCSGD(make_model().parameters(), lr="0.1"), "lr"),  # type: ignore[arg-type]
        (lambda: DGCSGD(make_model().parameters(), lr=float("nan")), "lr"),
        (lambda: DGCSGD(make_model().parameters(), weight_decay=-1.0), "weight_decay"),
        (lambda: DGCSGD([{"params": make_model().parameters(), "momentum": 1.5}]), "momentum"),
        (lambda: DGCSGD([{"params": make_model().parameters(), "nesterov": True}], momentum=0.0), "nesterov"),
    ],
)
def test_bad_settings_name_the_argument(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_dgcsgd_alone_is_sgd() -> None:
    one, other = make_model(), make_model()
    optimizers = [
        DGCSGD(one.parameters(), **SGD, nesterov=True),
        torch.optim.SGD(other.parameters(), **SGD, nesterov=True),
    ]
    for (batch,) in make_batches(1, 5):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert distance(one, other) < 1e-6


def test_small_tensors_get_their_momentum_after_the_exchange() -> None:
    model = make_model()
    SimulatedExchange(model, 2, TopK(0.01), MomentumCorrection(0.9), dense=DenseRule(patterns=("5.weight",)))
    corrected = {name for name, p in model.named_parameters() if p.lightning_compress_corrected}  # type: ignore[attr-defined]
    assert corrected == {"0.weight", "2.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_clipped_does_not_show_how_ddp_cut_the_buckets(dtype: torch.dtype) -> None:
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    clipped = []
    for bucket in (5000, 3000, 1700, 900, 333, 90, 17, 7):
        clip = LocalClip(MomentumCorrection(0.9, clip_norm=1.0), world_size=3)
        clip.begin_step()
        for buffer in gradient.split(bucket):
            clip.add(buffer)
        clip.end_step(1.0)
        clipped.append(gradient * clip.factor)
    assert all(torch.equal(clipped[0], other) for other in clipped)
    torch.testing.assert_close(clipped[0].norm(), torch.tensor(3**0.5, dtype=dtype))

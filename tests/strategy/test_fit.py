"""Training under Lightning's Trainer, on real ranks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_compress import CompressedStrategy
from lightning_compress.presets import PRESETS
from tests.exchange.training import content, residuals
from tests.ranks import run_ranks
from tests.strategy.training import Classifier, fitted, make_trainer


def fit_every_preset() -> dict[str, tuple[str, dict[str, Any]]]:
    found = {}
    for preset in PRESETS:
        if preset != "_dgc":  # needs an optimizer of its own, and has tests of its own
            trainer, parameters = fitted(f"compressed{preset}", max_steps=3)
            found[preset] = parameters, trainer.strategy.exchange.stats()
    return found


def test_every_name_compresses_on_cpu_and_keeps_ranks_equal() -> None:
    first, second = run_ranks(fit_every_preset, 2)
    for preset, (parameters, stats) in first.items():
        assert parameters == second[preset][0], preset
        assert stats["steps"] == 3
        assert 0 < stats["bytes_sent"] < 0.6 * stats["dense_bytes"], preset
        assert stats["encode_seconds"] > 0
    # "compressed" is "compressed_quantize"
    assert len({parameters for parameters, _ in first.values()}) == len(first) - 1


def fit_as_ddp(options: dict[str, Any], ddp: dict[str, Any]) -> tuple[str, str]:
    return fitted(pl.strategies.DDPStrategy(**ddp), **options)[1], fitted(CompressedStrategy("none", **ddp), **options)[
        1
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "ddp"),
    [
        ({}, {"bucket_cap_mb": 0.05}),
        ({"accumulate_grad_batches": 4}, {}),
        ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"gradient_as_bucket_view": True}),
    ],
)
def test_none_is_lightnings_ddp_bit_for_bit(ranks: int, options: dict[str, Any], ddp: dict[str, Any]) -> None:
    for expected, found in run_ranks(fit_as_ddp, ranks, options, ddp):
        assert found == expected


def accumulate(batches: int) -> list[dict[str, Any]]:
    found = []
    for every in (1, 4):
        trainer, _ = fitted("compressed", Classifier(batches), accumulate_grad_batches=every)
        found.append({**trainer.strategy.exchange.stats(), "global_step": trainer.global_step})
    return found


def test_accumulation_sends_once_per_optimizer_step() -> None:
    for every, fourth in run_ranks(accumulate, 2, 8):
        assert (every["steps"], fourth["steps"]) == (every["global_step"], fourth["global_step"]) == (8, 2)
        assert fourth["bytes_sent"] == pytest.approx(
            every["bytes_sent"] / 4, rel=0.01
        )  # first steps have other buckets


def accumulate_on_a_static_graph() -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for static in (False, True):
        model = Classifier(12)
        strategy = CompressedStrategy("none", static_graph=static, bucket_cap_mb=0.05)
        trainer, _ = fitted(strategy, model, accumulate_grad_batches=3)
        assert trainer.global_step == 4
        found.append([p.detach() for p in model.parameters()])
    return found[0], found[1]


def test_accumulation_works_on_a_static_graph() -> None:
    # stock DDP fails: it learns the graph in the first backward, which must not be one without synchronization
    for expected, found in run_ranks(accumulate_on_a_static_graph, 2):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def norms_at_the_optimizer(clip: float) -> list[float]:
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        squares = [p.grad.square().sum() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(squares).sum().sqrt()))

    handle = register_optimizer_step_post_hook(note)
    fitted("compressed", gradient_clip_val=clip)
    handle.remove()
    return norms


def test_gradient_clip_val_acts_on_the_exchanged_gradient() -> None:
    free, other_free = run_ranks(norms_at_the_optimizer, 2, 1e9)
    clipped, other_clipped = run_ranks(norms_at_the_optimizer, 2, 0.5)
    assert free == other_free
    assert clipped == other_clipped
    assert min(free) > 0.5
    assert clipped == pytest.approx([0.5] * 8, rel=1e-4)


class Gan(pl.LightningModule):
    """Manual optimization of two networks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(100, 90), nn.ReLU(), nn.Linear(90, 100))
        self.judge = nn.Sequential(nn.Linear(100, 90), nn.ReLU(), nn.Linear(90, 1))
        self.stale = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, _ = batch
        for optimizer, part in zip(self.optimizers(), (self.generator, self.judge), strict=True):
            others = [p for p in self.parameters() if all(p is not q for q in part.parameters())]
            before = content(others)
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            fake = self.judge(self.generator(x)).mean()
            self.manual_backward(-fake if part is self.generator else fake - self.judge(x).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.stale += content(others) != before

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.judge)]

    train_dataloader = Classifier.train_dataloader
    batches = 8


def fit_gan() -> tuple[str, str, int, int]:
    model = Gan()
    before = content(model.parameters())
    trainer, after = fitted("compressed_find_unused_parameters_true", model)
    return before, after, model.stale, trainer.strategy.exchange.stats()["steps"]


def test_manual_optimization_with_two_optimizers() -> None:
    first, second = run_ranks(fit_gan, 2)
    assert first == second
    before, after, stale, steps = first
    assert before != after
    assert stale == 0
    assert steps == 16


class HalfUsed(Classifier):
    def __init__(self) -> None:
        super().__init__(4)
        self.unused = nn.Linear(40, 40)


def fit_half_used(strategy: str) -> tuple[str, str, str]:
    model = HalfUsed()
    before = content(model.unused.parameters())
    said = ""
    try:
        fitted(strategy, model)
    except RuntimeError as error:
        said = str(error)
    return said, before, content(model.unused.parameters())


def test_the_error_of_unused_parameters_names_our_variant() -> None:
    for said, *_ in run_ranks(fit_half_used, 2, "compressed"):
        assert "strategy='compressed_find_unused_parameters_true'" in said
        assert "'ddp_find" not in said


def test_that_variant_trains_and_leaves_them_alone() -> None:
    for said, before, after in run_ranks(fit_half_used, 2, "compressed_find_unused_parameters_true"):
        assert said == ""
        assert before == after


class Overflowing(Classifier):
    """A loss whose scaled gradient overflows on the last rank in the third batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        overflows = batch_idx == 2 and dist.get_rank() == dist.get_world_size() - 1
        return loss * 1e37 if overflows else loss


class Scales(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def fit_in_float16() -> tuple[list[float], str, bool, bool]:
    scales = Scales()
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model = Overflowing()
    trainer, parameters = fitted("compressed", model, plugins=[precision], callbacks=[scales])
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    return (
        scales.seen,
        parameters,
        finite,
        all(m.isfinite().all() for m in residuals(trainer.strategy.exchange).values()),
    )


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    first, second = run_ranks(fit_in_float16, 2)
    assert first == second
    scales, _, finite, finite_memories = first
    assert scales == [1024, 1024, 512, 512, 512, 512, 512, 512]
    assert finite
    assert finite_memories


def residuals_under_scale(init_scale: float) -> float:
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))
    trainer, _ = fitted("compressed", plugins=[precision])
    return float(torch.stack([m.norm() for m in residuals(trainer.strategy.exchange).values()]).norm())


def test_residuals_are_in_the_units_of_the_gradient_whatever_the_loss_scale() -> None:
    small, large = run_ranks(residuals_under_scale, 2, 2.0**6)[0], run_ranks(residuals_under_scale, 2, 2.0**10)[0]
    assert small == pytest.approx(large, rel=0.1)
    assert small > 0


def fit_precisions() -> dict[str, tuple[str, set[torch.dtype]]]:
    found = {}
    for precision in ("bf16-mixed", "bf16-true", "64-true", "16-true"):
        trainer, parameters = fitted("compressed", precision=precision)
        found[precision] = parameters, {m.dtype for m in residuals(trainer.strategy.exchange).values()}
    return found


def test_precisions_train_and_remember_in_their_format() -> None:
    first, second = run_ranks(fit_precisions, 2)
    assert first == second
    wide = {"bf16-mixed": torch.float32, "bf16-true": torch.float32, "64-true": torch.float64, "16-true": torch.float32}
    assert {precision: memories for precision, (_, memories) in first.items()} == {p: {d} for p, d in wide.items()}


def our_threads() -> int:
    return sum(t.name.startswith("lightning-compress") for t in threading.enumerate())


def fit_test_fit() -> dict[str, Any]:
    model, found = Classifier(), {}
    trainer = make_trainer("compressed")
    exchange = trainer.strategy.exchange
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(model)
    found["idle"] = exchange.stats()["steps"], exchange.state_dict()["worker"], our_threads()
    trainer.fit(model)
    first = residuals(exchange)
    found["first"] = exchange.stats()["steps"], our_threads()
    trainer.test(model)
    found["kept over test"] = all(first[n].equal(m) for n, m in residuals(exchange).items())
    trainer.fit_loop.max_epochs = 2
    seen = []

    class Before(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
            seen.append(all(first[n].equal(m) for n, m in residuals(exchange).items()))

    trainer.callbacks.append(Before())
    trainer.fit(model)
    found["kept over fit"] = list(seen)
    found["second"] = exchange.stats()["steps"], our_threads()
    found["parameters"] = content(model.parameters())
    trainer.fit_loop.max_epochs = 3
    other = Classifier()
    trainer.callbacks.pop()

    class Empty(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
            seen.append(residuals(exchange))

    trainer.callbacks.append(Empty())
    trainer.fit(other)
    found["another model"] = seen[-1]
    return found


def test_fit_test_fit() -> None:
    first, second = run_ranks(fit_test_fit, 2)
    assert first == second
    assert first["idle"] == (0, {}, 0)
    assert first["first"] == (8, 0)
    assert first["kept over test"]
    assert first["kept over fit"] == [True]
    assert first["second"] == (16, 0)
    assert first["another model"] == {}


def two_trainers() -> list[tuple[str, int]]:
    """Two Trainers in one program, as in a script that tries settings."""
    return [(fitted(s)[1], fitted(s)[0].strategy.exchange.stats()["steps"]) for s in ("compressed", "compressed_bf16")]


def test_two_trainers_in_one_program() -> None:
    first, second = run_ranks(two_trainers, 2)
    assert first == second
    assert [steps for _, steps in first] == [8, 8]


def fit_alone() -> tuple[str, str, dict[str, Any]]:
    plain = fitted("ddp")[1]
    trainer, parameters = fitted("compressed")
    return plain, parameters, trainer.strategy.exchange.stats()


def test_one_device_is_a_pass_through() -> None:
    ((plain, parameters, stats),) = run_ranks(fit_alone, 1)
    assert parameters == plain
    assert (stats["steps"], stats["bytes_sent"], stats["ratio"]) == (16, 0, 1.0)


def fit_compiled(backend: str) -> tuple[str, str, dict[str, Any]]:
    model = Classifier(3)
    trainer = make_trainer(CompressedStrategy("quantize"))
    trainer.fit(torch.compile(model, backend=backend))
    return (
        fitted(CompressedStrategy("quantize"), Classifier(3))[1],
        content(model.parameters()),
        trainer.strategy.exchange.stats(),
    )


INDUCTOR = pytest.mark.skipif(
    "TEST_INDUCTOR" not in os.environ, reason="compiles C++ for most of a minute: TEST_INDUCTOR=1 pytest -k inductor"
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_a_compiled_module_still_exchanges(backend: str) -> None:
    first, second = run_ranks(fit_compiled, 2, backend)
    assert first[1] == second[1]
    stats = first[2]
    assert stats["steps"] == 3
    assert stats["bytes_sent"] < stats["dense_bytes"] / 4
    if backend == "eager":
        assert first[0] == first[1]

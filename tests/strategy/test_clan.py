"""CompressedAdam on two real ranks: under Lightning's Trainer, in plain DDP, resumed, and under a loss scaler."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressedStrategy, TopK, register_comm_hook
from lightning_compress.optim import CompressedAdam
from lightning_compress.testing import SimulatedExchange, simulate
from tests.exchange.training import content, residuals
from tests.models import loss_of, make_batches, make_model
from tests.ranks import run_ranks
from tests.strategy.training import make_trainer

STEPS, SAVED_AT = 10, 6
MODES: dict[str, dict[str, Any]] = {
    "gradient": {"lr": 0.01},
    "momentum": {"lr": 3e-3, "update": "adam", "exchanged": "momentum", "freeze_step": 4, "start_step": 2},
}


class Trained(pl.LightningModule):
    """The small model of the other tests, with a batch for every step and rank."""

    def __init__(self, **adam: Any) -> None:
        super().__init__()
        self.model, self.adam = make_model(), adam

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, make_batches(2, STEPS)[batch_idx][self.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return CompressedAdam(self.parameters(), **self.adam)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(2 * STEPS)))


class Save(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def parameters_of(module: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def trained(mode: str, folder: str) -> dict[str, Any]:
    """Unbroken, and resumed in the middle of an epoch, after the momenta have begun."""
    path = f"{folder}/{mode}.ckpt"
    unbroken = Trained(**MODES[mode])
    trainer = make_trainer("compressed_clan", max_steps=STEPS, callbacks=[Save(path)])
    trainer.fit(unbroken)
    resumed = Trained(**MODES[mode])
    make_trainer("compressed_clan", max_steps=STEPS).fit(resumed, ckpt_path=path)
    state = trainer.optimizers[0].state[unbroken.model[0].weight]
    return {
        "unbroken": parameters_of(unbroken),
        "resumed": parameters_of(resumed),
        "stats": trainer.strategy.exchange.stats(),
        "frozen_at": state.get("frozen_at"),
    }


def accumulated() -> tuple[int, int, int]:
    model = Trained(**MODES["momentum"])
    trainer = make_trainer("compressed", accumulate_grad_batches=2)
    trainer.fit(model)
    frozen_at: int = trainer.optimizers[0].state[model.model[0].weight]["frozen_at"]
    return trainer.strategy.exchange.stats()["steps"], trainer.global_step, frozen_at


def refused(strategy: Any, options: dict[str, Any], **adam: Any) -> str:
    trainer = make_trainer(strategy, **{"max_steps": 1, **options})
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is checked by the test
        trainer.fit(Trained(**adam))
    return str(error.value)


class Unfreeze(pl.Callback):
    """The first layer is trained late."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.model[0].requires_grad_(False)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.model[0].requires_grad_(trainer.global_step >= 6)


def on_a_rank(folder: str) -> dict[str, Any]:
    return {
        **{mode: trained(mode, folder) for mode in MODES},
        # here, with one thread: the gradient of a bias before batch norm is nothing but rounding
        "simulated": {mode: simulated(mode) for mode in MODES},
        "accumulated": accumulated(),
        "clipped": refused("compressed", {"gradient_clip_val": 0.5}, **MODES["momentum"]),
        "unfrozen": refused("compressed", {"max_steps": STEPS, "callbacks": [Unfreeze()]}, **MODES["momentum"]),
        "both": refused(CompressedStrategy(TopK(0.1)), {}, compressor="onebit"),
    }


def simulated(mode: str) -> list[Tensor]:
    module = Trained(**MODES[mode])
    optimizer = module.configure_optimizers()
    exchange = SimulatedExchange(module, 2, exchange="two_way", optimizer=optimizer)
    simulate(module, optimizer, lambda m, batch: loss_of(m.model, batch), make_batches(2, STEPS), exchange)
    return parameters_of(module)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_ranks_equal_the_simulator_and_resume_exactly(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, str(tmp_path))
    for mode in MODES:
        found = first[mode]
        assert equal(found["unbroken"], second[mode]["unbroken"]), mode
        assert equal(found["unbroken"], first["simulated"][mode]), mode
        assert equal(found["unbroken"], found["resumed"]), mode
        assert not equal(found["unbroken"], parameters_of(Trained())), mode
        assert found["stats"]["last"]["dense_bytes"] > 20 * found["stats"]["last"]["bytes_sent"], mode
    assert (first["gradient"]["frozen_at"], first["momentum"]["frozen_at"]) == (None, 4)
    assert first["accumulated"] == second["accumulated"] == (5, 5, 4)
    for rank in (first, second):
        assert "exchanged='gradient'" in rank["clipped"]
        assert "'model.0.weight' has none" in rank["unfrozen"]
        assert "TopK(ratio=0.1" in rank["both"]
        assert "compressor='onebit'" in rank["both"]


def trained_in_ddp(freeze_step: int, overflow: int | None, skip: int | None) -> tuple[str, bool]:
    """Plain DDP; ``overflow`` is a step that a loss scaler skips, ``skip`` one that is left out without a scaler."""
    scaler = None if overflow is None else torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    optimizer = CompressedAdam(ddp.parameters(), **{**MODES["momentum"], "freeze_step": freeze_step})
    exchange = register_comm_hook(ddp, grad_scaler=scaler, optimizer=optimizer)
    untouched = True
    for step, batches in enumerate(make_batches(2, STEPS)):
        if step == skip:
            continue
        optimizer.zero_grad()
        loss = loss_of(ddp, batches[dist.get_rank()])
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        before = [copy.deepcopy(value) for value in (parameters_of(ddp), residuals(exchange))]
        scaler.scale(loss * 1e38 if step == overflow and dist.get_rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == overflow:
            after = residuals(exchange)
            untouched = equal(before[0], parameters_of(ddp))
            if step != freeze_step:  # which drops the residuals of gradients, come what may
                untouched &= all(torch.equal(value, after[name]) for name, value in before[1].items())
    # batch statistics count the skipped step too, but only evaluation reads them
    found = content([*ddp.parameters(), *residuals(exchange).values()])
    exchange.close()
    return found, untouched


def on_one_rank() -> tuple[bool, str]:
    """A single rank freezes and codes too; afterwards the optimizer takes gradients again."""
    model, reference = make_model(), make_model()
    optimizers = [CompressedAdam(m.parameters(), **MODES["momentum"]) for m in (model, reference)]
    ddp = DistributedDataParallel(model)
    exchange = register_comm_hook(ddp, optimizer=optimizers[0])
    for (batch,) in make_batches(1, 6):
        optimizers[0].zero_grad()
        loss_of(ddp, batch).backward()
        optimizers[0].step()
    exchange.close()
    simulate(
        reference, optimizers[1], loss_of, make_batches(1, 6), SimulatedExchange(reference, 1, optimizer=optimizers[1])
    )
    same = equal(parameters_of(model), parameters_of(reference))
    before = optimizers[0].state[model[0].weight]["exp_avg"].clone()
    optimizers[0].step()
    m, gradient = optimizers[0].state[model[0].weight]["exp_avg"], model[0].weight.grad
    same &= torch.allclose(m, 0.9 * before + 0.1 * gradient)
    unused = DistributedDataParallel(make_model(), find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters") as error:
        register_comm_hook(unused, optimizer=CompressedAdam(unused.parameters(), **MODES["momentum"]))
    return same, str(error.value)


def test_one_rank_equals_the_simulator_and_unused_parameters_are_refused() -> None:
    ((same, message),) = run_ranks(on_one_rank, 1)
    assert same
    assert "every parameter on every rank" in message


def with_and_without_scaler(cases: list[tuple[int, int]]) -> list[tuple[tuple[str, bool], tuple[str, bool]]]:
    # the exchange counts a skipped step, so one before the switch delays the switch by one good step
    return [
        (trained_in_ddp(freeze, overflow, None), trained_in_ddp(freeze - (overflow < freeze), None, overflow))
        for freeze, overflow in cases
    ]


def test_a_skipped_step_leaves_no_trace() -> None:
    cases = [(5, 3), (5, 5), (5, 7)]  # before, at, and after the switch
    for rank in run_ranks(with_and_without_scaler, 2, cases):
        for case, ((found, untouched), (expected, _)) in zip(cases, rank, strict=True):
            assert untouched, case
            assert found == expected, case

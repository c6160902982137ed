"""Runs some steps of a LightningModule under DDP with a hook that exchanges nothing, and notes their times."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.profile import Profile, StepRecorder


@dataclass(frozen=True)
class Ranks:
    """The processes that were started together, as Lightning's cluster environments see them.

    Attributes:
        rank: This one.
        world_size: All of them.
        local: Those on this node.
    """

    rank: int = 0
    world_size: int = 1
    local: int = 1

    @property
    def nodes(self) -> Nodes:
        """Where they are."""
        return Nodes.of([rank // self.local for rank in range(self.world_size)])

    @classmethod
    def started(cls) -> Ranks:
        """Those of torchrun or SLURM; a process of its own otherwise."""
        for kind in (TorchElasticEnvironment, SLURMEnvironment):
            if kind.detect():
                environment = kind()
                tasks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
                world_size = environment.world_size()
                return cls(environment.global_rank(), world_size, min(int(tasks), world_size))
        return cls()


WARM_UP = 3
"""Steps before the measured ones: DDP rebuilds its buckets after the first."""
_NEVER = 10**6
"""Turns of optimizers, which schedules of learning rates want to know; the measured steps end it before."""
_ROOTS = ("pytorch_lightning", "lightning.pytorch")


def measure_training(
    model: Any,
    data: Any,
    steps: int,
    ranks: Ranks,
    ddp: dict[str, Any],
    trainer: dict[str, Any],
    advance: Callable[[str], None] = lambda _: None,
) -> Profile:
    """The profile of a model's steps. Its weights are put back afterwards; the process group stays.

    Args:
        model: A LightningModule of either import name.
        data: A LightningDataModule, a loader, one batch, or None for the model's own ``train_dataloader``.
        steps: To measure.
        ranks: Those that train together.
        ddp: Arguments of ``DDPStrategy``.
        trainer: Arguments of the Trainer: accelerator, precision, accumulate_grad_batches, ...
        advance: Told of each step.
    """
    root = _root_of(model)
    recording = type("Recording", (_Recording, root.Callback), {})(ranks.local, WARM_UP + steps, advance)
    weights = copy.deepcopy(model.state_dict())
    runner = root.Trainer(
        **trainer,
        devices=ranks.local,
        num_nodes=ranks.world_size // ranks.local,
        strategy=root.strategies.DDPStrategy(**ddp),
        max_steps=_NEVER,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recording],
    )
    try:
        if isinstance(data, root.LightningDataModule):
            runner.fit(model, datamodule=data)
        else:
            runner.fit(model, train_dataloaders=_loader(data, WARM_UP + steps))
    except SystemExit:  # the newer Lightning's answer to Ctrl-C, which tells nobody why
        if not runner.interrupted:
            raise
    finally:
        model.load_state_dict(weights)
    if runner.interrupted:
        raise KeyboardInterrupt
    profile: Profile = recording.profile()
    return profile


def _root_of(model: Any) -> Any:
    for name in _ROOTS:
        root = sys.modules.get(name)
        if root is not None and isinstance(model, root.LightningModule):
            return root
    raise ValueError(
        f"plan() measures training steps and needs a LightningModule, got {type(model).__name__}: "
        "put the model, its loss and its optimizer into one."
    )


def _loader(data: Any, steps: int) -> Any:
    """One batch becomes a loader that repeats it."""
    if isinstance(data, (torch.Tensor, tuple, list, dict)):
        return torch.utils.data.DataLoader([data] * steps, batch_size=None)  # type: ignore[arg-type]
    return data


@contextmanager
def group_left_as_found() -> Any:
    """A process group that was made inside is ended."""
    before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()


class _Recording:
    """The callback (mixed into the Callback of the import name in use)."""

    def __init__(self, ranks_per_host: int, steps: int, advance: Callable[[str], None]) -> None:
        self._ranks_per_host, self._steps, self._advance = ranks_per_host, steps, advance
        self._open, self._turns = False, 0

    def profile(self) -> Profile:
        return self._recorder.profile(WARM_UP, self._ranks_per_host)

    def on_train_start(self, trainer: Any, _model: Any) -> None:
        names = {id(p): name for name, p in trainer.strategy.model.module.named_parameters()}
        self._recorder = StepRecorder(trainer.strategy.root_device, names)
        trainer.strategy.model.register_comm_hook(self._recorder, exchange_nothing)

    def on_train_batch_start(self, *_: Any) -> None:
        if not self._open:
            self._recorder.begin()
            self._open = True

    def on_before_backward(self, *_: Any) -> None:
        self._recorder.backward()

    def on_after_backward(self, *_: Any) -> None:
        self._recorder.gradients()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self._turns:  # of optimizers: a batch may have several, or none if it is accumulated
            self._recorder.end()
            self._open, self._turns = False, trainer.global_step
            self._advance("training step")
            trainer.should_stop = self._recorder.steps == self._steps


# DDP inspects the signature: no string annotations
def exchange_nothing(recorder, bucket):  # type: ignore[no-untyped-def]
    """A communication hook whose state is a ``StepRecorder``: notes the bucket and leaves it as it is."""
    recorder.bucket(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

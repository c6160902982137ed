"""One host of ``auto.py``: trains with bf16 DDP before and after it trains with ``compressed_auto``.

Started by ``hosts.sh`` on every host, with the command line of ``step_time_rank.py``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.break_even import Training
from benchmarks.methods import SYNC_BUFFERS, bf16_hook
from benchmarks.step_time_rank import WARM_UP, join, leave
from benchmarks.workloads import WORKLOADS
from lightning_compress import AutoStrategy
from lightning_compress.planner.pilot import Pilot


class BF16DDP(DDPStrategy):
    """DDP with torch's bf16 hook, which Lightning itself registers on CUDA only."""

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, bf16_hook)


class Clock(pl.Callback):
    """Milliseconds of every step, and whether it counts: after the warm-up, or after the choice.

    Args:
        steps: To measure; the training stops after them.
    """

    def __init__(self, steps: int) -> None:
        self.ms: list[float] = []
        self._steps, self._waited = steps, 0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        ms = (time.perf_counter() - self._start) * 1e3
        pilot: Pilot | None = getattr(trainer.strategy, "pilot", None)
        # all ranks settle after the same step; the first steps after a switch warm up
        self._waited += pilot is None or pilot.settled
        if self._waited > WARM_UP:
            self.ms.append(ms)
        trainer.should_stop = len(self.ms) >= self._steps


def train(model: str, strategy: DDPStrategy, steps: int) -> list[float]:
    """Milliseconds of one strategy's steps, each as long as on its slowest host."""
    torch.manual_seed(0)
    workload, rank = WORKLOADS[model], dist.get_rank()
    batches = [workload.batch(torch.Generator().manual_seed(100 * rank + i)) for i in range(4)]
    clock = Clock(steps)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=dist.get_world_size(), strategy=strategy, max_epochs=1000,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Training(workload), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    slowest = torch.tensor(clock.ms)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [round(ms, 3) for ms in slowest.tolist()]


def main() -> None:
    """Trains, as one of the hosts."""
    args = join()
    os.environ["TORCHELASTIC_RUN_ID"] = "hosts"  # by this Lightning knows that the variables are torchrun's
    buffers = {SYNC_BUFFERS: args.broadcast_buffers}
    auto = AutoStrategy(**buffers)
    found: dict[str, list[float]] = {}
    # a machine that becomes slower or faster meanwhile does so for both
    for method in ("bf16", "compressed_auto", "bf16"):
        strategy = auto if method == "compressed_auto" else BF16DDP(**buffers)
        found.setdefault(method, []).extend(train(args.model, strategy, args.steps))
        print(method, flush=True)
    rows = [{"method": method, "steps_ms": ms} for method, ms in found.items()]
    choice = {"choice": str(auto.pilot.choice), "reason": auto.pilot.reason}
    leave([], [{**row, **choice} for row in rows], args.output)


if __name__ == "__main__":
    main()

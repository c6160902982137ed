"""Runs that end early, and checkpoints that cannot be written or read: nothing hangs, nothing whole is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_compress import CompressedStrategy
from lightning_compress.checkpoint import all_ranks_are_at, replaced_at_once
from lightning_compress.state import empty_state
from tests.exchange.training import content
from tests.ranks import run_ranks
from tests.strategy.training import Classifier, fitted, make_trainer

# --- files


def write_half(path: Path, wrong: BaseException) -> None:
    with replaced_at_once(path) as part:
        Path(part).write_text("hal")
        raise wrong


def test_what_a_crash_leaves_of_a_checkpoint_is_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("old")
    for wrong in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(wrong)) as error:
            write_half(path, wrong)
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
        assert path.read_text() == "old"
        if isinstance(wrong, OSError):
            assert "No space left on device" in str(error.value)
            assert str(path) in str(error.value)
    with replaced_at_once(path) as part:
        Path(part).write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def save_where_the_temporary_folder_is_another_file_system(folder: str) -> tuple[bool, str]:
    trainer, _ = fitted("compressed", max_steps=2)
    path = Path(folder) / "last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()

    def rename(source: Any, target: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def copy(source: Any, target: Any, **_: Any) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    original = os.rename, shutil.copy2
    os.rename, shutil.copy2 = rename, copy  # type: ignore[assignment]  # what shutil.move works with
    shutil.move.__kwdefaults__, shutil.move.__defaults__ = None, (copy,)
    with pytest.raises(OSError, match="older one is left as it was") as error:
        trainer.save_checkpoint(path)
    os.rename, shutil.copy2 = original
    return path.read_bytes() == before, str(error.value)


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    # Lightning writes to the temporary folder first and then moves, which copies between file systems
    ((whole, said),) = run_ranks(save_where_the_temporary_folder_is_another_file_system, 1, str(tmp_path))
    assert whole
    assert "No space left" in said


@pytest.mark.parametrize("damage", ["truncated", "empty", "noise", "directory entry"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.randn(1000)}, "optimizer_states": []}, path)
    good = path.read_bytes()
    bad = {
        "truncated": good[: len(good) // 2],
        "empty": b"",
        "noise": bytes(range(256)) * 8,
        "directory entry": good[:-40] + bytes(40),
    }
    path.write_bytes(bad[damage])
    with pytest.raises(RuntimeError, match=r"(?s)last\.ckpt cannot be read: .*Resume from an older one"):
        CompressedStrategy().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        CompressedStrategy().load_checkpoint(tmp_path / "no.ckpt")


# --- runs


class Ending(Classifier):
    """Ends in the given batch, counted over the epochs, on one rank or on all of them."""

    def __init__(self, how: str, at: int, batches: int = 4) -> None:
        super().__init__(batches)
        self.how, self.at = how, at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch * self.batches + batch_idx == self.at:
            if self.how == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.how == "full disk" and self.global_rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            elif self.how == "error" and self.global_rank == 1:
                raise ZeroDivisionError("in training_step")
            elif self.how == "ctrl-c" and self.global_rank == 1:
                raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def run_to_its_end(folder: str, how: str, at: int) -> None:
    """Trains until it is ended; writes how, after how many seconds, and leaves."""
    saves: list[pl.Callback] = [OnExceptionCheckpoint(folder, "interrupted")] if how != "full disk" else []
    if how != "sigterm":
        saves.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1))
    trainer = make_trainer("compressed", max_epochs=2, callbacks=saves, enable_checkpointing=True)
    said = "no error"
    start = time.monotonic()
    try:
        trainer.fit(Ending(how, at))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    end = {"said": said, "seconds": time.monotonic() - start, "step": trainer.global_step}
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(end))
    raise SystemExit(1)


def resume(path: str) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Classifier(4)
        make_trainer("compressed", max_epochs=2).fit(model, ckpt_path=path)
    return content(model.parameters()), [str(w.message) for w in caught if "residuals" in str(w.message)]


def undisturbed() -> str:
    return fitted("compressed", Classifier(4), max_epochs=2)[1]


def end(folder: Path, how: str, at: int) -> list[dict[str, Any]]:
    with pytest.raises(AssertionError, match="failed"):
        run_ranks(run_to_its_end, 2, str(folder), how, at, timeout=60)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("how", "at", "kept"),
    [("error", 4, True), ("ctrl-c", 5, False), ("sigterm", 3, True)],
)
def test_an_interrupted_run_saves_without_waiting_and_says_what_it_could_not_save(
    tmp_path: Path, how: str, at: int, kept: bool
) -> None:
    # the error comes right behind the checkpoint of step 4; SIGTERM stops all ranks at the end of their batch
    first, second = end(tmp_path, how, at)
    assert max(first["seconds"], second["seconds"]) < 30
    names = {"error": "ZeroDivisionError", "ctrl-c": "SystemExit", "sigterm": "SIGTERMException"}
    assert second["said"].startswith(names[how])
    assert first["said"].startswith("SIGTERMException" if how == "sigterm" else "RuntimeError: ")
    assert first["step"] == (at + 1 if how == "sigterm" else at)
    if how != "sigterm":
        assert f"step {first['step']}, bucket 0, rank 0" in first["said"]
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == first["step"]
    state = saved["lightning_compress"]
    assert state.get("interrupted", False) is not kept
    assert bool(state["worker"]) is kept
    (found, said), (other, _) = run_ranks(resume, 2, str(tmp_path / "interrupted.ckpt"))
    assert found == other
    assert (found == run_ranks(undisturbed, 2)[0]) is kept
    assert ["interrupted" in message for message in said] == [True] * (not kept)


def test_a_full_disk_ends_the_run_and_leaves_the_older_checkpoints(tmp_path: Path) -> None:
    first, second = end(tmp_path, "full disk", 4)
    assert max(first["seconds"], second["seconds"]) < 30
    assert first["said"].startswith("OSError: ")
    assert "step=8.ckpt" in first["said"]
    assert "older one is left" in first["said"]
    assert "no error" not in second["said"]
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["step=4.ckpt"]
    (found, _), _ = run_ranks(resume, 2, str(tmp_path / "step=4.ckpt"))
    assert found == run_ranks(undisturbed, 2)[0]


def test_a_module_without_a_trainer_is_not_interrupted() -> None:
    strategy = CompressedStrategy()
    strategy._lightning_module = (
        Classifier()
    )  # as save_checkpoint() after a fit and a test in spawned processes finds it
    strategy.barrier("Trainer.save_checkpoint")
    assert strategy.broadcast(3) == 3


def test_a_lost_rank_is_named_as_such_wherever_it_is_noticed() -> None:
    strategy = CompressedStrategy()
    strategy.exchange.load_state_dict({**empty_state(), "step": 7})
    gloo = "[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:29853: Connection reset by peer."
    for error, named in (
        (RuntimeError(gloo), True),
        (RuntimeError(f"lightning-compress: the exchange of step 7, bucket 0, rank 0 failed: {gloo}"), False),
        (RuntimeError("shapes do not match"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a data loader, a logger
    ):
        before = str(error)
        strategy.on_exception(error)
        assert before in str(error)
        assert ("at step 7 rank 0 has lost another rank" in str(error)) is named


def asked_twice() -> list[bool]:
    soon = timedelta(seconds=0.5)
    answers = [all_ranks_are_at(5), all_ranks_are_at(5 + dist.get_rank())]
    return [*answers, all_ranks_are_at(5, soon) if dist.get_rank() == 0 else False]


def test_a_rank_that_stood_here_before_does_not_count() -> None:
    # the last time, rank 1 does not come
    assert run_ranks(asked_twice, 2) == [[True, False, False]] * 2

"""Every way to start the ranks, and what happens when one of them ends early."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.strategy.scripts import run_script

pytestmark = pytest.mark.slow

FIT = """
    import sys
    import pytorch_lightning as pl
    import lightning_compress
    from tests.exchange.training import content
    from tests.strategy.training import QUIET, Classifier

    if __name__ == "__main__":
        for name in sys.argv[1:]:
            model = Classifier()
            before = content(model.parameters())
            trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=name, max_epochs=1, **QUIET)
            trainer.fit(model)
            stats = trainer.strategy.exchange.stats()
            print(f"<{name} rank {trainer.global_rank} changed {content(model.parameters()) != before} "
                  f"digest {content(model.parameters())} steps {stats['steps']} ratio {stats['ratio']:.1f}>")
"""


def reports(output: str, name: str) -> list[list[str]]:
    """What ranks have reported: [rank, changed, digest, steps, ratio] each, as words; their lines may be mixed up."""
    return [report.split()[1::2] for report in re.findall(f"<{name} (.*?)>", output)]


@pytest.mark.parametrize(
    "command", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")], ids=["popen", "torchrun"]
)
def test_a_script_trains_on_two_ranks(tmp_path: Path, command: tuple[str, ...]) -> None:
    code, output, _ = run_script(tmp_path, FIT, *command, arguments=("compressed",))
    assert code == 0, output
    (rank, changed, digest, steps, ratio), (other_rank, _, other_digest, *_) = sorted(reports(output, "compressed"))
    assert (rank, other_rank) == ("0", "1")
    assert digest == other_digest
    assert changed == "True"
    assert steps == "8"
    assert float(ratio) > 4


def test_spawn_and_fork_train_and_bring_the_weights_back(tmp_path: Path) -> None:
    names = ("compressed_spawn", "compressed_fork")
    code, output, _ = run_script(tmp_path, FIT, arguments=names)
    assert code == 0, output
    digests = set()
    for name in names:
        ((_, changed, digest, *_),) = reports(output, name)
        assert changed == "True"
        digests.add(digest)
    assert len(digests) == 1


FAULT = """
    import os, signal, sys
    import pytorch_lightning as pl
    import lightning_compress
    from lightning_compress.exchange import topology
    from tests.strategy.training import QUIET, Classifier

    class Faulty(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3 and self.global_rank == int(sys.argv[2]):
                if sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                def broken(*args, **kwargs):
                    raise ZeroDivisionError("a broken kernel")
                topology.BlockCodec.encode = broken
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        pl.Trainer(accelerator="cpu", devices=2, strategy="compressed", max_epochs=1, **QUIET).fit(Faulty())
"""


def left_behind(folder: Path, patience: float = 10.0) -> list[str]:
    """Command lines of processes that still run the script in ``folder``."""
    deadline = time.monotonic() + patience
    while True:
        found = [line for line in map(command_line, Path("/proc").glob("[0-9]*")) if str(folder) in line]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has just ended
        return ""


@pytest.mark.parametrize(
    ("fault", "on_rank", "said"),
    [
        ("killed", "1", "the exchange of step 3, bucket 0, rank 0 failed"),
        ("broken", "0", "the exchange of step 3, bucket 0, rank 0 failed: ZeroDivisionError: a broken kernel"),
    ],
)
def test_when_a_rank_fails_the_program_ends_soon_and_says_where(
    tmp_path: Path, fault: str, on_rank: str, said: str
) -> None:
    code, output, seconds = run_script(tmp_path, FAULT, arguments=(fault, on_rank))
    assert code != 0
    assert said in output
    assert seconds < 90  # most of it is starting
    assert left_behind(tmp_path) == []

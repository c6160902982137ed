"""The names are there for both of Lightning's import names, whatever is imported first."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from lightning_compress import registration
from tests.strategy.scripts import run_script

CHECK = """
    def check(root):
        registry = root.strategies.StrategyRegistry
        strategy = root.Trainer(accelerator="cpu", devices=2, strategy="compressed", logger=False).strategy
        assert isinstance(strategy, root.strategies.DDPStrategy), type(strategy).__mro__
        assert strategy.root == root.__name__
        assert {"compressed", "compressed_auto", "compressed_topk_spawn", "ddp"} <= set(registry.available_strategies())
"""

ORDERS = {
    "ours, pytorch_lightning, lightning": """
        import lightning_compress
        import sys
        assert not [name for name in sys.modules if "lightning" in name and "compress" not in name]
        import pytorch_lightning
        check(pytorch_lightning)
        import lightning.pytorch
        check(lightning.pytorch)
    """,
    "lightning, ours, pytorch_lightning": """
        import lightning.pytorch
        import lightning_compress
        check(lightning.pytorch)
        assert lightning_compress.CompressedStrategy.root == "lightning.pytorch"
        import pytorch_lightning
        check(pytorch_lightning)
        import pickle
        strategy = lightning_compress.lightning.CompressedStrategy("none")
        assert type(pickle.loads(pickle.dumps(strategy))) is lightning_compress.lightning.CompressedStrategy

        # a strategy of one import name given to the other's Trainer: Lightning shows what we say about it
        from lightning_compress.pytorch_lightning import CompressedStrategy
        try:
            lightning.pytorch.Trainer(accelerator="cpu", devices=2, strategy=CompressedStrategy(), logger=False)
        except ValueError as error:
            assert "for pytorch_lightning.Trainer" in str(error), error
            assert "lightning.pytorch.Trainer takes lightning_compress.lightning.CompressedStrategy" in str(error), error
        else:
            raise AssertionError("it was taken")

        import importlib
        importlib.reload(pytorch_lightning.strategies)  # registers anew without complaint
        importlib.reload(lightning_compress)
        check(pytorch_lightning)
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_names_are_registered_whatever_is_imported_first(tmp_path: Path, order: str) -> None:
    code, output, _ = run_script(tmp_path, dedent(CHECK) + dedent(ORDERS[order]))
    assert code == 0, output


def test_with_both_import_names_the_ambiguous_class_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = list(registration.MODULES.values())
    for imported, expected in (([0], ours[0]), ([1], ours[1]), ([], ours[0])):
        for i, name in enumerate(registration.MODULES):
            monkeypatch.delitem(sys.modules, name, raising=False)
            if i in imported:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert registration.module_in_use() == expected
    for name in registration.MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.warns(UserWarning, match=r"is that of pytorch_lightning.*lightning_compress\.lightning"):
        assert registration.module_in_use() == ours[0]


OTHER_ROOT = """
    import lightning.pytorch as pl
    import lightning_compress
    import torch
    from torch.utils.data import DataLoader

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(100, 100)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    if __name__ == "__main__":
        data = DataLoader(torch.randn(16, 100), batch_size=4)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="compressed_topk", max_epochs=1, logger=False, enable_checkpointing=False,
            callbacks=[lightning_compress.CompressionMonitor()],
        )
        trainer.fit(Model(), data)
        assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)
        assert trainer.strategy.exchange.stats()["ratio"] > 10
        assert trainer.callback_metrics["comm/total_bytes_sent"] > 0
        print("done")
"""


@pytest.mark.slow
def test_training_under_the_other_import_name(tmp_path: Path) -> None:
    code, output, _ = run_script(tmp_path, OTHER_ROOT)
    assert code == 0, output
    assert output.count("done") == 2
    assert output.count("compression ratio") == 1

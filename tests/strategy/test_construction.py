"""What a strategy refuses before any process starts, and that it travels to other processes."""

from __future__ import annotations

import itertools
import logging
import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

import lightning_compress
from lightning_compress import CompressedStrategy, ErrorFeedback, Quantize
from lightning_compress.exchange import runtime
from lightning_compress.presets import PRESETS
from tests.exchange.training import content
from tests.ranks import run_ranks
from tests.strategy.training import QUIET, Classifier, make_trainer


def hook(state: Any, bucket: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("arguments", "names_and_remedy"),
    [
        ({"ddp_comm_hook": hook}, ["ddp_comm_hook", "compressor=", "strategy='ddp'"]),
        ({"ddp_comm_state": object()}, ["ddp_comm_state", "compressor="]),
        ({"ddp_comm_wrapper": hook}, ["ddp_comm_wrapper", "compressor='fp16'"]),
        ({"model_averaging_period": 4}, ["model_averaging_period", "DDPStrategy"]),
        ({"mixed_precision": object()}, ["mixed_precision", "precision='bf16-mixed'"]),
        ({"compresor": "topk"}, ["'compresor'", "compressor"]),
        ({"process_group": object()}, ["'process_group'"]),
        ({"compressor": "topkk"}, ["compressor='topkk'"]),
        ({"exchange": "ring"}, ["exchange='ring'"]),
        ({"compressor": "topk", "exchange": "all_reduce"}, ["exchange='all_reduce'", "two_way"]),
        ({"start_step": -1}, ["start_step"]),
        ({"save_state": "all"}, ["save_state='all'", "exact"]),
        ({"timeout": 300}, ["timeout", "timedelta(minutes=5)", "300"]),
        ({"timeout": timedelta(0)}, ["timeout", "positive"]),
        ({"verify_every": -1}, ["verify_every", "-1"]),
    ],
    ids=" ".join,  # the names: object addresses would differ between the processes that run tests
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments: dict[str, Any], names_and_remedy: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the parts of its message are checked below)
        CompressedStrategy(**arguments)
    assert [part for part in names_and_remedy if part not in str(error.value)] == []


def test_its_own_options_reach_the_exchange() -> None:
    settings = CompressedStrategy("topk", start_step=3, verify_every=5, compression_threads=2).exchange.settings
    assert (settings.compressor.name, settings.start_step, settings.verify_every) == ("topk", 3, 5)
    assert settings.compression_threads == 2


def test_all_of_ddps_options_are_taken() -> None:
    options = {
        "find_unused_parameters": True,
        "static_graph": True,
        "bucket_cap_mb": 3,
        "gradient_as_bucket_view": True,
    }
    strategy = CompressedStrategy(**options, ddp_comm_hook=None, process_group_backend="gloo", start_method="spawn")
    assert strategy._ddp_kwargs == options


def test_pythons_reducer_is_refused() -> None:
    import torch._dynamo.config

    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(ValueError, match=r"python_reducer.*optimize_ddp = True"),
    ):
        CompressedStrategy()


@pytest.mark.parametrize("strategy", ["compressed", "compressed_topk", CompressedStrategy])
def test_mps_is_refused(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    # Lightning looks for "ddp" in the strategy's name to refuse it
    monkeypatch.setattr(pl.accelerators.MPSAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(pl.accelerators.MPSAccelerator, "parse_devices", lambda devices: [0])
    with pytest.raises(ValueError, match=r"MPS.*accelerator='cpu'"):
        pl.Trainer(
            accelerator="mps", devices=1, strategy=strategy if isinstance(strategy, str) else strategy(), **QUIET
        )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("launcher", ["", "_spawn", "_fork", "_notebook"])
def test_names_are_registered_as_lightning_registers_its_own(preset: str, launcher: str) -> None:
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for suffix, unused in (
        ("", None),
        ("_find_unused_parameters_true", True),
        ("_find_unused_parameters_false", False),
    ):
        strategy = StrategyRegistry.get(f"compressed{preset}{launcher}{suffix}")
        assert isinstance(strategy, CompressedStrategy)
        assert strategy._start_method == methods[launcher]
        assert strategy._ddp_kwargs.get("find_unused_parameters") is unused
        expected = PRESETS[preset].get("compressor", "quantize")
        assert strategy.exchange.settings == CompressedStrategy(**PRESETS[preset]).exchange.settings
        assert expected in (strategy.exchange.settings.compressor, strategy.exchange.settings.compressor.name)


def test_registered_names_are_described() -> None:
    assert "compressor=topk" in StrategyRegistry["compressed_topk"]["description"]
    assert set(StrategyRegistry.available_strategies()) >= {"compressed", "compressed_spawn", "ddp"}
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


def test_public_names_belong_to_the_import_name_in_use() -> None:
    assert lightning_compress.CompressedStrategy.root == "pytorch_lightning"
    assert issubclass(lightning_compress.CompressedStrategy, DDPStrategy)
    assert issubclass(lightning_compress.CompressionMonitor, pl.Callback)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = lightning_compress.Nothing


def test_everything_public_can_be_imported() -> None:
    assert [name for name in lightning_compress.__all__ if not hasattr(lightning_compress, name)] == []


def test_it_pickles_before_fit() -> None:
    strategy = CompressedStrategy(Quantize(3), ErrorFeedback(), "two_way", 512, bucket_cap_mb=2)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.exchange.settings == strategy.exchange.settings
    assert copy._ddp_kwargs == {"bucket_cap_mb": 2}


def pickle_after_fit() -> tuple[bool, dict[str, Any], str]:
    trainer = make_trainer("compressed")
    model = Classifier()
    trainer.fit(model)
    stats = trainer.strategy.exchange.stats()
    copy = pickle.loads(pickle.dumps(trainer.strategy))
    same = copy.exchange.stats() == stats
    # it works again, in the Trainer's place
    trainer._accelerator_connector.strategy = copy
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    return same, {"before": stats["steps"], "after": copy.exchange.stats()["steps"]}, content(model.parameters())


def test_it_pickles_after_fit_and_keeps_its_figures() -> None:
    first, second = run_ranks(pickle_after_fit, 2)
    assert first == second
    assert first[:2] == (True, {"before": 8, "after": 16})


def test_a_long_compilation_is_reported_where_lightning_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 12.34)
    monkeypatch.setattr(runtime, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(runtime, "compile_kernels", lambda *_: None)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda _: None)
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    logger = logging.getLogger("pytorch_lightning")  # shows INFO on standard error
    logger.addHandler(handler)
    strategy = CompressedStrategy()
    strategy._lightning_module = Classifier()
    strategy.setup_environment()
    logger.removeHandler(handler)
    assert said == ["lightning-compress: compiled the CPU kernels in 12.3 s (cached for the next run)"]

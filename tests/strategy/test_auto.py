"""``strategy="compressed_auto"`` on real ranks; what it measures is replaced by what each test is about."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import StrategyRegistry

from lightning_compress import AutoStrategy, Cast, DenseRule, Quantize
from lightning_compress import auto as auto_module
from lightning_compress.auto import CANDIDATES, CHOICE_KEY, candidates
from lightning_compress.cli import CompressCLI
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.optim import CompressedAdam
from lightning_compress.planner.link import GivenLink, Hop
from lightning_compress.planner.methods import Choice
from lightning_compress.planner.pilot import Pilot
from lightning_compress.strategy import CompressionGlue
from lightning_compress.testing.simulation import SimulatedExchange
from tests.exchange.training import content
from tests.models import make_model
from tests.ranks import run_ranks
from tests.strategy.training import Classifier, make_trainer


class FakeClock(Pilot):
    """Steps last as long as the test says."""

    seconds_of: dict[str, float]

    def step(self, seconds: float) -> Any:
        return super().step(self.seconds_of[self.method])


class Steps(pl.Callback):
    """The method and the bytes of every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append((trainer.strategy.pilot.method, trainer.strategy.exchange.stats()["last"]["bytes_sent"]))


class OwnMind(AutoStrategy):
    """Ranks that predict differently."""

    def _decide(self) -> tuple[Choice, str]:
        chosen, reason = super()._decide()
        return (chosen, reason) if dist.get_rank() == 0 else (Choice("ternary"), "another clock")


def auto(bandwidth: float, seconds: dict[str, float], **settings: int) -> AutoStrategy:
    strategy = OwnMind()
    strategy.pilot = FakeClock(Choice("bf16"), **{"measure": 2, "warm_up": 1, "recheck_every": 0, **settings})
    strategy.pilot.seconds_of = seconds
    strategy._link = lambda _, nodes: strategy.asked.append(nodes) or GivenLink(bandwidth, 1e-4, 2)  # type: ignore[method-assign]
    strategy.asked = []
    return strategy


def fit(strategy: AutoStrategy, model: pl.LightningModule, **options: Any) -> dict[str, Any]:
    steps = Steps()
    callbacks, checkpoint = [steps, *options.pop("callbacks", [])], options.pop("ckpt_path", None)
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    os.environ.pop("LOCAL_WORLD_SIZE")  # Lightning's own launcher does not set it
    trainer.fit(model, ckpt_path=checkpoint)
    return {
        "steps": steps.seen,
        "methods": [method for method, _ in steps.seen],
        "state": strategy.pilot.state(),
        "pin": strategy.pin(),
        "parameters": content(model.parameters()),
        "settings": repr((strategy.exchange.settings.compressor, strategy.exchange.settings.dense)),
    }


def planned_bytes(strategy: AutoStrategy) -> int:
    module = make_model()
    simulated = SimulatedExchange(module, 2, **strategy.pilot.choice.arguments)
    simulated.mean([{name: torch.ones_like(p) for name, p in module.named_parameters()}] * 2)
    return int(simulated.stats(dist.get_rank())["bytes_sent"])


def lifecycle(checkpoint: str, slow: float) -> dict[str, Any]:
    """Validate, fit half of the measuring, fit on, test another run's checkpoint, predict, fit another model."""
    strategy = auto(slow, dict.fromkeys(CANDIDATES, 1.0), measure=4)
    trainer = make_trainer(strategy, callbacks=[steps := Steps()], max_epochs=1)
    model = Classifier(3)
    trainer.validate(model, verbose=False)
    found: dict[str, Any] = {"validated": strategy.pilot.state()}
    trainer.fit(model)
    found["half"] = strategy.pilot.state()
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model)
    found["fitted"] = strategy.pilot.state()
    trainer.test(model, verbose=False, ckpt_path=checkpoint)
    trainer.predict(model)
    found["tested"] = strategy.pilot.state()
    steps.seen.clear()
    trainer.fit_loop.max_epochs = 6
    trainer.fit(Classifier(2))
    return {**found, "other model": strategy.pilot.state(), "parameters": content(trainer.model.parameters())}


def resume(folder: str, source: str, target: str, epochs: int) -> dict[str, Any]:
    """Goes on from one checkpoint to the next, on as many ranks as there are."""
    strategy = auto(1e6, {"bf16": 1.0, "fp8": 0.6, "quantize": 0.5, "ternary": 0.4, "centered": 0.3})
    saving = ModelCheckpoint(folder, filename=target, save_top_k=-1)
    options = {"max_epochs": epochs, "callbacks": [saving], "enable_checkpointing": True}
    return fit(strategy, Classifier(12), ckpt_path=f"{folder}/{source}.ckpt", **options)


def fits(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"folder": folder}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning").addHandler(handler)

    slow = 1e6  # bytes per second: the 100 kB of the model take a tenth of one
    saving = ModelCheckpoint(folder, save_last=True, save_top_k=0)
    # within 80 ms of the shortest step only the largest tensor must be compressed: dense, it takes 120 ms, and the others 50
    as_fast_as_any = auto_module.as_fast_as_any
    auto_module.as_fast_as_any = lambda predictions: min(p.seconds for p in predictions) + 0.08
    wins = auto(slow, {"bf16": 1.0, "fp8": 0.6, "quantize": 0.5, "ternary": 0.4, "centered": 0.3})
    found["wins"] = fit(wins, Classifier(12), callbacks=[saving], enable_checkpointing=True)
    found["nodes"] = wins.asked
    found["planned"] = planned_bytes(wins)
    auto_module.as_fast_as_any = as_fast_as_any
    found["log"] = "\n".join(records)

    found["loses"] = fit(
        auto(slow, dict.fromkeys(("bf16", "fp8", "quantize", "ternary", "centered"), 1.0)), Classifier(12)
    )
    found["compute bound"] = fit(auto(1e12, {"bf16": 1.0, "fp32": 1.0}), Classifier(12))
    found["double"] = fit(auto(1e12, {"fp32": 1.0}), Classifier(4), precision="64-true")

    dist.barrier()
    checkpoint = torch.load(Path(folder) / "last.ckpt", weights_only=True)
    found["saved"] = checkpoint[CHOICE_KEY]
    resumed = auto(slow, {found["saved"]["method"]: 1.0})
    resumed._decide = lambda: (_ for _ in ()).throw(AssertionError("measured"))  # type: ignore[method-assign]
    trainer = make_trainer(resumed, callbacks=[steps := Steps()], max_epochs=2)
    trainer.fit(model := Classifier(12), ckpt_path=str(Path(folder) / "last.ckpt"))
    found["resumed"] = steps.seen, resumed.pilot.state(), content(model.parameters())
    found["lifecycle"] = lifecycle(str(Path(folder) / "last.ckpt"), slow)
    found["resumed settings"] = repr((resumed.exchange.settings.compressor, resumed.exchange.settings.dense))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = run_ranks(fits, 2, str(tmp_path_factory.mktemp("auto")))
    return first, second


Found = tuple[dict[str, Any], dict[str, Any]]


def test_all_ranks_agree(found: Found) -> None:
    first, second = found
    for name in ("wins", "loses", "compute bound", "double"):
        for key in ("methods", "pin", "parameters", "settings"):
            assert first[name][key] == second[name][key], (name, key)


def test_a_slow_link_is_hidden_by_the_mildest_that_does(found: Found) -> None:
    wins = found[0]["wins"]
    method = wins["state"]["method"]
    assert method in ("fp8", "quantize", "ternary", "centered")
    # 1 step of warm-up and 2 measured ones, then the trial
    assert [name for name, _ in wins["steps"]][:4] == ["bf16", "bf16", method, method]
    assert [name for name, _ in wins["steps"]][4:] == [method] * 8
    sent = [nbytes for _, nbytes in wins["steps"]]
    assert sent[0] == sent[2] > 1.5 * sent[3]  # the switch is at the beginning of the next step
    assert wins["state"]["settled"]


def test_tensors_that_need_not_be_compressed_stay_dense(found: Found) -> None:
    wins = found[0]["wins"]
    assert wins["state"]["dense"] == {"code": "bf16", "max_numel": 20_000, "patterns": ()}
    assert wins["steps"][-1][1] == found[0]["planned"]
    assert "Large tensors compressed: 1 of 3" in found[0]["log"]
    assert f"tries {wins['state']['method']} of some tensors" in found[0]["log"]
    assert yaml.safe_load(wins["pin"])["trainer"]["strategy"]["init_args"] == {
        "compressor": wins["state"]["method"],
        "dense": {
            "class_path": "lightning_compress.DenseRule",
            "init_args": {"code": "bf16", "max_numel": 20_000, "patterns": []},
        },
    }


def test_nodes_are_those_of_the_trainer(found: Found) -> None:
    assert found[0]["nodes"] == found[1]["nodes"] == [Nodes.of(["a", "a"])]


def test_choice_and_reason_are_logged(found: Found) -> None:
    log = found[0]["log"]
    method = found[0]["wins"]["state"]["method"]
    assert f"compressed_auto tries {method}" in log
    assert "tried on the wall clock" in log
    assert "the link is the bottleneck" in log
    assert f"compressor: {method}" in log
    assert "compressed_auto" not in found[1]["log"]


def test_a_candidate_that_loses_on_the_wall_clock_goes(found: Found) -> None:
    loses = found[0]["loses"]
    methods = [name for name, _ in loses["steps"]]
    assert set(methods[2:5]) != {"bf16"}
    assert set(methods[6:]) == {"bf16"}
    assert "was predicted to be better and was not" in loses["state"]["reason"]
    assert loses["pin"] == "trainer:\n  strategy: compressed_bf16\n"
    sent = [nbytes for _, nbytes in loses["steps"]]
    assert sent[-1] == sent[0]


def test_compute_bound_goes_back_to_ddp(found: Found) -> None:
    bound = found[0]["compute bound"]
    assert bound["state"]["method"] in ("fp32", "bf16")
    assert bound["state"]["settled"]


def test_double_precision_is_kept(found: Found) -> None:
    assert {name for name, _ in found[0]["double"]["steps"]} == {"fp32"}
    assert found[0]["double"]["settings"].startswith("(NoCompression(), ")


def test_a_resumed_run_goes_on_with_the_choice(found: Found) -> None:
    first, second = found
    steps, state, parameters = first["resumed"]
    assert {**state, "in_force": {"method": state["method"], "dense": state["dense"]}, "ranks": 2} == first["saved"]
    assert state["settled"]
    assert {name for name, _ in steps} == {first["wins"]["state"]["method"]}
    assert first["resumed settings"] == first["wins"]["settings"]
    assert parameters == second["resumed"][2]


def test_on_another_number_of_ranks_it_measures_again(found: Found) -> None:
    folder, chosen = found[0]["folder"], found[0]["wins"]["state"]["method"]
    (alone,) = run_ranks(resume, 1, folder, "last", "alone", 2)
    assert alone["state"]["reason"] == "a single rank exchanges nothing"
    assert set(alone["methods"]) == {chosen}
    first, second = run_ranks(resume, 2, folder, "alone", "both", 3)
    assert first["parameters"] == second["parameters"]
    assert first["methods"][0] == chosen
    assert first["state"]["settled"]
    assert first["state"]["reason"] != alone["state"]["reason"]


def test_other_entry_points_and_more_fits(found: Found) -> None:
    first, second = (one["lifecycle"] for one in found)
    assert first == second
    assert not first["validated"]["settled"]
    assert not first["half"]["settled"]
    assert first["fitted"]["settled"]
    assert "was predicted to be better and was not" in first["fitted"]["reason"]
    assert first["tested"] == first["fitted"]  # the checkpoint of another run was only tested
    assert not first["other model"]["settled"]
    assert first["other model"]["method"] == "bf16"


def test_names_are_registered() -> None:
    names = StrategyRegistry.available_strategies()
    launchers = ("", "_spawn", "_fork", "_notebook")
    assert {f"compressed_auto{how}" for how in launchers} <= set(names)
    assert "compressed_auto_find_unused_parameters_true" in names


def test_one_rank_has_nothing_to_choose() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="compressed_auto", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(4))
    assert trainer.strategy.pilot.reason == "a single rank exchanges nothing"
    dist.destroy_process_group()


def test_verification_and_threads_hold_for_every_method() -> None:
    strategy = AutoStrategy(verify_every=3, compression_threads=2)
    assert strategy.exchange.settings.verify_every == 3
    strategy._use(Choice("quantize"))
    assert strategy.exchange.settings.compression_threads == 2
    assert repr(strategy.exchange.settings.compressor) == repr(Quantize(4))
    assert strategy.exchange.settings.verify_every == 3


def test_a_checkpoint_between_decision_and_switch_goes_on_with_the_memories_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_force = {"method": "bf16", "dense": None}
    choice = {"method": "quantize", "dense": None, "reason": "wins", "settled": True, "in_force": in_force, "ranks": 1}
    monkeypatch.setattr(CompressionGlue, "load_checkpoint", lambda *_: {CHOICE_KEY: choice})
    monkeypatch.setattr(CompressionGlue, "_fitting", True)
    strategy = AutoStrategy()
    strategy.load_checkpoint("any")
    assert repr(strategy.exchange.settings.compressor) == repr(Cast("bf16"))
    assert (strategy.pilot.method, strategy.pilot.settled, strategy._pending) == ("quantize", True, True)
    choice["ranks"] = 2  # another network: the choice is in force until it has been measured
    strategy.load_checkpoint("any")
    assert (strategy.pilot.method, strategy.pilot.settled) == ("quantize", False)


def test_a_run_resumed_in_a_trial_goes_back_to_what_the_candidate_had_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Any] = {}
    monkeypatch.setattr(CompressionGlue, "save_checkpoint", lambda *_: None)
    monkeypatch.setattr(CompressionGlue, "load_checkpoint", lambda *_: saved)
    monkeypatch.setattr(CompressionGlue, "_fitting", True)
    trying = AutoStrategy()
    trying.pilot.propose(Choice("quantize"), "predicted")
    trying._in_force = trying.pilot.choice
    trying.save_checkpoint(saved, "any")
    resumed = AutoStrategy()
    resumed.load_checkpoint("any")
    assert repr(resumed.exchange.settings.compressor) == repr(Quantize(4))  # whose memories the checkpoint holds
    assert (resumed.pilot.method, resumed.pilot.settled, resumed._pending) == ("bf16", False, True)


def test_double_precision_is_never_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompressionGlue, "_attach", lambda _: None)
    strategy = AutoStrategy(recheck_every=1)
    strategy._lightning_module = Classifier(1).double()
    strategy._attach()
    assert [strategy.pilot.step(1.0) for _ in range(40)] == [None] * 40
    assert (strategy.pilot.method, strategy.pilot.settled) == ("fp32", True)


def test_an_optimizer_with_settings_of_its_own_is_refused() -> None:
    strategy = AutoStrategy()
    strategy.optimizers = [CompressedAdam([torch.nn.Parameter(torch.zeros(2))])]
    with pytest.raises(ValueError, match="compressed_clan"):
        strategy._attach()


def layered() -> dict[str, Any]:
    class Layered(GivenLink):
        """Inside the node bytes cost nothing."""

        def hop(self, kind: Any, sent: float, at: float = 0.5, level: str = "world") -> Hop:
            return Hop(1e-6) if level == "node" else super().hop(kind, sent, at)

    strategy = AutoStrategy(bucket_cap_mb=1)
    strategy.pilot = FakeClock(Choice("bf16"), measure=2, warm_up=1, recheck_every=0)
    # so slow that bytes between nodes are all that matters: of the same code those of the hierarchical exchange are half
    strategy.pilot.seconds_of = {name: 5.0 + 5.0 * (name == "bf16") for name in candidates(Nodes.of([0, 0, 1, 1]))}
    strategy._link = lambda _, nodes: Layered(1e5, 1e-4, nodes.world_size)  # type: ignore[method-assign]
    found = fit(strategy, Classifier(16), devices=2, num_nodes=2)
    return {**found, "between": strategy.exchange.stats()["last"]["bytes_between_nodes"]}


def test_hierarchical_is_considered_where_nodes_have_several_ranks() -> None:
    first, *others = run_ranks(layered, 4)
    method = first["state"]["method"]
    assert method.startswith("hierarchical_")
    assert first["state"]["settled"]
    assert 0 < first["between"] < first["steps"][-1][1]
    written = yaml.safe_load(first["pin"])["trainer"]["strategy"]["init_args"]
    assert (written["exchange"], written["bucket_cap_mb"]) == ("hierarchical", 1)
    assert written["compressor"] == method.removeprefix("hierarchical_")
    for other in others:
        assert all(other[key] == first[key] for key in ("methods", "pin", "parameters"))


def test_hierarchical_is_no_candidate_where_it_is_nothing() -> None:
    assert candidates(Nodes.alone(4)) == candidates(Nodes.of(["a", "a"])) == list(CANDIDATES)
    assert "hierarchical_fp32" not in candidates(Nodes.of(["a", "a", "b", "b"]))


def test_what_the_strategy_was_given_is_pinned_too() -> None:
    assert AutoStrategy(find_unused_parameters=False).pin() == "trainer:\n  strategy: compressed_bf16\n"
    strategy = AutoStrategy(
        save_state="mean", verify_every=7, find_unused_parameters=True, start_method="spawn", timeout=timedelta(hours=1)
    )
    for method in ("none", "quantize"):
        strategy._use(Choice("fp32" if method == "none" else method))
        written = yaml.safe_load(strategy.pin())["trainer"]["strategy"]
        assert written == {
            "class_path": "lightning_compress.CompressedStrategy",
            "init_args": {
                "compressor": method,
                "verify_every": 7,
                "find_unused_parameters": True,
                "start_method": "spawn",
                "timeout": "1:00:00",
                "save_state": "mean",
            },
        }
    strategy = AutoStrategy(checkpoint_io=TorchCheckpointIO())
    assert strategy.pin().splitlines()[0] == "# add what YAML cannot say here: checkpoint_io"
    assert yaml.safe_load(strategy.pin())["trainer"]["strategy"] == "compressed_bf16"


def test_the_pinned_yaml_loads(tmp_path: Path) -> None:
    strategy = AutoStrategy(find_unused_parameters=True, timeout=timedelta(minutes=7))
    rule = DenseRule("bf16", 5000, ("head.*", "layers.[[]0[]].weight"))
    strategy._use(Choice("ternary", rule))
    (tmp_path / "pinned.yaml").write_text(strategy.pin())
    trained = ["--model", "pytorch_lightning.demos.boring_classes.BoringModel", "--trainer.accelerator", "cpu"]
    loaded = CompressCLI(args=[*trained, "--config", str(tmp_path / "pinned.yaml")], run=False).trainer.strategy
    assert repr(loaded.exchange.settings.compressor) == repr(strategy.exchange.settings.compressor)
    found = loaded.exchange.settings.dense
    assert (found.code, found.max_numel, tuple(found.patterns)) == (rule.code, rule.max_numel, rule.patterns)
    assert loaded._ddp_kwargs["find_unused_parameters"]
    assert loaded._timeout == timedelta(minutes=7)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="compressed_auto chooses start_step itself"):
        AutoStrategy(start_step=3)
    with pytest.raises(ValueError, match="recheck_every is a number of steps"):
        AutoStrategy(recheck_every=-1)
    with pytest.raises(ValueError, match="cannot take ddp_comm_hook"):
        AutoStrategy(ddp_comm_hook=print)

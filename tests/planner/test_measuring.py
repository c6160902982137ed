"""What is measured on real code: bytes are exact, times are positive and in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_compress import plan
from lightning_compress.exchange.collectives import AllReduce, AllToAll
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner import link as link_module
from lightning_compress.planner import planning
from lightning_compress.planner.costs import measure_costs
from lightning_compress.planner.link import KINDS, measure_link
from lightning_compress.planner.methods import Method, arguments_of
from lightning_compress.planner.profile import Bucket, StepRecorder, StepTimes
from lightning_compress.testing.simulation import SimulatedExchange
from tests.planner.hand_made import profile
from tests.ranks import run_ranks


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100))


@pytest.mark.parametrize("name", ["fp32", "quantize", "topk", "fp16"])
def test_costs_have_the_bytes_of_the_exchange(name: str) -> None:
    network = model()
    gradients = {n: torch.randn_like(p) for n, p in network.named_parameters()}
    bucket = Bucket(tuple(gradients), sum(g.numel() for g in gradients.values()), torch.float32)
    one = profile(StepTimes(1.0, 1.0, 0.0, (1.0,)))
    (measured,) = measure_costs(
        Method.named(name), network, type(one)((bucket,), one.steps, one.device), 1, Nodes.alone(3)
    )
    simulated = SimulatedExchange(network, 3, **arguments_of(name))
    simulated.mean([gradients] * 3)
    assert round(sum(m.sent for m in measured.messages)) == simulated.stats(1)["bytes_sent"]
    assert len(measured.stages) == len(measured.messages) + 1
    assert all(len(stage) == 3 for stage in measured.stages)
    assert min(measured.stages[0]) > 0


def test_torch_bf16_hook_sends_half() -> None:
    one = profile(StepTimes(1.0, 1.0, 0.0, (1.0,)))
    bucket = Bucket(("0.weight",), 20_000, torch.float32)
    layout = type(one)((bucket,), one.steps, one.device)
    (measured,) = measure_costs(Method.named("bf16"), model(), layout, 0, Nodes.alone(2))
    assert [m.sent for m in measured.messages] == [2 * 20_000]
    # the preset sends a mark of every parameter too
    (measured,) = measure_costs(Method("bf16", {"compressor": "bf16"}), model(), layout, 0, Nodes.alone(2))
    assert [m.sent for m in measured.messages] == [2 * 20_000 + 2.0]


def test_costs_of_a_hierarchical_exchange() -> None:
    network, nodes = model(), Nodes.of(["a", "a", "b", "b"])
    gradients = {n: torch.randn_like(p) for n, p in network.named_parameters()}
    bucket = Bucket(tuple(gradients), sum(g.numel() for g in gradients.values()), torch.float32)
    one = profile(StepTimes(1.0, 1.0, 0.0, (1.0,)))
    layout, method = type(one)((bucket,), one.steps, one.device), Method.named("hierarchical_quantize")
    (measured,) = measure_costs(method, network, layout, 3, nodes)
    assert [m.level for m in measured.messages] == ["node", "nodes", "node"]  # of two nodes, which gather once
    simulated = SimulatedExchange(network, 4, ranks_per_node=2, **arguments_of("hierarchical_quantize"))
    simulated.mean([gradients] * 4)
    assert round(sum(m.sent for m in measured.messages)) == simulated.stats(3)["bytes_sent"]


def measure() -> dict[str, Any]:
    link_module._SIZES, link_module._REPEATS = link_module._SIZES[:3], 2  # larger ones take seconds
    assert dist.group.WORLD is not None
    link = measure_link(dist.group.WORLD, torch.device("cpu"), Nodes.of([0, 0, 1, 1]))
    return {
        "kinds": set(link.samples) == set(KINDS),
        "sizes": [s.sent for s in link.samples[AllReduce]],
        "times": [s.seconds for s in link.samples[AllReduce]],
        "large": link.hop(AllReduce, 1e9).seconds,
        "parts": link.describe(),
        "part sizes": [s.sent for s in link.parts["node"].samples[AllReduce]],
        "between": link.hop(AllToAll, 1e6, level="nodes") == link.parts["nodes"].hop(AllToAll, 1e6),
    }


def test_link_between_real_processes() -> None:
    first, *others = run_ranks(measure, 4)
    assert first["kinds"]
    assert first["sizes"][0] == 1.5 * 4096  # a ring of 4 sends 2 * 3/4 of the tensor
    assert first["large"] > min(first["times"][-1])
    assert all(other["times"] == first["times"] for other in others)  # all have those of the slowest
    assert "inside a node: all-reduce at" in first["parts"]
    assert "between nodes: all-reduce at" in first["parts"]
    assert first["part sizes"][0] == 4096  # two ranks
    assert first["between"]


def test_plan_of_a_batch_leaves_the_model_as_it_was() -> None:
    import pytorch_lightning as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = plan(
        module,
        torch.randn(8, 100),
        bandwidth="1mbit",
        nodes=4,
        methods=["fp32", "quantize"],
        steps=3,
        trainer={"accelerator": "cpu", "accumulate_grad_batches": 2},
    )
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert not dist.is_initialized()
    assert found.recommended == "quantize"
    fp32, quantize = found.predictions
    sent = 2 * 3 / 4 * 4 * sum(p.numel() for p in module.parameters())
    assert fp32.nbytes == sent
    assert fp32.exposed == pytest.approx(sent * 8 / 1e6, rel=0.2)  # 1 Mb/s, hardly hidden
    assert quantize.nbytes < sent / 6
    assert found.link == "given: 1 Mb/s, 50 us, 4 ranks"


def test_a_batch_with_many_turns_of_an_optimizer_is_one_step() -> None:
    import pytorch_lightning as pl

    class Critic(pl.LightningModule):
        batches = 0

        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = model(), False

        def training_step(self, batch: torch.Tensor, _: int) -> None:
            self.batches += 1
            for _turn in range(6):
                self.manual_backward(self.net(batch).square().mean())
                self.optimizers().step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Critic()
    found = plan(
        module, torch.randn(8, 100), bandwidth="1gbit", methods=["fp32"], steps=2, trainer={"accelerator": "cpu"}
    )
    assert module.batches == 3 + 2
    assert found.recommended == "fp32"


def test_a_second_optimizers_turn_is_no_part_of_the_step() -> None:
    class Ready:
        def __init__(self, parameter: torch.Tensor) -> None:
            self.parameter = parameter

        def parameters(self) -> list[torch.Tensor]:
            return [self.parameter]

        def buffer(self) -> torch.Tensor:
            return self.parameter

    first, second = torch.zeros(3), torch.zeros(3)
    recorder = StepRecorder(torch.device("cpu"), {id(first): "a", id(second): "b"})
    for _ in range(2):
        recorder.begin()
        for turn in (first, second):
            recorder.backward()
            recorder.bucket(Ready(turn))
            recorder.gradients()
            if turn is first:
                recorder.end()
    found = recorder.profile(0)
    assert [bucket.names for bucket in found.buckets] == [("a",)]
    assert all(min(step.before, step.backward, step.after) >= 0 for step in found.steps)


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no link to measure"):
        plan(model())
    with monkeypatch.context() as several:
        several.setattr(planning.Ranks, "started", lambda: planning.Ranks(0, 2, 2))
        with pytest.raises(ValueError, match="belongs to a named link"):
            plan(model(), nodes=2)
    with pytest.raises(ValueError, match="needs a LightningModule, got Sequential"):
        plan(model(), torch.zeros(1), bandwidth="1gbit")
    with pytest.raises(ValueError, match="2 nodes or more"):
        plan(model(), bandwidth="1gbit", nodes=1)
    with pytest.raises(ValueError, match="steps is the number"):
        plan(model(), bandwidth="1gbit", steps=0)

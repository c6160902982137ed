"""benchmarks/scaling.py: what it launches, what it makes of measurements, and the planner's figures beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import scaling, step_time, wire_bytes
from benchmarks.methods import METHODS, make_exchange
from benchmarks.prediction_rank import PLANNED
from benchmarks.scaling_rank import ExchangeAlone, RandomGradients
from benchmarks.step_time import Launch
from benchmarks.workloads import WORKLOADS, gradient_nbytes
from tests.benchmarks.test_step_time import emulated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2", "1"], "--hosts and --up-to must be 2 or more, got 1"),
        (["--up-to", "1"], "--hosts and --up-to must be 2 or more, got 1"),
        (["--latency", "-1"], "--latency must be 0 or more"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--rates", "1gb"], "Nmbit, Ngbit (whole numbers) or none, not '1gb'"),
        (["--predict-only", "--rates", "none"], "a prediction needs a bandwidth"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        scaling.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_step_has_the_random_gradients_and_nothing_else() -> None:
    training = ExchangeAlone(WORKLOADS["tiny"], rank=1)
    assert isinstance(training.model, RandomGradients)
    assert training.nbytes == gradient_nbytes(WORKLOADS["tiny"])
    before = [p.detach().clone() for p in training.model.parameters()]
    for _ in range(2):  # gradients are not added up
        training.forward(training.model).backward()
        training.update()
    gradients = [p.grad for p in training.model.parameters()]
    assert all(g is not None and torch.equal(g, r) for g, r in zip(gradients, training.model._gradients, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True))
    other = ExchangeAlone(WORKLOADS["tiny"], rank=2)
    assert isinstance(other.model, RandomGradients)
    assert not torch.equal(other.model._gradients[0], training.model._gradients[0])


def test_measured_and_predicted_stand_in_one_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launches = []

    def run(launch: Launch, _args: object, _advance: object, program: str) -> list[dict[str, object]]:
        launches.append((program, launch.hosts, launch.methods))
        sample = {"steps_ms": [3.0, 2.0, 4.0], "steps_bytes": [10, 20], "predicted_bytes": 15, "gradient_bytes": 7}
        return [{"method": method, **sample} for method in launch.methods]

    monkeypatch.setattr(step_time, "require_hosts", lambda: None)
    monkeypatch.setattr(step_time, "run", run)
    monkeypatch.setattr(scaling, "host_cost", lambda: 0.0)
    pytest.importorskip("matplotlib")
    methods = ("noop", "fp32", "compressed")
    arguments = ["--models", "tiny", "--hosts", "3", "2", "--up-to", "16", "--latency", "0", "--plot", str(tmp_path)]
    scaling.main([*arguments, "--methods", *methods, "--json"])
    assert launches == [("benchmarks.scaling_rank", 2, methods), ("benchmarks.scaling_rank", 3, methods)]
    assert (tmp_path / "scaling_tiny_1gbit.png").exists()
    rows = {(row["method"], row["hosts"]): row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [
        *(("noop", n) for n in (2, 3)),
        *((method, n) for method in ("fp32", "compressed") for n in (2, 3, 4, 8, 16)),
    ]
    both = rows["fp32", 2]
    assert (both["median_ms"], both["spread_ms"], both["bytes_per_rank"], both["planned_bytes"]) == (3.0, 1.0, 15, 15)
    assert rows["fp32", 3]["predicted_ms"] is rows["noop", 2]["predicted_ms"] is rows["fp32", 16]["median_ms"] is None
    # without latency and host cost a ring is its bytes over the bandwidth
    nbytes = 2 * 15 / 16 * gradient_nbytes(WORKLOADS["tiny"])
    assert rows["fp32", 16]["predicted_bytes"] == pytest.approx(nbytes, abs=1)
    assert rows["fp32", 16]["predicted_ms"] == pytest.approx(step_time.link_ms(nbytes, "1gbit"), rel=0.01)
    sent = wire_bytes.count(WORKLOADS["tiny"].model(), make_exchange("compressed").settings, 16).sent
    assert rows["compressed", 16]["predicted_bytes"] == pytest.approx(sent, rel=0.05)


def test_to_predict_needs_no_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise SystemExit(3)

    monkeypatch.setattr(step_time, "require_hosts", refuse)
    arguments = ["--models", "tiny", "--methods", "noop", "bf16", "--up-to", "4"]
    with pytest.raises(SystemExit):
        scaling.main(arguments)
    scaling.main([*arguments, "--predict-only"])
    assert "0.528" in capsys.readouterr().out  # MB of bf16 on two hosts


def test_what_the_planner_does_not_know_is_not_predicted() -> None:
    assert set(METHODS) - set(PLANNED) == {"noop", "fp16", "powersgd"}


def test_a_method_of_several_launches_is_one_row() -> None:
    launch, sample = Launch("tiny", "1gbit", ("noop",), 2), {"method": "noop", "steps_bytes": [7], "predicted_bytes": 0}
    samples = [one for ms in (1.0, 5.0) for one in scaling.place_of(launch, [{**sample, "steps_ms": [ms, ms]}])]
    (row,) = scaling.summarise(samples)
    assert (row["steps_ms"], row["median_ms"], row["bytes_per_rank"]) == ([1.0, 1.0, 5.0, 5.0], 3.0, 7)


@emulated
@pytest.mark.slow
def test_hosts_send_what_is_planned() -> None:
    command = [sys.executable, scaling.__file__, "--models", "tiny", "--hosts", "3", "--up-to", "2", "--steps", "2"]
    command += ["--methods", "fp32", "compressed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [row for row in json.loads(done.stdout) if row["median_ms"] is not None]
    assert [(row["method"], row["hosts"]) for row in rows] == [("fp32", 3), ("compressed", 3)]
    for row in rows:
        assert row["bytes_per_rank"] == pytest.approx(row["planned_bytes"], rel=0.05)

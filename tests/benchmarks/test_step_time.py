"""benchmarks/step_time.py and benchmarks/hosts.sh: arguments, sums, and real steps on two emulated hosts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import step_time
from benchmarks.methods import METHODS
from benchmarks.workloads import WORKLOADS, gradient_nbytes

SCRIPT = Path(step_time.__file__)
GIB = 2**30


def can_emulate() -> bool:
    command = ["bash", str(step_time.HOSTS), "--check"]
    return sys.platform == "linux" and subprocess.run(command, capture_output=True, check=False).returncode == 0


emulated = pytest.mark.skipif(not can_emulate(), reason="needs Linux, root, iproute2 and network namespaces")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "alexnet"], "choose from"),
        (["--rates", "1gb"], "--rates: a rate is Nmbit, Ngbit (whole numbers) or none, not '1gb'"),
        (["--rates", "0mbit"], "not '0mbit'"),
        (["--hosts", "1"], "--hosts must be 2 or more, got 1"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--methods", "compressed_gzip"], "compressed_gzip"),
        (["--method", "noop"], "unrecognized arguments"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        step_time.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_preset_that_cannot_be_made_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(step_time.make_exchange.__globals__["SETTINGS"], "compressed_fp8", {"compressor": "nowhere"})
    assert "compressed_fp8" not in step_time.available(METHODS)
    with pytest.raises(SystemExit):
        step_time.parse(["--methods", "compressed_fp8"])
    assert "--methods compressed_fp8: compressor='nowhere' is unknown" in capsys.readouterr().err


def test_the_documented_command_line_is_understood() -> None:
    line = "--models resnet50 vgg16 bert_base --rates 100mbit 1gbit --hosts 2 --methods noop fp32 bf16 compressed"
    args = step_time.parse([*line.split(), "--steps", "5", "--json"])
    assert args.models == ["resnet50", "vgg16", "bert_base"]
    assert args.rates == ["100mbit", "1gbit"]
    assert args.methods == ["noop", "fp32", "bf16", "compressed"]
    assert (args.hosts, args.steps, args.json) == (2, 5, True)


@pytest.mark.parametrize(
    ("model", "nbytes"), [("resnet50", 102_228_128), ("vgg16", 553_430_176), ("bert_base", 438_057_192)]
)
def test_networks_have_their_full_size(model: str, nbytes: int) -> None:
    pytest.importorskip("transformers" if model == "bert_base" else "torchvision")
    assert gradient_nbytes(WORKLOADS[model]) == nbytes


def test_methods_that_do_not_fit_together_are_shared_out_with_the_limit_in_every_group() -> None:
    methods = [method for method in METHODS if method != "noop"]
    corrected = ("compressed_dgc", "compressed_dgc_0.001")  # which have an optimizer of their own
    together = tuple(method for method in methods if method not in corrected)
    assert step_time.share_out([*methods, "noop"], "tiny", 2, 0) == [
        *(("noop", method) for method in reversed(corrected)),
        ("noop", *together),
    ]
    assert step_time.share_out(["compressed_dgc"], "tiny", 2, 0) == [("compressed_dgc",)]
    groups = step_time.share_out([*methods, "noop"], "vgg16", 2, 20 * GIB)
    assert len(groups) > 2
    assert all(group[0] == "noop" and group.count("noop") == 1 for group in groups)
    assert sorted(method for group in groups for method in group[1:]) == sorted(methods)
    assert step_time.share_out(["noop"], "tiny", 2, 20 * GIB) == [("noop",)]
    with pytest.raises(MemoryError, match="vgg16 with noop and fp32 on 2 hosts needs about"):
        step_time.share_out(["fp32", "noop"], "vgg16", 2, 2 * GIB)


def test_a_row_sums_up_the_samples_of_all_launches() -> None:
    common = {"method": "bf16", "predicted_bytes": 100, "gradient_bytes": 200}
    first = {**common, "steps_ms": [1.0, 2.0], "steps_bytes": [100, 110]}
    second = {**common, "steps_ms": [3.0, 4.0, 10.0], "steps_bytes": [120, 100, 100]}
    (row,) = step_time.summarise("tiny", "1gbit", step_time.parse(["--hosts", "4"]), [first, second])
    assert list(row)[:7] == ["model", "rate", "hosts", "method", "median_ms", "spread_ms", "bytes_per_step"]
    assert (row["median_ms"], row["spread_ms"]) == (3.0, 2.0)
    assert (row["bytes_per_step"], row["predicted_bytes"], row["dense_bytes"]) == (106, 100, 300)
    assert row["steps_ms"] == [1.0, 2.0, 3.0, 4.0, 10.0]


@pytest.mark.parametrize(("rate", "ms"), [("100mbit", 80.0), ("1gbit", 8.0), ("25gbit", 0.32), ("none", 0.0)])
def test_the_floor_of_a_link(rate: str, ms: float) -> None:
    assert step_time.link_ms(1e6, rate) == pytest.approx(ms)


def test_missing_iproute2_is_named(tmp_path: Path) -> None:
    (tmp_path / "uname").symlink_to(shutil.which("uname") or "")
    command = [shutil.which("bash") or "", str(step_time.HOSTS), "--check"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "install the package iproute2" in done.stderr


@emulated
def test_missing_root_is_named() -> None:
    # from standard input: this user may not be allowed to read the checkout
    done = subprocess.run(
        ["bash", "-s", "--", "--check"],
        input=step_time.HOSTS.read_text(),
        user=65534,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "needs root" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["-n", "1"], "-n is a number of hosts"), (["-r", "5"], "not '5'"), (["-t", "x"], "-t is a number of seconds")],
)
def test_hosts_names_a_wrong_argument(arguments: list[str], message: str) -> None:
    command = ["bash", str(step_time.HOSTS), *arguments, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@emulated
def test_a_host_that_fails_ends_the_others_and_shows_what_it_said() -> None:
    command = "if [ $RANK = 1 ]; then echo oh >&2; exit 7; fi; sleep 60"
    done = subprocess.run(
        [str(step_time.HOSTS), "--", "sh", "-c", command], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 7
    assert "--- rank 1\noh" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit"] == 7


@emulated
def test_nothing_is_left_behind_when_it_is_ended() -> None:
    command = [str(step_time.HOSTS), "-n", "3", "--", "sh", "-c", "echo up; exec sleep 61.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for _ in range(20):  # one while it cleans up must not stop it
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert process.wait(timeout=20) == 130
    assert f"lc{process.pid}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    # our standard output is closed once no host holds it any more
    assert process.stdout.read() == ""


@emulated
@pytest.mark.slow
def test_steps_on_two_hosts_send_what_is_predicted() -> None:
    command = [sys.executable, str(SCRIPT), "--models", "tiny", "--rates", "1gbit", "--hosts", "2", "--steps", "2"]
    command += ["--methods", "noop", "fp32", "bf16", "compressed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["method"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["noop", "fp32", "bf16", "compressed"]
    dense = gradient_nbytes(WORKLOADS["tiny"])
    for row in rows.values():
        assert (row["model"], row["rate"], row["hosts"], row["dense_bytes"]) == ("tiny", "1gbit", 2, dense)
        assert row["median_ms"] > 0
        assert row["spread_ms"] >= 0
        assert len(row["steps_ms"]) == 2
    assert rows["fp32"]["predicted_bytes"] == dense
    assert rows["noop"]["bytes_per_step"] < 2000  # the barriers around a step
    for method in ("fp32", "bf16", "compressed"):
        assert rows[method]["bytes_per_step"] == pytest.approx(rows[method]["predicted_bytes"], rel=0.05)
    assert rows["compressed"]["bytes_per_step"] < dense / 7
    # faster than the link allows would mean that nothing limits it
    assert rows["fp32"]["median_ms"] > 0.8 * step_time.link_ms(dense, "1gbit")

"""benchmarks/kernels.py: the rows it prints, and that it measures what the exchange does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels
from lightning_compress.compressors import TopK, compressor_names, get_compressor
from lightning_compress.exchange import threads

SCRIPT = Path(kernels.__file__)
KEYS = ["compressor", "op", "numel", "dtype", "device", "threads", "ms", "ratio_to_add"]


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    kernels.main(["--numel", "5000", "--repeat", "1", "--json", *arguments])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.parametrize("name", kernels.default_rows())
def test_every_compressor_has_an_encode_and_a_decode_row(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "--compressors", name)
    assert [(row["compressor"], row["op"]) for row in rows[:2]] == [(name, "encode"), (name, "decode")]
    for row in rows:
        assert list(row) == KEYS
        assert (row["numel"], row["dtype"], row["device"], row["threads"]) == (5000, "float32", "cpu", 1)
        assert row["ms"] > 0
        assert row["ratio_to_add"] > 0
    baselines = [row["compressor"] for row in rows[2:]]
    compressor = kernels.compressor_of(name)[1]
    assert baselines == ([f"torch.topk_{compressor.ratio:g}"] if isinstance(compressor, kernels.LARGEST) else [])


def test_default_rows_name_every_registered_compressor_with_its_width() -> None:
    rows = kernels.default_rows()
    for name in compressor_names():
        bits = getattr(get_compressor(name), "bits", None)
        assert (name if bits is None else f"{name}_{bits}") in rows
    assert {"quantize_2", "quantize_4", "quantize_8"} <= set(rows)


def test_row_names_set_bits_and_ratio() -> None:
    assert kernels.compressor_of("quantize")[0] == "quantize_4"
    assert kernels.compressor_of("quantize_8")[1].payload_nbytes(1000) == 4 + 1000
    row, compressor = kernels.compressor_of("topk_0.25")
    assert row == "topk_0.25"
    assert compressor == TopK(ratio=0.25)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_what_is_timed_is_the_exchange_of_the_whole_gradient(dtype: str) -> None:
    arena = kernels.Arena(5000, kernels.DTYPES[dtype])
    case = kernels.CodecCase(*kernels.compressor_of("none"), arena)
    case.round(3, arena.gradient(3))
    assert torch.equal(arena.out, arena.gradient(3).float().to(arena.dtype))


def test_share_of_copy_counts_every_byte_that_must_move() -> None:
    arena = kernels.Arena(5000, torch.bfloat16)
    biased, unbiased = (kernels.CodecCase(*kernels.compressor_of(row), arena) for row in ("quantize_8", "none"))
    code = 5000 + 4 * 5 + 1  # one byte an element, a scale for each of five blocks, and the header
    assert biased.moved == {"encode": 2 * 5000 + 2 * 4 * 5000 + code, "decode": 2 * 5000 + code}
    assert unbiased.moved["encode"] == 2 * 5000 + 4 * 5000 + 1
    timing = kernels.Timing("a", "encode", ms=[4.0, 3.0], add_ms=[1.0], copy_ms=[2.0, 1.0], copied=100, moved=150)
    assert timing.share_of_copy == 0.5


def test_threads_share_the_blocks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAST", 1000)
    ran = []
    monkeypatch.setattr(threads.Threads, "run", lambda self, work: ran.append(len(work)) or [one() for one in work])
    rows = rows_of(capsys, "--compressors", "quantize", "--threads", "3")
    assert set(ran) == {3}
    assert [row["threads"] for row in rows] == [3, 3]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_rows_have_the_share_of_copy(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows_of(capsys, "--device", "cuda", "--compressors", "quantize", "topk"):
        assert list(row) == [*KEYS, "share_of_copy"]
        assert row["device"] == "cuda"
        assert row["share_of_copy"] > 0


def test_biased_codes_run_with_error_feedback() -> None:
    arena = kernels.Arena(5000, torch.float32)
    case = kernels.CodecCase(*kernels.compressor_of("quantize_2"), arena)
    total = torch.zeros(5000)
    for number in range(20):
        case.round(number, arena.gradient(number))
        total += arena.out
    true = sum((arena.gradient(number) for number in range(20)), torch.zeros(5000))
    # what is still missing is one residual, less than one step of the code; without feedback it would be twenty errors
    assert (total - true).abs().max() < 2 * arena.gradient(0).abs().max()
    assert not torch.allclose(arena.out, arena.gradient(19), atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads must be 1 or more"),
        (["--device", "cuda"], "torch finds no CUDA device here"),
        (["--numel", "0"], "--numel must be 1 or more"),
        (["--repeat", "0"], "--repeat must be 1 or more"),
        (["--dtype", "int8"], "--dtype"),
        (["--compressors", "gzip"], "'gzip' is unknown; known are bf16, "),
        (["--compressors", "quantize_5"], "bits must be one of"),
        (["--compressors", "quantize_x"], "bits='x' is not a number"),
        (["--compressors", "none_4"], "neither bits nor a ratio"),
        (["--num", "5"], "unrecognized arguments"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        kernels.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_shows_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--numel", "1000", "--repeat", "1", "--compressors", "none", "quantize_8"])
    out = capsys.readouterr().out
    assert out.count("encode") == out.count("decode") == 2
    assert "quantize_8" in out
    assert "1,000 random float32 (0.004 MB)" in out


def test_the_script_runs_from_any_folder_and_saves_a_dated_file(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--numel", "1000", "--repeat", "2", "--compressors", "none", "--json"]
    done = subprocess.run([*command, "--save", "results"], cwd=tmp_path, capture_output=True, text=True, check=True)
    (file,) = (tmp_path / "results").iterdir()
    content = json.loads(file.read_text())
    assert content["rows"] == json.loads(done.stdout)
    assert file.name == f"{content['date']}_kernels.json"
    assert content["command"].startswith("python benchmarks/kernels.py --numel 1000")
    assert content["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert [len(one["ms"]) for one in content["repetitions"]] == [2, 2]


def test_a_row_of_a_whole_tensor_has_one_block() -> None:
    name, compressor = kernels.compressor_of("topk_0.01_tensor")
    assert (name, compressor) == ("topk_0.01_tensor", TopK(0.01, None))
    assert len(kernels.CodecCase(name, compressor, kernels.Arena(100_000, torch.float32))._codec) == 1

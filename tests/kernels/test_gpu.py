"""The Triton kernels: interpreted on the CPU, compiled for GPUs that are not there, and run where there is one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_compress.compressors import get_compressor
from lightning_compress.exchange import backends
from lightning_compress.exchange.backends import CompiledBackend
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.kernels import table as col

triton = pytest.importorskip("triton")
AGREEMENT = Path(__file__).with_name("gpu_agreement.py")
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def agree(**environment: str) -> None:
    """A process of its own: whether kernels are interpreted is decided when Triton is imported."""
    others = {name: value for name, value in os.environ.items() if name not in INTERPRETER}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(AGREEMENT)]
    done = subprocess.run(
        command, env=others | environment, cwd=AGREEMENT.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_kernels_agree_with_the_reference_in_the_interpreter() -> None:
    agree(**INTERPRETER)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_a_device() -> None:
    agree()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted is not compiled")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "name", ["fp16", "fp8", "quantize", "ternary", "onebit", "dithering", "natural", "randomk", "topk", "centered"]
)
def test_kernels_compile_without_a_device(name: str, capability: int, tmp_path: Path, monkeypatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_compress.kernels.gpu import frame, launch

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compressor = get_compressor(name)
    kernels = compressor.gpu_kernels()
    assert kernels is not None
    number, real = ("bf16", "fp32") if capability == 80 else ("fp64", "fp64")
    types = dict.fromkeys(("values", "out"), f"*{number}") | {"state": f"*{real}"}
    types |= dict.fromkeys(("payload", "status", "marks"), "*u8") | dict.fromkeys(("read", "write", "table"), "*i64")
    types |= dict.fromkeys(("device_scale", "shared"), "*fp32")
    constants = launch.constants(kernels, compressor.block_size or 1)
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    if capability == 90:  # neither memory nor scales from elsewhere
        constants |= dict.fromkeys(("read", "write", "device_scale", "shared"))
    for kernel, coder in ((frame.encode_blocks, kernels.encode), (frame.decode_blocks, kernels.decode)):
        names = [p.name for p in kernel.params]
        fixed = {name: value for name, value in (constants | {"CODER": coder}).items() if name in names}
        scalars = {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
        signature = {name: "constexpr" if name in fixed else (types | scalars)[name] for name in names}
        source, target = ASTSource(kernel, signature, fixed), GPUTarget("cuda", capability, 32)
        ptx = triton.compile(source, target=target, options=options).asm["ptx"]
        assert f".target sm_{capability}" in ptx
        for word in ("fma.rn", "div.full", ".approx"):
            assert word not in ptx, f"{word} rounds otherwise than the reference"


def test_without_triton_the_torch_functions_run_and_a_warning_says_so(monkeypatch, caplog) -> None:
    backends._launch.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("lightning_compress.kernels.gpu.")]:
        monkeypatch.delitem(sys.modules, name)
    table = torch.zeros(1, col.COLUMNS, dtype=torch.int64)
    table[0, col.LENGTH] = table[0, col.ROW] = 1
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the CPU passes for a device
    try:
        with caplog.at_level(logging.WARNING):
            codecs = [BlockCodec(get_compressor("quantize"), table) for _ in range(3)]
        assert all(isinstance(one.backend, CompiledBackend) for one in codecs)
        assert sum("pip install triton" in record.message for record in caplog.records) == 1
    finally:
        backends._launch.cache_clear()

"""What makes the CPU kernels fast and cannot be seen in what they compute."""

from __future__ import annotations

import numba
import torch

from lightning_compress.compressors import CenteredTopK
from lightning_compress.exchange.codec import compile_kernels


def test_code_asks_the_memory_ahead_and_counts_no_references() -> None:
    compressor = CenteredTopK()  # its kernels pass jobs and slices around
    compile_kernels([compressor], [torch.float32])
    kernels = compressor.cpu_kernels()
    for kernel in (kernels.encode, kernels.decode):
        fresh = numba.jit(**kernel.targetoptions)(kernel.py_func)  # numba shows nothing of what comes from its cache
        fresh.compile(kernel.signatures[0])
        (code,) = fresh.inspect_asm().values()
        assert "prefetch" in code
        assert "NRT_incref" not in code

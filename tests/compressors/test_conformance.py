"""Every family passes the public conformance suite; and the suite finds the defects that it is there for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.centered import CenteredTopK
from lightning_compress.compressors.dithering import LinearDithering
from lightning_compress.compressors.natural import NaturalDithering
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.onebit import OneBit
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.randomk import RandomK
from lightning_compress.compressors.ternary import Ternary
from lightning_compress.compressors.topk import TopK
from lightning_compress.kernels import table as col
from lightning_compress.testing import CHECKS, check_compressor

FAMILIES = [
    NoCompression(),
    Cast("fp16"),
    Cast("bf16"),
    Cast("fp32"),
    Cast("fp8"),
    Cast("fp8", block_size=None),
    Quantize(2),
    Quantize(3, block_size=100),
    Quantize(4),
    Quantize(8),
    Quantize(4, block_size=None),
    Ternary(),
    Ternary(block_size=64),
    Ternary(block_size=None),
    OneBit(),
    OneBit(block_size=37),
    OneBit(block_size=None),
    TopK(0.01),
    TopK(0.1, block_size=None),
    CenteredTopK(),
    CenteredTopK(0.06, block_size=None),
    RandomK(1 / 32),
    RandomK(1 / 8, block_size=None),
    LinearDithering(5),
    LinearDithering(2),
    NaturalDithering(3),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("compressor", FAMILIES, ids=repr)
def test_family_conforms(compressor, check):
    check_compressor(compressor, [check])


class Plain(Compressor):
    """float32 as it is: a compressor to spoil."""

    name = "plain"

    def __init__(self, block_size: int | None = 64) -> None:
        self.block_size = block_size

    def payload_nbytes(self, numel: int, row: int | None = None) -> int:
        return 4 * numel

    def encode(self, p: Tensor, blocks: Blocks) -> Tensor:
        limit = torch.finfo(torch.float32).max
        return p.clamp(-limit, limit).float().contiguous().view(torch.uint8)

    def decode(self, payload: Tensor, blocks: Blocks) -> Tensor:
        return payload.clone().view(torch.float32)


class Named(Plain):
    name = "Named"


class Unequal(Plain):
    def __eq__(self, other):
        return self is other

    __hash__ = Compressor.__hash__


class WrongSize(Plain):
    def payload_nbytes(self, numel, row=None):
        return 4 * numel + (numel == 64)


class DataDependentSize(Plain):
    def encode(self, p, blocks):
        code = super().encode(p, blocks)
        return code if p.any() else code[:, :4]


class ZeroIsOne(Plain):
    def decode(self, payload, blocks):
        return super().decode(payload, blocks) + 1


class SignOfZero(Plain):
    """What 1-bit codes do to zeros."""

    def encode(self, p, blocks):
        return super().encode(torch.where(p == 0, 1e-3, p), blocks)


class NoSign(Plain):
    def encode(self, p, blocks):
        return super().encode(p.abs(), blocks)


class Overflows(Plain):
    def encode(self, p, blocks):
        return (p * 2).float().view(torch.uint8)


class ChangesItsInput(Plain):
    def encode(self, p, blocks):
        return super().encode(p.mul_(0.5), blocks)


class GlobalNoise(Plain):
    def encode(self, p, blocks):
        return super().encode(p + torch.rand_like(p), blocks)


class ScaleOfTheBatch(Plain):
    def encode(self, p, blocks):
        return super().encode(p / p.abs().amax().clamp_min(1e-30), blocks)


class SaysUnbiased(Plain):
    unbiased = True

    def encode(self, p, blocks):
        return super().encode(p.round(), blocks)


class DrawsWithReplacement(Plain):
    """Defect 3 of the predecessors: random-k that draws an element twice counts it once."""

    unbiased = True

    def encode(self, p, blocks):
        generator = torch.Generator().manual_seed(blocks.salt)
        drawn = torch.randint(0, blocks.numel, (blocks.numel // 2 + 1,), generator=generator)
        kept = torch.zeros(blocks.numel).index_fill_(0, drawn, 2.0)
        return super().encode(p * kept, blocks)


class SaysContracting(Plain):
    def contraction(self, numel):
        return 0.9

    def encode(self, p, blocks):
        return super().encode(p * 0.5, blocks)


class Narrow(Plain):
    def decode(self, payload, blocks):
        return super().decode(payload, blocks).double()


class ReadsAnIndex(Plain):
    def decode(self, payload, blocks):
        values = super().decode(payload, blocks)
        return values.gather(1, payload[:, :1].long()) * values


class TwiceTooMuch(Plain):
    """Sends twice of everything: error feedback swings ever further."""

    def encode(self, p, blocks):
        return super().encode(p * 2.5, blocks)


class SaysLinear(Plain):
    linear = True
    value_dtype = torch.float32

    def decode(self, payload, blocks):
        return super().decode(payload, blocks) ** 2


@pytest.mark.parametrize(
    ("spoiled", "check"),
    [
        (Named, "is_a_value"),
        (Unequal, "is_a_value"),
        (WrongSize, "payload_size_is_known"),
        (DataDependentSize, "payload_size_is_known"),
        (ZeroIsOne, "zero_bytes_are_zeros"),
        (SignOfZero, "zeros_stay_zeros"),
        (SignOfZero, "rows_of_zeros_stay_silent"),
        (NoSign, "single_elements"),
        (Overflows, "single_elements"),
        (Overflows, "float64_is_welcome"),
        (ChangesItsInput, "is_deterministic"),
        (GlobalNoise, "is_deterministic"),
        (ScaleOfTheBatch, "is_deterministic"),
        (SaysUnbiased, "is_unbiased"),
        (DrawsWithReplacement, "is_unbiased"),
        (SaysContracting, "contracts_as_claimed"),
        (Narrow, "float64_is_welcome"),
        (TwiceTooMuch, "error_feedback_stays_bounded"),
        (SaysLinear, "payloads_add_up"),
    ],
)
def test_suite_finds_a_defect(spoiled, check):
    with pytest.raises(AssertionError, match=f"fails '{check}'"):
        check_compressor(spoiled(), [check])


def test_suite_lets_an_exception_of_decode_through():
    with pytest.raises(RuntimeError, match="out of bounds"):
        check_compressor(ReadsAnIndex(), ["any_bytes_decode"])


def test_suite_passes_what_is_right():
    check_compressor(Plain())
    check_compressor(Plain(block_size=None))


@dataclass
class Spoiling:
    """How the kernels below differ from right ones."""

    unscale: bool = True
    keeps_half: float = 0.0
    payload_off: int = 0
    state_off: int = 0
    reads_off: int = 0
    ignores_status: bool = False


class WithKernels(Plain):
    """``Plain`` with kernels in Python that a test can spoil."""

    def __init__(self, **spoiling: Any) -> None:
        super().__init__()
        self.spoiling = tuple(sorted(spoiling.items()))

    def cpu_kernels(self) -> CPUKernels:
        return CPUKernels(encode_slowly, decode_slowly, (Spoiling(**dict(self.spoiling)),))


def encode_slowly(job: Any, spoiling: Spoiling) -> None:
    limit = np.finfo(np.float32).max
    for row in job.table:
        n, source, at, parameter = row[col.LENGTH], row[col.SOURCE], row[col.PAYLOAD], row[col.PARAMETER]
        if job.status[parameter] != col.PRESENT and not spoiling.ignores_status:
            continue
        state = row[col.STATE]
        p = job.weight * (job.values[source : source + n] + job.scale * job.state[state + job.read[parameter] :][:n])
        if not np.isfinite(p).all():
            job.marks[parameter] = col.NONFINITE
            continue
        sent = np.clip(p, -limit, limit).astype(np.float32)
        job.payload[at + spoiling.payload_off :][: 4 * n] = sent.view(np.uint8)
        left = p - sent + spoiling.keeps_half * p
        write = state + job.write[parameter] + spoiling.state_off
        job.state[write : write + n] = left * (job.unscale if spoiling.unscale else 1)


def decode_slowly(job: Any, spoiling: Spoiling) -> None:
    for row in job.table:
        n, source, at = row[col.LENGTH], row[col.SOURCE], row[col.PAYLOAD]
        status = job.status[row[col.PARAMETER]]
        if status == col.PRESENT or spoiling.ignores_status:
            codes = [job.payload[rank * job.stride + at + spoiling.reads_off :][: 4 * n] for rank in range(job.ranks)]
            total = sum(
                (code.copy().view(np.float32).astype(job.out.dtype) for code in codes), start=np.zeros(n, job.out.dtype)
            )
            job.out[source : source + n] = job.weight * total
        elif status == col.NONFINITE:
            job.out[source : source + n] = np.nan


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    ("spoiling", "check"),
    [
        ({"keeps_half": 0.5}, "kernels_are_the_reference"),
        ({"keeps_half": 0.5}, "error_feedback_conserves"),
        ({"keeps_half": -1.5}, "error_feedback_stays_bounded"),
        ({"unscale": False, "keeps_half": 1e-3}, "error_feedback_conserves"),
        ({"payload_off": 1}, "kernels_are_the_reference"),
        ({"state_off": 1}, "kernels_are_the_reference"),
        ({"reads_off": -1}, "any_bytes_decode"),
        ({"ignores_status": True}, "absent_and_nonfinite"),
    ],
)
def test_suite_finds_a_defect_of_kernels(spoiling, check):
    with pytest.raises(AssertionError, match=f"fails '{check}'"):
        check_compressor(WithKernels(**spoiling), [check])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_suite_passes_kernels_that_are_right():
    check_compressor(WithKernels())

"""Who codes a batch of blocks: Triton's kernels, compiled CPU kernels, or the compressor's torch functions."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_compress.compressors.base import Blocks, Compressor, CPUKernels
from lightning_compress.exchange.threads import Threads
from lightning_compress.kernels import table as col
from lightning_compress.kernels.batch import DecodeBatch, EncodeBatch, real
from lightning_compress.kernels.cpu.job import DecodeJob, EncodeJob, scratch_words
from lightning_compress.kernels.gpu import LARGEST, GPUKernels

log = logging.getLogger(__name__)


class Backend(Protocol):
    """Codes the batches of one block table."""

    def encode(self, batch: EncodeBatch) -> None:
        """Writes the blocks' codes, their memory and their status."""

    def decode(self, batch: DecodeBatch) -> None:
        """Writes the blocks' values."""


def choose(compressor: Compressor, table: Tensor, threads: Threads, use_reference: bool) -> Backend:
    """The fastest backend that codes the blocks of ``table`` with this compressor."""
    longest = int(table[:, col.LENGTH].max())
    if not use_reference and (gpu := _gpu_kernels(compressor, table.device, longest)) is not None:
        return TritonBackend(gpu, longest)
    if not use_reference and table.device.type == "cpu" and (cpu := compressor.cpu_kernels()) is not None:
        return CompiledBackend(cpu, table, threads)
    return ReferenceBackend(compressor, table)


class TritonBackend:
    """One launch for all blocks, on the current stream."""

    def __init__(self, kernels: GPUKernels, longest: int) -> None:
        self._kernels = kernels
        self._longest = longest

    def encode(self, batch: EncodeBatch) -> None:
        """See ``Backend``."""
        _launch().encode(self._kernels, self._longest, batch)

    def decode(self, batch: DecodeBatch) -> None:
        """See ``Backend``."""
        _launch().decode(self._kernels, self._longest, batch)


class CompiledBackend:
    """Numba's kernels; each thread has a range of blocks, so their number changes no bit."""

    def __init__(self, kernels: CPUKernels, table: Tensor, threads: Threads) -> None:
        self._kernels = kernels
        self._threads = threads
        self._ranges = threads.ranges(table[:, col.LENGTH])
        self._longest = int(table[:, col.LENGTH].max())

    def encode(self, batch: EncodeBatch) -> None:
        """See ``Backend``."""
        job = self._encode_job(batch)
        jobs = [self._part_of(job, blocks) for blocks in self._ranges]
        self._threads.run([partial(self._kernels.encode, part, *self._kernels.arguments) for part in jobs])
        for part in jobs:
            np.maximum(job.status, part.marks, out=job.status)

    def decode(self, batch: DecodeBatch) -> None:
        """See ``Backend``."""
        number = _NUMPY_TYPES[real(batch.out)][0]
        job = DecodeJob(
            payload=batch.payload.numpy(),
            stride=batch.stride,
            ranks=batch.ranks,
            out=_array(batch.out),
            weight=number(batch.weight),
            table=batch.table.numpy(),
            status=batch.status.numpy(),
            salt=batch.salt,
            total=np.empty(0, number),
            scratch=np.empty(0, np.uint64),
        )
        jobs = [
            job._replace(table=job.table[blocks], total=np.empty(self._longest, number), scratch=self._scratch())
            for blocks in self._ranges
        ]
        self._threads.run([partial(self._kernels.decode, part, *self._kernels.arguments) for part in jobs])

    def _encode_job(self, batch: EncodeBatch) -> EncodeJob:
        """All blocks, without scratch."""
        number, integer = _NUMPY_TYPES[real(batch.values)]
        memory, status, nothing = batch.memory, batch.status.numpy(), np.empty(0, number)
        return EncodeJob(
            values=_array(batch.values),
            weight=number(batch.weight),
            scale=number(batch.scale),
            unscale=number(1.0 / (batch.weight * float(batch.scale))),
            state=memory.state.numpy(),
            read=memory.read.numpy(),
            write=memory.write.numpy(),
            compensate=memory.compensate,
            update=memory.update,
            payload=batch.payload.numpy(),
            table=batch.table.numpy(),
            status=status,
            marks=status,
            salt=batch.salt,
            shared=np.empty(0, np.float32) if batch.shared is None else batch.shared.numpy(),
            p=nothing,
            bits=nothing.view(integer),
            mask=integer(np.iinfo(integer).max),
            scratch=np.empty(0, np.uint64),
        )

    def _part_of(self, job: EncodeJob, blocks: slice) -> EncodeJob:
        """A range of blocks, with scratch of its own."""
        p = np.empty(self._longest + 1, job.p.dtype)
        return job._replace(
            table=job.table[blocks],
            shared=job.shared[blocks],
            marks=job.marks.copy(),
            p=p,
            bits=p.view(job.bits.dtype),
            scratch=self._scratch(),
        )

    def _scratch(self) -> np.ndarray[Any, Any]:
        return np.empty(scratch_words(self._longest), np.uint64)


class ReferenceBackend:
    """The compressor's torch functions, for all blocks of one length together."""

    def __init__(self, compressor: Compressor, table: Tensor) -> None:
        self._compressor = compressor
        self._groups = list(_equal_blocks(table))

    def encode(self, batch: EncodeBatch) -> None:
        """See ``Backend``."""
        values, memory, status = batch.values.to(real(batch.values)), batch.memory, batch.status
        present = status == col.PRESENT
        for group in self._groups:
            p = values[group.source]
            if memory.compensate:
                old = memory.state[group.state + memory.read[group.parameter].unsqueeze(1)]
                p = p + batch.scale * old
            p = batch.weight * p
            finite = torch.isfinite(p).all(dim=1)
            marks = torch.where(present[group.parameter] & ~finite, col.NONFINITE, col.ABSENT).to(torch.uint8)
            status.scatter_reduce_(0, group.parameter, marks, "amax")
            coded = (present[group.parameter] & finite).unsqueeze(1)
            p = torch.where(coded, p, 0.0)
            blocks = group.blocks(batch.salt, None if batch.shared is None else batch.shared[group.index])
            code = self._compressor.encode(p, blocks)
            code = torch.where(coded, code, 0)  # a whole tensor's scale, perhaps inf, belongs to no block of zeros
            batch.payload[group.payload_index(code.shape[1])] = code
            if memory.update:
                decoded = self._compressor.decode(code, blocks).to(p.dtype)
                left = (p - decoded) * (1.0 / (batch.weight * batch.scale))
                write = group.state + memory.write[group.parameter].unsqueeze(1)
                memory.state[write] = torch.where(coded, left, old if memory.compensate else 0.0)

    def decode(self, batch: DecodeBatch) -> None:
        """See ``Backend``."""
        out = batch.out
        for group in self._groups:
            blocks = group.blocks(batch.salt, None)
            index = group.payload_index(self._compressor.payload_nbytes(group.length, group.row))
            total = torch.zeros(group.source.shape, dtype=real(out), device=out.device)
            for rank in range(batch.ranks):
                code = batch.payload[index + rank * batch.stride]
                total += self._compressor.decode(code, blocks).to(total.dtype)
            seen = batch.status[group.parameter].unsqueeze(1)
            total = torch.where(seen == col.NONFINITE, torch.nan, batch.weight * total)
            out[group.source] = torch.where(seen == col.ABSENT, out[group.source], total.to(out.dtype))


def _gpu_kernels(compressor: Compressor, device: torch.device, longest: int) -> GPUKernels | None:
    """The compressor's Triton kernels, if ``device`` runs them: CUDA, or the CPU by way of Triton's own interpreter."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if longest > LARGEST or _launch() is None:
        return None
    return compressor.gpu_kernels()


@cache
def _launch() -> Any:
    """``kernels.gpu.launch``, or None without Triton."""
    try:
        return importlib.import_module("lightning_compress.kernels.gpu.launch")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        log.warning("Triton is missing: on CUDA compression takes torch's functions, which is slow. pip install triton")
        return None


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    """The memory of ``values`` as compiled kernels take it: half precision as its bits (see ``kernels.cpu.formats``)."""
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(values.dtype)
    return values.numpy() if bits is None else values.view(bits).numpy()


_NUMPY_TYPES: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.float32, np.int32),
    torch.float64: (np.float64, np.int64),
}


@dataclass(frozen=True)
class _EqualBlocks:
    """Blocks of one length and one row length, as index matrices."""

    length: int
    row: int
    index: Tensor
    source: Tensor
    state: Tensor
    parameter: Tensor
    payload: Tensor
    start: Tensor
    key: Tensor

    def blocks(self, salt: int, statistic: Tensor | None) -> Blocks:
        return Blocks(self.length, self.row, self.start, self.key, salt, statistic)

    def payload_index(self, nbytes: int) -> Tensor:
        return self.payload + torch.arange(nbytes, device=self.payload.device)


def _equal_blocks(table: Tensor) -> Iterator[_EqualBlocks]:
    for length, row in torch.unique(table[:, [col.LENGTH, col.ROW]], dim=0).tolist():
        index = ((table[:, col.LENGTH] == length) & (table[:, col.ROW] == row)).nonzero().squeeze(1)
        part = table[index]
        element = torch.arange(length, device=table.device)
        yield _EqualBlocks(
            length=length,
            row=row,
            index=index,
            source=part[:, col.SOURCE, None] + element,
            state=part[:, col.STATE, None] + element,
            parameter=part[:, col.PARAMETER],
            payload=part[:, col.PAYLOAD, None],
            start=part[:, col.START],
            key=part[:, col.KEY],
        )

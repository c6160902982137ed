"""Codes all blocks of a table at once: compiled kernels on CPU and CUDA, the compressor's torch functions elsewhere."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_compress.compressors.base import Blocks, Compressor
from lightning_compress.exchange.threads import ALONE, Threads
from lightning_compress.kernels import table as col
from lightning_compress.kernels.cpu.job import DecodeJob, EncodeJob, scratch_words
from lightning_compress.kernels.gpu import LARGEST, GPUKernels
from lightning_compress.kernels.reference.bits import to_float32
from lightning_compress.memory.store import StoreView

log = logging.getLogger(__name__)


@dataclass
class MemoryView:
    """One exchange's access to a memory's flat store.

    Attributes:
        state: The store, float32 or float64; empty without a memory.
        read: Added to a block's state offset when it is read, int64 [parameters of the bucket].
        write: The same when it is written.
        compensate: Whether the state is added to the gradient before encoding.
        update: Whether what encoding left out becomes the new state.
    """

    state: Tensor
    read: Tensor
    write: Tensor
    compensate: bool
    update: bool

    def get(self, parameter: int, offset: int, numel: int) -> Tensor:
        """What is read of a parameter of the bucket, whose part of the store begins at ``offset``: [numel]."""
        if not self.read.is_cuda:
            return self.state.narrow(0, offset + int(self.read[parameter]), numel)
        # which copy it is, only the device knows
        return self.state[torch.arange(offset, offset + numel, device=self.read.device) + self.read[parameter]]

    @classmethod
    def of(cls, store: StoreView | None, values: Tensor) -> MemoryView:
        """Error feedback on ``store``; without one, nothing is added and nothing is kept."""
        if store is None:
            nothing = torch.empty(0, dtype=torch.int64, device=values.device)
            return cls(values.new_empty(0, dtype=_real(values)), nothing, nothing, compensate=False, update=False)
        return cls(store.store.data, store.read, store.write, compensate=True, update=True)


class BlockCodec:
    """One compressor applied to one block table.

    Args:
        compressor: What a block's code is.
        table: Block table, int64 [n, COLUMNS] (see ``kernels.table``), on the device of the values.
        per_tensor: The table holds whole tensors, and a compressor without a block size takes one scale for each of
            them.
        use_reference: Forces the torch functions.
        threads: Who works on the CPU; each thread has a range of blocks, so their number changes no bit.
    """

    def __init__(
        self,
        compressor: Compressor,
        table: Tensor,
        per_tensor: bool = False,
        use_reference: bool = False,
        threads: Threads = ALONE,
    ) -> None:
        self.compressor = compressor
        self.table = table
        self.longest = int(table[:, col.LENGTH].max()) if len(table) else 0
        self._gpu = None if use_reference else _gpu_kernels(compressor, table.device, self.longest)
        compiled = table.device.type == "cpu" and self._gpu is None and not use_reference
        self._kernels = compressor.cpu_kernels() if compiled else None
        self._threads = threads
        self._ranges = threads.ranges(table[:, col.LENGTH]) if self._kernels and len(table) else []
        self._groups = [] if self._kernels or self._gpu else list(_equal_blocks(table))
        scaled = type(compressor).statistic is not Compressor.statistic
        self._tensors = list(_whole_tensors(table)) if per_tensor and scaled and compressor.block_size is None else []

    def __len__(self) -> int:
        return len(self.table)

    def encode(
        self,
        values: Tensor,
        memory: MemoryView,
        payload: Tensor,
        status: Tensor,
        *,
        weight: float = 1.0,
        scale: float | Tensor = 1.0,
        salt: int = 0,
    ) -> None:
        """Encodes p = weight * (values + scale * state); state <- (p - decode(payload)) / (weight * scale).

        Args:
            values: Flat gradients, any floating dtype.
            memory: Where the residual is.
            payload: uint8, zeros; the table says where each block goes.
            status: uint8 per parameter; blocks of parameters that are not PRESENT are left out. A parameter whose
                p is not finite is set to NONFINITE here, and its non-finite blocks leave no trace in the memory.
            weight: 1, or 1 / world size where the exchange adds up payloads.
            scale: The loss scale of ``values``.
            salt: Counter of the random numbers.
        """
        if not len(self.table):
            return
        statistics = self._statistics(values, memory, status, weight, scale)
        how = (values, memory, payload, status, weight, scale, salt, statistics)
        if self._gpu is not None:
            self._encode_gpu(*how)
        elif self._kernels is not None:
            self._encode_cpu(*how)
        else:
            self._encode_reference(*how)

    def decode(
        self,
        payload: Tensor,
        out: Tensor,
        status: Tensor,
        *,
        stride: int = 0,
        ranks: int = 1,
        weight: float = 1.0,
        salt: int = 0,
    ) -> None:
        """Adds up the ranks' decoded blocks: payload r begins at ``r * stride``, the sum is multiplied by ``weight``.

        Blocks of ABSENT parameters leave ``out`` alone, blocks of NONFINITE ones become NaN.
        """
        if not len(self.table):
            return
        how = (payload, out, status, stride, ranks, weight, salt)
        if self._gpu is not None:
            self._decode_gpu(*how)
        elif self._kernels is not None:
            self._decode_cpu(*how)
        else:
            self._decode_reference(*how)

    def _statistics(
        self, values: Tensor, memory: MemoryView, status: Tensor, weight: float, scale: float | Tensor
    ) -> Tensor | None:
        """One scale per tensor, float32 per parameter of the bucket: the papers' granularity costs a pass of its own."""
        statistics = None
        for source, state, parameter, row, numel in self._tensors:
            p = values[source : source + numel].to(_real(values))
            if memory.compensate:
                p = p + scale * memory.get(parameter, state, numel)
            one = self.compressor.statistic(weight * p, row)
            if one is not None:
                statistics = values.new_zeros(len(status), dtype=torch.float32) if statistics is None else statistics
                statistics[parameter] = to_float32(one)
                # its finite pieces cannot be coded either: their memory must not take up the infinite scale
                unusable = (status[parameter] == col.PRESENT) & ~torch.isfinite(one)
                status[parameter] = torch.where(unusable, col.NONFINITE, status[parameter])
        return statistics

    def _encode_gpu(
        self,
        values: Tensor,
        memory: MemoryView,
        payload: Tensor,
        status: Tensor,
        weight: float,
        scale: float | Tensor,
        salt: int,
        statistics: Tensor | None,
    ) -> None:
        _launch().encode(
            self._gpu,
            self.longest,
            values=values,
            weight=weight,
            scale=scale,
            state=memory.state,
            read=memory.read if memory.compensate else None,
            write=memory.write if memory.update else None,
            payload=payload,
            table=self.table,
            status=status,
            shared=self._of_blocks(statistics),
            salt=salt,
        )

    def _decode_gpu(
        self, payload: Tensor, out: Tensor, status: Tensor, stride: int, ranks: int, weight: float, salt: int
    ) -> None:
        _launch().decode(
            self._gpu,
            self.longest,
            payload=payload,
            stride=stride,
            ranks=ranks,
            out=out,
            weight=weight,
            table=self.table,
            status=status,
            salt=salt,
        )

    def _encode_cpu(
        self,
        values: Tensor,
        memory: MemoryView,
        payload: Tensor,
        status: Tensor,
        weight: float,
        scale: float | Tensor,
        salt: int,
        statistics: Tensor | None,
    ) -> None:
        assert self._kernels is not None
        real, integer = _NUMPY_TYPES[_real(values)]
        shared = self._of_blocks(statistics)
        status_array, nothing = status.numpy(), np.empty(0, real)
        job = EncodeJob(
            values=_array(values),
            weight=real(weight),
            scale=real(scale),
            unscale=real(1.0 / (weight * float(scale))),
            state=memory.state.numpy(),
            read=memory.read.numpy(),
            write=memory.write.numpy(),
            compensate=memory.compensate,
            update=memory.update,
            payload=payload.numpy(),
            table=self.table.numpy(),
            status=status_array,
            marks=status_array,
            salt=salt,
            shared=np.empty(0, np.float32) if shared is None else shared.numpy(),
            p=nothing,
            bits=nothing.view(integer),
            mask=integer(np.iinfo(integer).max),
            scratch=np.empty(0, np.uint64),
        )
        jobs = [self._part_of(job, blocks) for blocks in self._ranges]
        self._threads.run([partial(self._kernels.encode, part, *self._kernels.arguments) for part in jobs])
        for part in jobs:
            np.maximum(status_array, part.marks, out=status_array)

    def _part_of(self, job: EncodeJob, blocks: slice) -> EncodeJob:
        """A range of blocks, with scratch of its own."""
        p = np.empty(self.longest + 1, job.p.dtype)
        return job._replace(
            table=job.table[blocks],
            shared=job.shared[blocks],
            marks=job.marks.copy(),
            p=p,
            bits=p.view(job.bits.dtype),
            scratch=self._scratch(),
        )

    def _scratch(self) -> np.ndarray[Any, Any]:
        return np.empty(scratch_words(self.longest), np.uint64)

    def _decode_cpu(
        self, payload: Tensor, out: Tensor, status: Tensor, stride: int, ranks: int, weight: float, salt: int
    ) -> None:
        assert self._kernels is not None
        real = _NUMPY_TYPES[_real(out)][0]
        job = DecodeJob(
            payload=payload.numpy(),
            stride=stride,
            ranks=ranks,
            out=_array(out),
            weight=real(weight),
            table=self.table.numpy(),
            status=status.numpy(),
            salt=salt,
            total=np.empty(0, real),
            scratch=np.empty(0, np.uint64),
        )
        jobs = [
            job._replace(table=job.table[blocks], total=np.empty(self.longest, real), scratch=self._scratch())
            for blocks in self._ranges
        ]
        self._threads.run([partial(self._kernels.decode, part, *self._kernels.arguments) for part in jobs])

    def _of_blocks(self, statistics: Tensor | None) -> Tensor | None:
        """What stands for each block's parameter."""
        return None if statistics is None else statistics[self.table[:, col.PARAMETER]]

    def _encode_reference(
        self,
        values: Tensor,
        memory: MemoryView,
        payload: Tensor,
        status: Tensor,
        weight: float,
        scale: float | Tensor,
        salt: int,
        statistics: Tensor | None,
    ) -> None:
        values = values.to(_real(values))
        present = status == col.PRESENT
        for group in self._groups:
            p = values[group.source]
            if memory.compensate:
                old = memory.state[group.state + memory.read[group.parameter].unsqueeze(1)]
                p = p + scale * old
            p = weight * p
            finite = torch.isfinite(p).all(dim=1)
            marks = torch.where(present[group.parameter] & ~finite, col.NONFINITE, col.ABSENT).to(torch.uint8)
            status.scatter_reduce_(0, group.parameter, marks, "amax")
            coded = (present[group.parameter] & finite).unsqueeze(1)
            p = torch.where(coded, p, 0.0)
            blocks = group.blocks(salt, None if statistics is None else statistics[group.parameter])
            code = self.compressor.encode(p, blocks)
            code = torch.where(coded, code, 0)  # a whole tensor's scale, perhaps inf, belongs to no block of zeros
            payload[group.payload_index(code.shape[1])] = code
            if memory.update:
                left = (p - self.compressor.decode(code, blocks).to(p.dtype)) * (1.0 / (weight * scale))
                write = group.state + memory.write[group.parameter].unsqueeze(1)
                memory.state[write] = torch.where(coded, left, old if memory.compensate else 0.0)

    def _decode_reference(
        self, payload: Tensor, out: Tensor, status: Tensor, stride: int, ranks: int, weight: float, salt: int
    ) -> None:
        for group in self._groups:
            blocks = group.blocks(salt, None)
            index = group.payload_index(self.compressor.payload_nbytes(group.length, group.row))
            total = torch.zeros(group.source.shape, dtype=_real(out), device=out.device)
            for rank in range(ranks):
                total += self.compressor.decode(payload[index + rank * stride], blocks).to(total.dtype)
            seen = status[group.parameter].unsqueeze(1)
            total = torch.where(seen == col.NONFINITE, torch.nan, weight * total)
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


def compile_kernels(compressors: Iterable[Compressor], dtypes: Iterable[torch.dtype]) -> None:
    """Runs every CPU kernel once on one element, as the exchange will run it."""
    row = torch.zeros(1, col.COLUMNS, dtype=torch.int64)
    row[0, col.LENGTH] = row[0, col.ROW] = 1
    zero, status = torch.zeros(1, dtype=torch.int64), torch.full((1,), col.PRESENT, dtype=torch.uint8)
    for compressor, dtype in product(compressors, dtypes):
        codec = BlockCodec(compressor, row)
        values = torch.ones(1, dtype=dtype)
        state = torch.zeros(1, dtype=_real(values))
        payload = torch.zeros(compressor.payload_nbytes(1, 1), dtype=torch.uint8)
        codec.encode(values, MemoryView(state, zero, zero, True, True), payload, status)
        codec.decode(payload, values, status)


def _real(values: Tensor) -> torch.dtype:
    """The type in which values are coded: half precision in float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


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


def _whole_tensors(table: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Source, state, parameter, row and number of elements of every parameter in the table."""
    for index in torch.unique(table[:, col.PARAMETER]).tolist():
        blocks = table[table[:, col.PARAMETER] == index]
        first = blocks[0].tolist()
        yield first[col.SOURCE], first[col.STATE], index, first[col.ROW], int(blocks[:, col.LENGTH].sum())


def _equal_blocks(table: Tensor) -> Iterator[_EqualBlocks]:
    if not len(table):
        return
    for length, row in torch.unique(table[:, [col.LENGTH, col.ROW]], dim=0).tolist():
        part = table[(table[:, col.LENGTH] == length) & (table[:, col.ROW] == row)]
        element = torch.arange(length, device=table.device)
        yield _EqualBlocks(
            length=length,
            row=row,
            source=part[:, col.SOURCE, None] + element,
            state=part[:, col.STATE, None] + element,
            parameter=part[:, col.PARAMETER],
            payload=part[:, col.PAYLOAD, None],
            start=part[:, col.START],
            key=part[:, col.KEY],
        )

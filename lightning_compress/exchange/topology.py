"""Who sends which bytes to whom.

An exchange is a generator: it computes, yields a collective, and goes on when that is done. Written so, the same code runs
in the pipeline's threads, on CUDA streams, and in the one-process simulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_compress.compressors.base import Compressor
from lightning_compress.exchange.codec import BlockCodec
from lightning_compress.exchange.collectives import AllGather, AllReduce, AllToAll, Collective
from lightning_compress.exchange.correction import Correction
from lightning_compress.exchange.nonfinite import NonfiniteWatch
from lightning_compress.exchange.plan import BucketPart, BucketPlan
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.threads import ALONE, Threads
from lightning_compress.kernels import pages
from lightning_compress.kernels import table as col
from lightning_compress.kernels.reference import hashing
from lightning_compress.kernels.reference.bits import pack, unpack
from lightning_compress.memory.store import StoreView, access

Steps = Iterator[Collective]
_PIECE = 2**19
"""Elements that an owner decodes and encodes at a time on the CPU."""


@dataclass
class BucketJob:
    """One bucket's exchange at one step.

    Attributes:
        buffer: The bucket: the rank's gradient sum on entry, the mean of all ranks at the end.
        status: uint8 per parameter (see ``kernels.table``): who takes part on this rank.
        step: Number of this exchange, the counter of the random numbers.
        scale: Loss scale of the gradients.
        worker: Worker memory, None without one.
        owner: Owner memory, None without one.
        stats: Where times are noted.
        correction: What is sent instead of gradients, None where it is gradients.
        watch: Warns of gradients that are not finite, None where that is not this rank's task.
        seen: uint8 per parameter, who takes part on any rank; known when the exchange has run.
    """

    buffer: Tensor
    status: Tensor
    step: int
    scale: float | Tensor
    worker: StoreView | None
    owner: StoreView | None
    stats: ExchangeStats = field(repr=False)
    correction: Correction | None = None
    watch: NonfiniteWatch | None = field(default=None, repr=False)
    seen: Tensor | None = None


def exchange_dense(buffer: Tensor, world_size: int) -> Steps:
    """What DDP does, to the last bit: it multiplies dense buckets by 1/N, divides sparse ones by N, then sums."""
    if buffer.is_sparse:
        buffer.div_(world_size)
    else:
        buffer.mul_(1.0 / world_size)
    yield AllReduce(buffer)


class Topology(ABC):
    """One way to exchange one bucket. Built once per bucket layout, run once per step.

    Args:
        plan: The bucket's blocks, made for ``owners(world_size)`` owners.
        rank: This process.
        world_size: Number of processes among which payloads travel.
        device: Where the bucket is.
        threads: Who encodes and decodes on the CPU.
    """

    name: ClassVar[str]
    collectives: ClassVar[int]
    """Collectives per bucket."""
    second_encoding: ClassVar[bool] = False
    """Whether owners encode again, and remember what that left out."""
    whole_tensors: ClassVar[bool] = False
    """Whether a selecting compressor without a block size takes a whole tensor as one block."""

    def __init__(
        self, plan: BucketPlan, rank: int, world_size: int, device: torch.device, threads: Threads = ALONE
    ) -> None:
        self.plan, self.rank, self.world_size, self.device, self._threads = plan, rank, world_size, device, threads

    @staticmethod
    def owners(world_size: int) -> int:  # noqa: ARG004  # for those who have owners
        """Ranks among which blocks are dealt out."""
        return 1

    @abstractmethod
    def planned(self) -> list[Collective]:
        """The collectives of one exchange, without content (on torch's meta device): what they put on the wire."""

    @abstractmethod
    def run(self, job: BucketJob) -> Steps:
        """Exchanges the job's bucket in place; yields each collective when it may be issued."""

    def run_dense(self, job: BucketJob) -> Steps:
        """The same without compression; under a correction it is velocities or momenta that are exchanged."""
        if job.correction is not None:
            assert job.worker is not None
            values = job.correction.begin(job.buffer, job.scale)
            job.correction.release(values, job.worker, job.scale)
            job.buffer.copy_(values)
            for view in (job.correction, job.worker):
                view.mark_written(job.status == col.PRESENT)
        yield from exchange_dense(job.buffer, self.world_size)

    def _codec(self, part: BucketPart, **columns: Tensor) -> BlockCodec:
        """A codec for the part's blocks with some columns of the table replaced."""
        return BlockCodec(part.compressor, self._table(part, **columns), per_tensor=True, threads=self._threads)

    def _table(self, part: BucketPart, **columns: Tensor) -> Tensor:
        table = part.table.clone()
        for name, values in columns.items():
            table[:, getattr(col, name.upper())] = values
        return table.to(self.device)

    def _salt(self, compressor: Compressor, step: int, second: bool = False) -> int:
        """Worker and owner round with different numbers, ranks too, except where all must draw the same."""
        rank = self.rank + self.world_size * second if compressor.per_rank else None
        return hashing.salt(compressor.seed, step, rank)

    def _zeros(self, nbytes: int) -> Tensor:
        return pages.zeros(nbytes, torch.uint8, self.device)

    def _empty(self, nbytes: int) -> Tensor:
        return pages.empty(nbytes, torch.uint8, self.device)

    def _encode_all(self, codecs: list[BlockCodec], job: BucketJob, payload: Tensor, weight: float = 1.0) -> None:
        """The worker's encoding of its gradients, or of what stands in their place."""
        values = job.buffer if job.correction is None else job.correction.begin(job.buffer, job.scale)
        memory = access(job.worker, values)
        for codec in codecs:
            salt = self._salt(codec.compressor, job.step)
            codec.encode(values, memory, payload, job.status, weight=weight, scale=job.scale, salt=salt)
        written = job.status == col.PRESENT
        if job.worker is not None:
            job.worker.mark_written(written)
        if job.correction is not None and job.correction.masks:
            for codec in codecs:
                codec.decode(payload, values, job.status, salt=self._salt(codec.compressor, job.step))
            job.correction.mask(values, written)

    def _decode_all(
        self, codecs: list[BlockCodec], job: BucketJob, payload: Tensor, status: Tensor, **how: float
    ) -> None:
        """Decodes what came back into the bucket."""
        job.seen = status
        if job.watch is not None:
            job.watch.look(self.plan.names, status, job.step)
        for codec in codecs:
            salt = self._salt(codec.compressor, job.step)
            codec.decode(payload, job.buffer, status, salt=salt, **how)  # type: ignore[arg-type]

    def _write_headers(self, payload: Tensor, offsets: list[int], status: Tensor) -> None:
        header = pack(status.unsqueeze(0), 2)[0]
        for offset in offsets:
            payload[offset : offset + len(header)] = header

    def _read_headers(self, payload: Tensor, count: int) -> Tensor:
        """The status of every parameter over all ranks, from ``count`` equally long payloads."""
        headers = payload.view(count, -1)[:, : self.plan.header_nbytes]
        return unpack(headers, len(self.plan.names), 2).amax(0).clamp_(max=col.NONFINITE).to(torch.uint8)


class ReduceAll(Topology):
    """One all-reduce of the codes: for linear compressors. The payload is one array of their value type.

    The rank's part is scaled by 1/N before encoding, so that 16-bit sums cannot overflow where the mean does not.
    The header is one number per parameter: 1 present, 0 absent, NaN non-finite; the sum tells what anybody said.
    """

    name = "all_reduce"
    collectives = 1

    def __init__(
        self, plan: BucketPlan, rank: int, world_size: int, device: torch.device, threads: Threads = ALONE
    ) -> None:
        super().__init__(plan, rank, world_size, device, threads)
        self._dtype = plan.parts[0].compressor.value_dtype
        self._head = len(plan.names) * self._dtype.itemsize
        self._nbytes = plan.section_nbytes[0] - plan.header_nbytes + self._head
        shift = self._head - plan.header_nbytes
        self._codecs = [self._codec(part, payload=part.table[:, col.PAYLOAD] + shift) for part in plan.parts]

    @override
    def planned(self) -> list[Collective]:
        return [AllReduce(planned_bytes(self._nbytes))]

    @override
    def run(self, job: BucketJob) -> Steps:
        payload = self._zeros(self._nbytes)
        with job.stats.time("encode", self.device):
            self._encode_all(self._codecs, job, payload, weight=1.0 / self.world_size)
            values = payload.view(self._dtype)
            marks = torch.where(job.status == col.NONFINITE, torch.nan, job.status.to(torch.float32))
            values[: len(marks)] = marks.to(self._dtype)
        yield AllReduce(values)
        with job.stats.time("decode", self.device):
            said = values[: len(marks)]
            status = torch.where(said > 0, col.PRESENT, col.ABSENT).masked_fill(said.isnan(), col.NONFINITE)
            self._decode_all(self._codecs, job, payload, status.to(torch.uint8))


class GatherAll(Topology):
    """One all-gather: every rank decodes everybody's payload. Its traffic grows with N: for a few ranks."""

    name = "all_gather"
    collectives = 1
    whole_tensors = True

    def __init__(
        self, plan: BucketPlan, rank: int, world_size: int, device: torch.device, threads: Threads = ALONE
    ) -> None:
        super().__init__(plan, rank, world_size, device, threads)
        self._codecs = [self._codec(part) for part in plan.parts]

    @override
    def planned(self) -> list[Collective]:
        nbytes = self.plan.section_nbytes[0]
        return [AllGather(planned_bytes(nbytes), planned_bytes(nbytes * self.world_size))]

    @override
    def run(self, job: BucketJob) -> Steps:
        nbytes = self.plan.section_nbytes[0]
        payload, gathered = self._zeros(nbytes), self._empty(nbytes * self.world_size)
        with job.stats.time("encode", self.device):
            self._encode_all(self._codecs, job, payload)
            self._write_headers(payload, [0], job.status)
        yield AllGather(payload, gathered)
        with job.stats.time("decode", self.device):
            status = self._read_headers(gathered, self.world_size)
            how = {"stride": nbytes, "ranks": self.world_size, "weight": 1.0 / self.world_size}
            self._decode_all(self._codecs, job, gathered, status, **how)


class TwoWay(Topology):
    """The collective form of a parameter server (arXiv 2105.07829; CLAN).

    Codes go to the owners; each owner averages its blocks, adds what its last encoding left out, encodes again and sends that
    to everybody. The traffic of a rank does not grow with N. Owners' sections differ by a few blocks; the answers are padded
    to the largest.
    """

    name = "two_way"
    collectives = 2
    second_encoding = True

    def __init__(
        self, plan: BucketPlan, rank: int, world_size: int, device: torch.device, threads: Threads = ALONE
    ) -> None:
        super().__init__(plan, rank, world_size, device, threads)
        sections = torch.tensor(plan.section_nbytes)
        first = sections.cumsum(0) - sections
        self._first: list[int] = first.tolist()
        self._mine = plan.section_nbytes[rank]
        self._answer = max(plan.section_nbytes)
        self._encode = [self._codec(p, payload=p.table[:, col.PAYLOAD] + first[p.owner]) for p in plan.parts]
        self._result = [self._codec(p, payload=p.table[:, col.PAYLOAD] + p.owner * self._answer) for p in plan.parts]
        self._shard = [codec for part in plan.parts for codec in self._pieces(part)]
        self._longest = max((int(codec.table[:, col.LENGTH].sum()) for codec in self._shard), default=0)

    @staticmethod
    @override
    def owners(world_size: int) -> int:
        return world_size

    @override
    def planned(self) -> list[Collective]:
        sections, ranks = self.plan.section_nbytes, self.world_size
        return [
            AllToAll(planned_bytes(sum(sections)), planned_bytes(self._mine * ranks), sections),
            AllGather(planned_bytes(self._answer), planned_bytes(self._answer * ranks)),
        ]

    @override
    def run(self, job: BucketJob) -> Steps:
        send, received = self._zeros(sum(self.plan.section_nbytes)), self._empty(self._mine * self.world_size)
        with job.stats.time("encode", self.device):
            self._encode_all(self._encode, job, send)
            self._write_headers(send, self._first, job.status)
        yield AllToAll(send, received, self.plan.section_nbytes)
        answer, gathered = self._zeros(self._answer), self._empty(self._answer * self.world_size)
        self._own(job, received, answer)
        yield AllGather(answer, gathered)
        with job.stats.time("decode", self.device):
            self._decode_all(self._result, job, gathered, self._read_headers(gathered, self.world_size))

    def _pieces(self, part: BucketPart) -> Iterator[BlockCodec]:
        """This rank's blocks; on the CPU in pieces that stay in its cache between decoding and encoding."""
        rows = (part.owner == self.rank).nonzero().flatten()
        length = part.table[rows, col.LENGTH]
        first = length.cumsum(0) - length
        piece = first // _PIECE if self.device.type == "cpu" else torch.zeros_like(first)
        _, number, counts = piece.unique_consecutive(return_inverse=True, return_counts=True)
        place = torch.zeros(len(part.table), dtype=torch.int64)
        place[rows] = first - first[counts.cumsum(0) - counts][number]
        table = self._table(part, source=place, state=part.owner_state)
        for blocks in rows.to(self.device).split(counts.tolist()):
            yield BlockCodec(part.compressor, table[blocks], threads=self._threads)

    def _own(self, job: BucketJob, received: Tensor, answer: Tensor) -> None:
        """The owner's part: mean of the decoded codes plus residual, encoded again."""
        dtype = torch.float64 if job.buffer.dtype == torch.float64 else torch.float32
        mean = pages.empty(self._longest, dtype, self.device)
        status = self._read_headers(received, self.world_size)
        marks = status.clone()
        for codec in self._shard:
            salt = self._salt(codec.compressor, job.step)
            with job.stats.time("decode", self.device):
                ranks, weight = self.world_size, 1.0 / self.world_size
                codec.decode(received, mean, status, stride=self._mine, ranks=ranks, weight=weight, salt=salt)
            with job.stats.time("encode", self.device):
                # an unbiased code needs no memory, and one in the way would only add variance
                memory = access(None if codec.compressor.unbiased else job.owner, mean)
                salt = self._salt(codec.compressor, job.step, second=True)
                seen = status.clone()  # a parameter's other pieces are coded whatever this one holds
                codec.encode(mean, memory, answer, seen, scale=job.scale, salt=salt)
                marks = torch.maximum(marks, seen)
        if job.owner is not None:
            job.owner.mark_written(marks == col.PRESENT)
        self._write_headers(answer, [0], marks)


def planned_bytes(nbytes: int) -> Tensor:
    """So many bytes without content."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


TOPOLOGIES: dict[str, type[Topology]] = {cls.name: cls for cls in (ReduceAll, GatherAll, TwoWay)}

"""Which slice of which parameter is which block, where its code stands in the payload, and who owns it.

The plan is a pure function of (parameter names, shapes and order, compressors, number of owners): every rank computes
the same one, so no rank waits to learn a size and no payload carries a length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_compress.compressors.base import PIECE, Compressor
from lightning_compress.exchange.dense import DenseRule
from lightning_compress.kernels import table as col
from lightning_compress.kernels.reference.bits import packed_nbytes
from lightning_compress.kernels.reference.hashing import name_key
from lightning_compress.memory.layout import bucket_strides, real_numel

_STATUS_BITS = 2


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan knows of a parameter.

    Attributes:
        name: Its name in ``named_parameters()``, the first one for tied weights.
        numel: Real numbers of it that are exchanged (a complex element counts twice): all, or a shard's.
        row: Real numbers in one first-dimension slice; all of them for scalars and 1-D parameters.
        dense: Whether it travels under the mild code for small tensors.
        first: The first of them inside the parameter.
    """

    name: str
    numel: int
    row: int
    dense: bool
    first: int = 0


def parameter_specs(module: torch.nn.Module, dense: DenseRule, keeps_zero: bool) -> list[ParameterSpec]:
    """The parameters of ``module`` that are exchanged in blocks.

    Those whose gradients DDP expects to be sparse are not among them: they pass uncompressed and need no memory.

    Args:
        module: The wrapped model.
        dense: Which parameters are small.
        keeps_zero: Whether the compressor sends zeros as zeros; otherwise it needs rows that are runs of memory.
    """
    sparse = {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    return [
        _spec(name, parameter, dense, keeps_zero)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in sparse
    ]


def _spec(name: str, parameter: Tensor, dense: DenseRule, keeps_zero: bool) -> ParameterSpec:
    numel = real_numel(parameter)
    shape = parameter.shape
    row = numel if len(shape) <= 1 or not numel else numel // shape[0]
    small = dense.matches(name, shape, parameter.numel())
    if not keeps_zero and len(shape) > 1 and numel:
        # a transposed weight's rows are not runs of memory: it takes the code that keeps zeros
        small = small or bucket_strides(parameter)[0] * shape[0] != parameter.numel()
    return ParameterSpec(name, numel, row, small)


def cut(
    parameters: Sequence[ParameterSpec], coded: Compressor, dense: Compressor, shards: int
) -> list[list[ParameterSpec]]:
    """Cuts every parameter into ``shards`` runs of whole blocks, equal but for a block: the shards of a node's ranks.

    The blocks that are left over go round among the shards, large and small tensors separately, so that all shards become
    about equally long. Like an owner, a block's shard depends on the parameter and the block's number alone.
    """
    cuts: list[list[ParameterSpec]] = [[] for _ in range(shards)]
    turn = {False: 0, True: 0}
    for spec in parameters:
        size = (dense if spec.dense else coded).block_size or PIECE
        each, over = divmod(math.ceil(spec.numel / size), shards)
        favoured = {(turn[spec.dense] + i) % shards for i in range(over)}
        turn[spec.dense] += over
        first = 0
        for shard, parts in enumerate(cuts):
            end = min(spec.numel, first + size * (each + (shard in favoured)))
            parts.append(replace(spec, numel=end - first, first=first))
            first = end
    return cuts


@dataclass(frozen=True)
class _Placed:
    """A parameter's place in the model: its number of the first block, and its offsets in the flat memories."""

    spec: ParameterSpec
    first_block: int
    block_size: int


class BlockPlan:
    """The blocks of a whole model.

    Args:
        parameters: In the order of ``named_parameters()``.
        coded: Compressor of the large tensors.
        dense: Compressor of the small ones.
        owners: Ranks among which the blocks are dealt out; 1 where the exchange has no owners.
        whole_tensors: A selecting compressor without a block size takes a whole tensor as one block (all-gather);
            otherwise such tensors are cut into pieces of 64 Ki elements.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterSpec],
        coded: Compressor,
        dense: Compressor,
        owners: int,
        whole_tensors: bool = False,
    ) -> None:
        self.coded, self.dense, self.owners = coded, dense, owners
        self._placed: dict[str, _Placed] = {}
        # Large and small tensors are dealt out separately: a model that alternates weights and biases stays balanced.
        running = {False: 0, True: 0}
        for spec in parameters:
            compressor = dense if spec.dense else coded
            size = compressor.block_size or (
                max(1, spec.numel) if whole_tensors and compressor.selects else min(PIECE, max(1, spec.numel))
            )
            self._placed[spec.name] = _Placed(spec, running[spec.dense], size)
            running[spec.dense] += math.ceil(spec.numel / size)

    def worker_sizes(self) -> dict[str, int]:
        """Elements of every parameter's worker memory."""
        return {name: placed.spec.numel for name, placed in self._placed.items()}

    def velocity_sizes(self) -> dict[str, int]:
        """Elements of every parameter's velocity; small tensors get their momentum after the exchange."""
        return {name: 0 if placed.spec.dense else placed.spec.numel for name, placed in self._placed.items()}

    def owner_sizes(self, rank: int) -> dict[str, int]:
        """Elements of every parameter's owner memory on ``rank``; an unbiased code leaves nothing to remember."""
        return {
            name: 0 if self.compressor(name).unbiased else int(self._blocks(name)[self._owner(name) == rank, 1].sum())
            for name in self._placed
        }

    def compressor(self, name: str) -> Compressor:
        """The compressor of a parameter."""
        return self.dense if self._placed[name].spec.dense else self.coded

    def held(self, name: str) -> slice:
        """The elements of a parameter that are planned: all, or a shard's."""
        spec = self._placed[name].spec
        return slice(spec.first, spec.first + spec.numel)

    def owned_elements(self, name: str, rank: int) -> Tensor:
        """The elements of a parameter that ``rank`` owns, in the order of its owner memory, int64."""
        mine = self._blocks(name)[self._owner(name) == rank].tolist()
        first = self._placed[name].spec.first
        parts = [torch.arange(first + start, first + start + length) for start, length in mine]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def _blocks(self, name: str) -> Tensor:
        """[start, length] of a parameter's blocks, from its first planned element."""
        placed = self._placed[name]
        start = torch.arange(0, placed.spec.numel, placed.block_size)
        return torch.stack([start, (placed.spec.numel - start).clamp_max(placed.block_size)], dim=1)

    def _owner(self, name: str) -> Tensor:
        """The owner of each block: the running block number modulo the number of owners, whatever the bucket."""
        count = len(self._blocks(name))
        return (self._placed[name].first_block + torch.arange(count)) % self.owners

    def bucket(self, names: Sequence[str], worker_offset: dict[str, int], owner_offset: dict[str, int]) -> BucketPlan:
        """The plan of one DDP bucket.

        Args:
            names: The bucket's parameters in its order.
            worker_offset: Where each parameter begins in the worker memory.
            owner_offset: Where each parameter's owned blocks begin in this rank's owner memory.
        """
        tables: dict[bool, list[Tensor]] = {False: [], True: []}
        owners: dict[bool, list[Tensor]] = {False: [], True: []}
        owner_state: dict[bool, list[Tensor]] = {False: [], True: []}
        spans: list[Span] = []
        source = 0
        for index, name in enumerate(names):
            spec = self._placed[name].spec
            start, length = self._blocks(name).unbind(1)
            owner = self._owner(name)
            table = torch.zeros(len(start), col.COLUMNS, dtype=torch.int64)
            table[:, col.SOURCE] = source + start
            table[:, col.LENGTH] = length
            table[:, col.STATE] = worker_offset[name] + start
            table[:, col.PARAMETER] = index
            table[:, col.START] = spec.first + start
            table[:, col.ROW] = spec.row
            table[:, col.KEY] = name_key(name)
            tables[spec.dense].append(table)
            owners[spec.dense].append(owner)
            owner_state[spec.dense].append(owner_offset[name] + _running_within(owner, length))
            spans.append(Span(index, source, spec.numel, spec.dense))
            source += spec.numel
        parts = [
            BucketPart(compressor, torch.cat(tables[dense]), torch.cat(owners[dense]), torch.cat(owner_state[dense]))
            for dense, compressor in ((False, self.coded), (True, self.dense))
            if tables[dense]
        ]
        return BucketPlan(tuple(names), spans, self.owners, parts)


def _running_within(owner: Tensor, length: Tensor) -> Tensor:
    """For each block, the sum of ``length`` over earlier blocks of the same owner."""
    order = torch.argsort(owner, stable=True)
    sorted_owner, sorted_length = owner[order], length[order]
    before = sorted_length.cumsum(0) - sorted_length
    _, counts = torch.unique_consecutive(sorted_owner, return_counts=True)
    first = counts.cumsum(0) - counts
    before -= before[first].repeat_interleave(counts) if len(before) else before
    return torch.empty_like(before).scatter_(0, order, before)


@dataclass(frozen=True)
class Span:
    """Where a parameter lies in a bucket.

    Attributes:
        index: Its number inside the bucket.
        first: Offset of its first element in the buffer.
        numel: Its elements.
        dense: Whether it travels under the mild code.
    """

    index: int
    first: int
    numel: int
    dense: bool

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter's part of a buffer laid out like the bucket."""
        return buffer[self.first : self.first + self.numel]


@dataclass
class BucketPart:
    """The blocks of one compressor in a bucket.

    Attributes:
        compressor: Their compressor.
        table: Block table on the host; PAYLOAD is the offset inside the owner's section.
        owner: Owner of each block, int64 [n].
        owner_state: Offset of each block in its owner's memory, int64 [n].
    """

    compressor: Compressor
    table: Tensor
    owner: Tensor
    owner_state: Tensor

    def code_nbytes(self) -> Tensor:
        """Bytes of every block's code, int64 [n]."""
        shapes, inverse = torch.unique(self.table[:, [col.LENGTH, col.ROW]], dim=0, return_inverse=True)
        sizes = torch.tensor([self.compressor.payload_nbytes(n, row) for n, row in shapes.tolist()], dtype=torch.int64)
        return sizes[inverse] if len(sizes) else torch.zeros(0, dtype=torch.int64)


class BucketPlan:
    """One bucket's payload: for every owner a section [header][coded blocks][dense blocks].

    The header holds two bits per parameter of the bucket: absent, present or non-finite (see ``kernels.table``).
    A section has the same layout on the way to its owner and on the way back.

    Attributes:
        names: Parameters in the bucket's order.
        spans: Where each of them lies.
        parts: Blocks by compressor.
        header_nbytes: Bytes of the header.
        section_nbytes: Bytes of every owner's section.
    """

    def __init__(self, names: tuple[str, ...], spans: list[Span], owners: int, parts: list[BucketPart]) -> None:
        self.names, self.spans, self.owners, self.parts = names, spans, owners, parts
        self.header_nbytes = packed_nbytes(len(names), _STATUS_BITS)
        filled = torch.full((owners,), self.header_nbytes, dtype=torch.int64)
        for part in parts:
            nbytes = part.code_nbytes()
            part.table[:, col.PAYLOAD] = filled[part.owner] + _running_within(part.owner, nbytes)
            filled.index_add_(0, part.owner, nbytes)
        self.section_nbytes: list[int] = filled.tolist()

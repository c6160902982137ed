"""A rank's memories <-> a checkpoint, on the same or on another number of ranks.

What a checkpoint holds, by parameter name and in the parameter's own shape, whatever the buckets, blocks and ranks
were:

- ``worker``: the residual of every rank (mode "exact"), or one mean of them (mode "mean");
- ``velocity``: under momentum correction, the velocities in the same way;
- ``owner``: the owners' residuals put together into one tensor: each element has exactly one owner;
- ``nodes``: in a hierarchical exchange a node is one worker, and each of its ranks holds a shard of the residual; the
  rest of its tensor is zero;
- ``quantity``: of what these are residuals: "gradient", "velocity" (momentum correction) or "momentum"
  (``CompressedAdam(exchanged="momentum")``). Those of one are worth nothing to another.

What is owed to the model is mean(worker) + owner. It is the same sum on any number of ranks: after a change of world size
every rank starts from the mean of the worker residuals, and the owner residual is dealt out anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.memory.layout import bucket_strides, real_numel

if TYPE_CHECKING:
    from lightning_compress.exchange.memories import Memories
    from lightning_compress.exchange.nodes import Nodes
    from lightning_compress.exchange.plan import BlockPlan

VERSION = 1
EXACT_LIMIT = 4 * 2**30
"""Bytes of all ranks' residuals up to which "exact" keeps each of them; beyond it the mean is saved, with a warning."""

PER_RANK = ("worker", "velocity")
"""What every rank remembers for itself."""
SIDES = (*PER_RANK, "owner")

SaveMode = Literal["exact", "mean", "none"]
Parameters = Mapping[str, torch.nn.Parameter]


def empty_state() -> dict[str, Any]:
    """The state of an exchange that has not seen a model yet."""
    return {"version": VERSION, "world_size": 1, "ranks": [0], "worker": {}, "velocity": {}, "owner": {}}


def lost_state(step: int) -> dict[str, Any]:
    """What an interrupted run saves at an exchange when it could not ask the other ranks for their residuals."""
    return {**empty_state(), "step": step, "interrupted": True}


def local_state(memories: Memories, plan: BlockPlan, parameters: Parameters, rank: int, nodes: Nodes) -> dict[str, Any]:
    """The state of one rank, without any communication: ``merge`` puts those of all ranks together."""
    worker, velocity, owner = {}, {}, {}
    number, _ = nodes.position("nodes", rank)
    for name, parameter in parameters.items():
        if (mine := memories.read("worker", name, parameter.dtype)) is not None:
            if nodes.size > 1:
                shard, mine = mine, mine.new_zeros(real_numel(parameter))
                mine[plan.held(name)] = shard
            worker[name] = [_to_shape(mine, parameter)]
        if (speed := memories.read("velocity", name, parameter.dtype)) is not None and len(speed):
            velocity[name] = [_to_shape(speed, parameter)]
        if (owned := memories.read("owner", name, parameter.dtype)) is not None and not plan.compressor(name).unbiased:
            whole = owned.new_zeros(real_numel(parameter))
            whole[plan.owned_elements(name, number).to(owned.device)] = owned
            owner[name] = _to_shape(whole, parameter)
    return {
        "version": VERSION,
        "world_size": nodes.world_size,
        "nodes": [list(ranks) for ranks in nodes.members],
        "ranks": [rank],
        "worker": worker,
        "velocity": velocity,
        "owner": owner,
    }


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state out of the ``state_dict()`` of all ranks, in rank order, to go on with on any number of ranks."""
    merged: dict[str, Any] = {}
    for state in states:
        if not merged:
            merged = {**state, "ranks": [], "worker": {}, "velocity": {}, "owner": {}, "norms": []}
        merged["ranks"] = [*merged["ranks"], *state["ranks"]]
        merged["norms"] = [*merged["norms"], *state.get("norms", [])]
        for side in PER_RANK:
            for name, residuals in state[side].items():
                merged[side][name] = [*merged[side].get(name, []), *residuals]
        for name, residual in state["owner"].items():
            merged["owner"][name] = residual + merged["owner"].get(name, 0.0)
    return merged


def gather_state(local: dict[str, Any], mode: SaveMode) -> dict[str, Any] | None:
    """The state of all ranks on rank 0, None elsewhere; called on all ranks, uses the default process group.

    Args:
        local: From ``local_state``.
        mode: "exact" sends every rank's residuals to rank 0, "mean" their mean.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = world_size * sum(r[0].numel() * r[0].element_size() for side in PER_RANK for r in local[side].values())
    if mode == "exact" and total > EXACT_LIMIT:
        if rank == 0:
            warnings.warn(
                f"The residuals of {world_size} ranks are {total / 2**30:.1f} GiB: their mean is saved instead. What is owed "
                "to the model is kept, but a resumed run is not bit-identical. save_state='mean' silences this.",
                stacklevel=2,
            )
        mode = "mean"
    per_rank = {
        side: {
            name: [_reduce(residual) * _shards(local) / world_size]
            if mode == "mean"
            else _gather(residual, rank, world_size)
            for name, (residual,) in local[side].items()
        }
        for side in PER_RANK
    }
    norms = _gather(torch.tensor(local.get("norms", []), dtype=torch.float64), rank, world_size)
    owner = {name: _reduce(residual) for name, residual in local["owner"].items()}
    if rank != 0:
        return None
    whole = {**local, **per_rank, "owner": owner, "norms": torch.cat(norms).tolist()}
    if mode == "exact":
        return {**whole, "ranks": list(range(world_size))}
    return {**whole, "ranks": [], "nodes": [[rank] for rank in range(world_size)]}


def share(local: dict[str, Any], group: Any) -> dict[str, Any]:
    """One rank's state with the owners' residuals of all ranks, to go on with where blocks get other owners.

    In a hierarchical exchange also with all shards of its node's residual, which are cut otherwise then. Called on all ranks of
    ``group``.
    """
    worker, (rank,) = dict(local["worker"]), local["ranks"]
    for node in local["nodes"] if _shards(local) > 1 else []:
        for name, (shard,) in local["worker"].items():
            of_node = _sum(shard if rank in node else torch.zeros_like(shard), group)
            if rank in node:
                worker[name] = [of_node]
    owner = {name: _sum(residual, group) for name, residual in local["owner"].items()}
    return {**local, "worker": worker, "owner": owner}


def require_state(state: Any) -> None:
    """Checks what can be seen without the model; the same on all ranks.

    Raises:
        ValueError: The state is damaged or of another version.
    """
    known = set(state) if isinstance(state, Mapping) else set()
    if missing := {"version", "world_size", "ranks", *SIDES} - known:
        raise ValueError(
            f"This is no state of a gradient exchange, or a damaged one: {', '.join(sorted(missing))} missing."
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"This state has version {state['version']!r}, this lightning-compress reads version {VERSION}."
        )
    ranks = max(1, len(state["ranks"]))
    for side in PER_RANK:
        for name, residuals in state[side].items():
            if len(residuals) != ranks or not all(isinstance(one, Tensor) for one in residuals):
                raise ValueError(f"This state is damaged: {name} has no {side} memory of {ranks} ranks.")


def restore(
    state: Mapping[str, Any], memories: Memories, plan: BlockPlan, parameters: Parameters, rank: int, nodes: Nodes
) -> None:
    """Fills one rank's memories from a state of all ranks, or from its own; what they held is forgotten.

    Raises:
        ValueError: The state is damaged, of another version, or one rank's and not this one's.
    """
    require_state(state)
    memories.clear()
    if state.get("interrupted") and rank == 0:
        warnings.warn(
            "This state was saved by a run that was being interrupted and could not collect the ranks' residuals: they start "
            "at zero, and what was owed to the model is lost. Resume from an earlier checkpoint to keep it.",
            stacklevel=2,
        )
    if not any(state[side] for side in SIDES):
        return
    exact = _check(state, nodes, rank)
    number, _ = nodes.position("nodes", rank)
    # without owners every worker takes up what they owed: mean(worker + owner) is mean(worker) + owner
    adopted = state["owner"] if memories.holds("worker") and not memories.holds("owner") else {}
    if rank == 0:
        _warn_of_losses(state, memories, parameters, adopted)
    for name, parameter in parameters.items():
        for side in PER_RANK:
            residuals = state[side].get(name)
            if residuals is not None and _fits(residuals[0], parameter, name, rank):
                own = (
                    residuals[state["ranks"].index(rank)] if exact else torch.stack(residuals).mean(0) * _shards(state)
                )
                own = own + adopted[name] if side == "worker" and name in adopted else own
                memories.write(side, name, parameter, _to_memory(own, parameter)[plan.held(name)])
        residual = state["owner"].get(name)
        if residual is not None and _fits(residual, parameter, name, rank) and not plan.compressor(name).unbiased:
            owned = _to_memory(residual, parameter)[plan.owned_elements(name, number)]
            memories.write("owner", name, parameter, owned)


def _warn_of_losses(
    state: Mapping[str, Any], memories: Memories, parameters: Parameters, adopted: Mapping[str, Tensor]
) -> None:
    owed = {side: [] if side == "owner" and adopted else _tensors(state[side]) for side in SIDES}
    lost = [side for side in SIDES if any(float(abs(r).max()) for r in owed[side]) and not memories.holds(side)]
    if lost:
        warnings.warn(
            f"The state holds what {' and '.join(lost)} memories owed to the model, and these settings have no such memory: "
            "it is dropped. Resume with the settings that the state was saved with to keep it.",
            stacklevel=3,
        )
    unknown = sorted({*state["worker"], *state["velocity"], *state["owner"]} - set(parameters))
    if unknown:
        warnings.warn(
            f"Residuals of parameters that the model does not have or does not train are dropped: {', '.join(unknown)}.",
            stacklevel=3,
        )


def owes(state: Mapping[str, Any]) -> bool:
    """Whether anything in a state is not zero."""
    return any(float(abs(residual).max()) for side in SIDES for residual in _tensors(state[side]))


def _tensors(side: Mapping[str, Any]) -> list[Tensor]:
    return [t for value in side.values() for t in (value if isinstance(value, list) else [value]) if t.numel()]


def _shards(state: Mapping[str, Any]) -> int:
    """Ranks that hold a worker's residual between them: those of a node, in a hierarchical exchange."""
    return len(state["nodes"][0]) if "nodes" in state else 1


def _check(state: Mapping[str, Any], nodes: Nodes, rank: int) -> bool:
    """Whether each rank can take its own residual out of ``state``."""
    world_size = nodes.world_size
    same_shards = state.get("nodes", [[rank] for rank in range(world_size)]) == [list(ranks) for ranks in nodes.members]
    if state["world_size"] == world_size and rank in state["ranks"] and same_shards:
        return True
    if state["ranks"] and len(state["ranks"]) < state["world_size"]:
        raise ValueError(
            f"This state is that of ranks {state['ranks']} of {state['world_size']}; rank {rank} of {world_size} needs those "
            "of all ranks: put them together with lightning_compress.state.merge([...])."
        )
    if rank == 0 and (state["world_size"] != world_size or not same_shards):
        where = "" if same_shards or state["world_size"] != world_size else " on other nodes"
        warnings.warn(
            f"The residuals of {state['world_size']} ranks are redistributed over {world_size}{where}: what is owed to the "
            "model is kept, but the run is not the one that an unchanged number of ranks would have given.",
            stacklevel=3,
        )
    return False


def _fits(residual: Tensor, parameter: Tensor, name: str, rank: int) -> bool:
    shape = torch.view_as_real(parameter).shape if parameter.is_complex() else parameter.shape
    if residual.shape == shape:
        return True
    if rank == 0:
        warnings.warn(
            f"The residual of {name} has shape {tuple(residual.shape)}, not {tuple(shape)}: it is dropped.",
            stacklevel=3,
        )
    return False


def _to_shape(flat: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a flat run of memory in the parameter's shape (a complex one has a last dimension of 2), on the CPU."""
    if parameter.is_complex():
        # a copy: the view of the slice starts anew at offset 0
        shaped = torch.view_as_complex(flat.clone().view(-1, 2)).as_strided(parameter.size(), bucket_strides(parameter))
        shaped = torch.view_as_real(shaped)
    else:
        shaped = flat.as_strided(parameter.size(), bucket_strides(parameter), flat.storage_offset())
    return shaped.detach().to("cpu", copy=True).contiguous()


def _to_memory(shaped: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of ``_to_shape``."""
    flat = torch.empty(shaped.numel(), dtype=shaped.dtype)
    if parameter.is_complex():
        strided = torch.view_as_complex(flat.view(-1, 2)).as_strided(parameter.size(), bucket_strides(parameter))
        torch.view_as_real(strided).copy_(shaped)
    else:
        flat.as_strided(parameter.size(), bucket_strides(parameter)).copy_(shaped)
    return flat


def _device() -> torch.device:
    """Where the default group's collectives take their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")


def _gather(tensor: Tensor, rank: int, world_size: int) -> list[Tensor]:
    sent = tensor.to(_device())
    received = [torch.empty_like(sent) for _ in range(world_size)] if rank == 0 else None
    dist.gather(sent, received, dst=0)
    return [part.cpu() for part in received or []]


def _sum(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.to(_device(), copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()


def _reduce(tensor: Tensor) -> Tensor:
    total = tensor.to(_device(), copy=True)
    dist.reduce(total, dst=0)
    return total.cpu()

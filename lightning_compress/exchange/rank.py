"""One rank's part of the exchange, without DDP and processes: memories, plans, and the steps of every bucket."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_compress.exchange.collectives import AllReduce, Collective
from lightning_compress.exchange.correction import BucketCorrection, Correction, LocalClip, MomentumBucket
from lightning_compress.exchange.hierarchical import Hierarchical
from lightning_compress.exchange.memories import Memories
from lightning_compress.exchange.momenta import Momenta
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.exchange.nonfinite import NonfiniteWatch
from lightning_compress.exchange.plan import BlockPlan, ParameterSpec, cut, parameter_specs
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.stats import ExchangeStats
from lightning_compress.exchange.threads import Threads
from lightning_compress.exchange.topology import BucketJob, Steps, Topology, exchange_dense
from lightning_compress.kernels.table import PRESENT
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.shared_momentum import SharedMomentum
from lightning_compress.state import local_state, owes, restore

Quantity = Literal["gradient", "velocity", "momentum"]
_PLURAL: dict[Quantity, str] = {"gradient": "gradients", "velocity": "velocities", "momentum": "momenta"}


class RankExchange:
    """What a rank remembers, and what it does with a bucket.

    Args:
        settings: What the user chose.
        module: The model; only names, shapes and formats of its parameters matter.
        rank: This rank.
        nodes: Where all ranks are.
        stats: Where everything is counted.
        transactional: Whether steps may be undone (a loss scaler is at work).
        steps_per_epoch: For schedules that count epochs.
        previous: An earlier exchange of the same module, to go on with where it remembers the same parameters.
        momenta: Of the optimizers that bring settings along.
        watch: Looks for gradients that are not finite, on rank 0.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        module: torch.nn.Module,
        rank: int,
        nodes: Nodes,
        stats: ExchangeStats,
        transactional: bool = False,
        steps_per_epoch: int | None = None,
        previous: RankExchange | None = None,
        momenta: Momenta | None = None,
        watch: NonfiniteWatch | None = None,
    ) -> None:
        self.settings = settings.resolve(nodes)
        self.rank, self.world_size, self.stats = rank, nodes.world_size, stats
        # payloads travel among workers: the ranks, or one of them in each node
        self.nodes = nodes if self.settings.hierarchical else Nodes.alone(nodes.world_size)
        self._worker, self._workers = self.nodes.position("nodes", rank)
        self._local, _ = self.nodes.position("node", rank)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # once: two optimizers that take turns switch requires_grad off and on
        self._specs = parameter_specs(module, settings.dense, settings.compressor.keeps_zero)
        self._steps_per_epoch = steps_per_epoch
        self._threads = Threads(settings.compression_threads)
        self._ratios: dict[float | None, float] = {}
        self._plans: dict[float | None, BlockPlan] = {}
        self._topologies: dict[tuple[float | None, tuple[str, ...]], Topology] = {}
        self.plan = self._plan_at(None)
        self.memories = Memories(self.plan, self.settings, self._worker, transactional)
        # a loss scaler finds and skips such steps itself
        self._watch = (watch or NonfiniteWatch()) if rank == 0 and not transactional else None
        memory = self.settings.memory
        self.momenta = momenta or Momenta()
        self.momenta.serve(memory, self.parameters)
        self._remembered: Quantity = "gradient" if previous is None else previous._remembered
        self.clip: LocalClip | None = None
        if isinstance(memory, MomentumCorrection) and memory.clip_norm is not None:
            self.clip = LocalClip(memory, self.world_size)
        if previous is not None and previous.memories.fits(self.memories):
            self.memories = previous.memories
            if self.clip is not None and previous.clip is not None:
                self.clip.recall(previous.clip.previous)
        if self.settings.schedule is not None:
            self.settings.schedule.stage_steps(steps_per_epoch)  # raises when nobody knows how long an epoch is

    @property
    def passes_through(self) -> bool:
        """Whether gradients stay as they are: on a single rank, except that what is not a gradient is coded there too."""
        return self.world_size == 1 and not isinstance(self.settings.memory, (MomentumCorrection, SharedMomentum))

    def close(self) -> None:
        """Ends its threads; what is remembered stays."""
        self._threads.close()

    def settle(self, scale: float | Tensor) -> Tensor | bool:
        """Forgets what was written for a step that the loss scaler has skipped (see ``Memories.settle``)."""
        skipped = self.memories.settle(scale)
        if self.clip is not None:
            self.clip.settle(skipped)
        return skipped

    def begin_step(self, step: int) -> None:
        """Before the first bucket of a step."""
        if self.clip is not None:
            self.clip.begin_step()
        quantity = self.quantity(step)
        if quantity != self._remembered:
            self.memories.clear()  # residuals of gradients are worth nothing among momenta, and the other way round
            self._remembered = quantity
        self.momenta.announce(quantity == "momentum")

    def quantity(self, step: int) -> Quantity:
        """What is exchanged, and its residuals remembered."""
        memory = self.settings.memory
        if isinstance(memory, SharedMomentum) and step >= memory.freeze_step:
            return "momentum"
        return "velocity" if isinstance(memory, MomentumCorrection) else "gradient"

    def density(self, step: int) -> float | None:
        """The compressor's density at a step: None is its own, 1.0 a dense exchange."""
        settings = self.settings
        if step < settings.start_step or settings.topology is None:
            return 1.0
        if settings.schedule is None:
            return None
        final = settings.compressor.ratio  # type: ignore[attr-defined]  # checked when the settings were made
        density = settings.schedule.density(step - settings.start_step, self._steps_per_epoch, final)
        if density == final:
            return None
        return 1.0 if settings.at_density(density).wire_share(self._workers) >= 1.0 else density

    def steps(self, buffer: Tensor, names: tuple[str, ...], status: Tensor, step: int, scale: float | Tensor) -> Steps:
        """The exchange of one bucket.

        Args:
            buffer: Its gradients.
            names: Its parameters.
            status: Which of them take part, uint8 on the host.
            step: Number of this exchange.
            scale: The loss scale.
        """
        if buffer.is_sparse or self.settings.topology is None:
            return exchange_dense(buffer, self.world_size)
        density = self.density(step)
        topology = self._topology(None if density == 1.0 else density, names, buffer)
        worker, owner = self.memories.views(names, buffer)
        correction = self._correction(topology, names, buffer, status, step)
        on_device = status.to(buffer.device)
        job = BucketJob(buffer, on_device, step, scale, worker, owner, self.stats, correction, self._watch)
        return topology.run_dense(job) if density == 1.0 else topology.run(job)

    def planned(self, names: tuple[str, ...], step: int) -> list[Collective]:
        """The collectives of a bucket at a step, without content."""
        first, numel = self.parameters[names[0]], sum(self.parameters[name].numel() for name in names)
        density = self.density(step)
        if density == 1.0:
            return [AllReduce(torch.empty(numel, dtype=first.dtype, device="meta"))]
        nowhere = dict.fromkeys(self.parameters, 0)
        return self._build(density, names, first.dtype, torch.device("cpu"), nowhere, nowhere).planned()

    def planned_ratio(self, step: int) -> float:
        """Dense bytes / planned bytes of a step in which the whole model is one bucket; 1 where it is exchanged dense."""
        density = self.density(step)
        if density not in self._ratios:
            sent, dense = Fraction(0), Fraction(0)
            names = self.plan.worker_sizes()
            for dtype in {self.parameters[name].dtype for name in names}:
                bucket = tuple(name for name in names if self.parameters[name].dtype == dtype)
                for each in self.planned(bucket, step):
                    sent += each.wire_bytes(*self.nodes.position(each.level, self.rank))[0]
                nbytes = sum(self.parameters[name].nbytes for name in bucket)
                dense += Fraction(2 * (self.world_size - 1) * nbytes, self.world_size)
            self._ratios[density] = float(dense / sent) if sent else 1.0
        return self._ratios[density]

    def state(self) -> dict[str, Any]:
        """This rank's memories (see ``state.local_state``)."""
        state = local_state(self.memories, self.plan, self.parameters, self.rank, self.nodes)
        state["quantity"] = self._remembered
        if self.clip is not None and self.clip.previous is not None:
            state["norms"] = [float(self.clip.previous)]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Fills this rank's memories (see ``state.restore``)."""
        if self.clip is not None:
            self.clip.recall(None)
        restore(state, self.memories, self.plan, self.parameters, self.rank, self.nodes)
        self._remembered = state.get("quantity", "gradient")
        corrects = isinstance(self.settings.memory, MomentumCorrection)
        if self.rank == 0 and owes(state) and corrects != (self._remembered == "velocity"):
            warnings.warn(
                f"The state holds residuals of {_PLURAL[self._remembered]}, which are worth nothing "
                f"{'with' if corrects else 'without'} momentum correction: they start at zero. Resume with the memory= that "
                "the state was saved with to keep them.",
                stacklevel=2,
            )
        if self.clip is not None and state.get("norms"):
            norms = state["norms"]
            own = (
                norms[state["ranks"].index(self.rank)] if len(norms) == len(state["ranks"]) else sum(norms) / len(norms)
            )
            device = next(iter(self.parameters.values())).device
            self.clip.recall(torch.tensor(own, dtype=torch.float64, device=device))

    def _plan_at(self, density: float | None) -> BlockPlan:
        if density not in self._plans:
            settings = self.settings if density is None else self.settings.at_density(density)
            topology = settings.topology or Topology
            specs = self._shards(settings)[self._local]
            owners = topology.owners(self._workers)
            plan = BlockPlan(specs, settings.compressor, settings.dense_compressor, owners, topology.whole_tensors)
            self._plans[density] = plan
        return self._plans[density]

    def _shards(self, settings: ExchangeSettings) -> list[list[ParameterSpec]]:
        """What each of a node's ranks exchanges with other nodes; the whole model where it is alone."""
        if self.nodes.size == 1:
            return [self._specs]
        return cut(self._specs, settings.compressor, settings.dense_compressor, self.nodes.size)

    def _topology(self, density: float | None, names: tuple[str, ...], buffer: Tensor) -> Topology:
        key = (density, names)
        if key not in self._topologies:
            offsets = self.memories.offsets(buffer)
            self._topologies[key] = self._build(density, names, buffer.dtype, buffer.device, *offsets)
        return self._topologies[key]

    def _build(
        self,
        density: float | None,
        names: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        worker_offset: dict[str, int],
        owner_offset: dict[str, int],
    ) -> Topology:
        assert self.settings.topology is not None
        bucket = self._plan_at(density).bucket(names, worker_offset, owner_offset)
        between = self.settings.topology(bucket, self._worker, self._workers, device, self._threads)
        if not self.settings.hierarchical:
            return between
        shards = [{spec.name: spec for spec in shard} for shard in self._shards(self.settings)]
        parts = [[shard[name] for name in names] for shard in shards]
        return Hierarchical(between, parts, self._local, self.world_size, dtype)

    def _correction(
        self, topology: Topology, names: tuple[str, ...], buffer: Tensor, status: Tensor, step: int
    ) -> Correction | None:
        memory, spans = self.settings.memory, topology.plan.spans
        present = [seen == PRESENT for seen in status.tolist()]
        if isinstance(memory, SharedMomentum) and step >= memory.freeze_step:
            return MomentumBucket(present, spans, [self.parameters[name] for name in names], self.momenta.of)
        if not isinstance(memory, MomentumCorrection):
            return None
        velocity = self.memories.velocities(names, buffer)
        assert velocity is not None
        return BucketCorrection(present, spans, memory, velocity, self.clip)

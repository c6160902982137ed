"""``strategy="compressed_auto"``: starts dense, measures, and takes what pays. Glue between Lightning, planner and exchange."""

from __future__ import annotations

import inspect
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import yaml
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.hook import GradientExchange
from lightning_compress.exchange.nodes import Nodes, find_nodes
from lightning_compress.optim import CompressedAdam
from lightning_compress.planner.advice import as_fast_as_any, explain, recommend
from lightning_compress.planner.costs import measure_costs
from lightning_compress.planner.link import Link, measure_link
from lightning_compress.planner.methods import HIERARCHICAL, Choice
from lightning_compress.planner.pilot import Pilot
from lightning_compress.planner.predict import calibrated, predict
from lightning_compress.planner.profile import StepRecorder
from lightning_compress.planner.tensors import spare
from lightning_compress.presets import PRESETS
from lightning_compress.state import SaveMode
from lightning_compress.strategy import CompressionGlue

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

CHOICE_KEY = "lightning_compress_auto"
"""Where a Lightning checkpoint keeps the choice."""

CANDIDATES = ("fp32", "bf16", "fp8", "quantize", "ternary", "centered")
"""Codes that are known to need more steps for the same accuracy are left to those who ask for them."""

_START = Choice("bf16")
_CHOSEN = frozenset({"compressor", "memory", "exchange", "dense", "start_step", "schedule"})


class AutoGlue(CompressionGlue):
    """Mixed into a DDPStrategy: the strategy behind ``Trainer(strategy="compressed_auto")``.

    1. The first steps are exchanged dense: in bf16 with error feedback if all gradients are float32, as they are otherwise.
    2. Their times, the network and the candidates' encoding and decoding are measured, and a step of each is predicted.
    3. The mildest candidate that is as fast as any is tried on the wall clock, with as many tensors left dense as still hide
       their communication. It stays if it wins by more than noise (a milder one, if it loses no more than 3 %);
       otherwise the method before it comes back.
    4. After ``recheck_every`` steps this begins again, from the method that is in force.

    Rank 0 decides and tells the others. The choice and its reason are logged with the YAML that pins it, and stored in
    checkpoints: a resumed run goes on with it, and on another number of ranks measures again. When methods change, what the old
    one owed to the model joins the next step's gradients.

    Args:
        recheck_every: Optimizer steps after a decision until the next look; 0: never.
        save_state: As in ``CompressedStrategy``, like the next.
        verify_every: Holds for every method, like the next.
        compression_threads: As in ``CompressedStrategy``; predictions are made for one.
        kwargs: As in ``CompressedStrategy``: what ``DDPStrategy`` takes.

    Raises:
        ValueError: An argument that it chooses itself, or a ``CompressedAdam``, which brings settings of its own.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"_auto": {}}
    exchange: _ObservedExchange

    def __init__(
        self,
        recheck_every: int = 5000,
        save_state: SaveMode = "exact",
        verify_every: int = 0,
        compression_threads: int = 1,
        **kwargs: Any,
    ) -> None:
        if given := sorted(kwargs.keys() & _CHOSEN):
            raise ValueError(
                f"compressed_auto chooses {given[0]} itself: leave it out, or use CompressedStrategy({given[0]}=...)."
            )
        watched = {"verify_every": (verify_every, 0), "compression_threads": (compression_threads, 1)}
        self._always: dict[str, Any] = {name: value for name, (value, default) in watched.items() if value != default}
        super().__init__(**_START.arguments, save_state=save_state, **self._always, **kwargs)
        self.pilot = Pilot(_START, recheck_every=recheck_every)
        self._in_force = _START  # until the next step begins, the pilot may have chosen another
        self._started = False
        self._fitted: Any = None
        self._given = {**kwargs, "save_state": save_state}
        self.exchange = _ObservedExchange(**self._arguments(_START))
        self._pending = False
        self._begun: float | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit":
            self._begin_fit()
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.world_size == 1:
            self.pilot.fix("a single rank exchanges nothing")

    def _begin_fit(self) -> None:
        """A choice holds for the model that it was made for; what was measured, for the buckets of one fit."""
        self._begun, self.exchange.recorder = None, None
        if self._fitted not in (None, self.lightning_module):
            self.pilot.restore({**_START.state(), "settled": False})
            self._started = self._pending = False
            self._use(_START)
        self._fitted = self.lightning_module
        self.pilot.measure_again()

    @override
    def _attach(self) -> None:
        if any(isinstance(getattr(one, "optimizer", one), CompressedAdam) for one in self.optimizers):
            raise ValueError(
                "compressed_auto chooses the exchange itself, and CompressedAdam brings settings of its own: use "
                'strategy="compressed_clan", or another optimizer, such as lightning_compress.optim.LANS.'
            )
        if self.lightning_module is not None:
            formats = {p.dtype for p in self.lightning_module.parameters() if p.requires_grad}
            if formats - {torch.float32} and not self._started:  # bf16 gains nothing on 16 bits
                self._use(Choice("fp32"))
            if formats & {torch.float64, torch.complex128}:
                self.pilot.fix("double precision is there to be kept")
            self._started = True
        super()._attach()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint[CHOICE_KEY] = {**self.pilot.state(), "in_force": self._in_force.state(), "ranks": self.world_size}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if CHOICE_KEY in checkpoint and self._fitting:
            self._fitted = self.lightning_module
            choice = dict(checkpoint[CHOICE_KEY])
            in_force = Choice.restored(choice.pop("in_force"))
            same_network = choice.pop("ranks") == self.world_size
            self.pilot.restore({**choice, "settled": choice["settled"] and same_network})
            self._started = True
            chosen = self.pilot.choice
            self._use(in_force)  # the memories in the checkpoint are its own; the switch follows, as it would have
            self.pilot.choice = chosen
            self._pending = in_force != chosen
        return checkpoint

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._begun is None:
            self._begin_step()
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self.exchange.recorder is not None:
            self.exchange.recorder.backward()
        super().pre_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self.exchange.recorder is not None:
            self.exchange.recorder.gradients()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self._begun is not None:
            self._end_step(self._begun)
            self._begun = None
        return result

    def _begin_step(self) -> None:
        if self._pending:
            self._switch()
        if self.pilot.watches:
            if self.exchange.recorder is None:
                self.exchange.recorder = StepRecorder(self.root_device, self._names())
            self._wait_for_device()
            self.exchange.recorder.begin()
        self._begun = time.perf_counter()

    def _end_step(self, begun: float) -> None:
        if self.exchange.recorder is not None:
            self.exchange.recorder.end()
            self._wait_for_device()
        before = self.pilot.choice
        due = self.pilot.step(time.perf_counter() - begun)
        if due == "predict":
            self.pilot.propose(*self._agreed(self._decide()))
        elif due == "judge":
            self.pilot.conclude(*self._agreed((self.pilot.judge(),)))
        if due is not None:
            # at the beginning of the next step: a checkpoint of this one holds the memories of the method that made it
            self._pending = self.pilot.choice != before
            self.exchange.recorder = None
            self._say()

    def _decide(self) -> tuple[Choice, str]:
        """Measures on all ranks, and chooses."""
        recorder, module = self.exchange.recorder, self.model
        assert recorder is not None
        assert isinstance(module, DistributedDataParallel)
        nodes = find_nodes(module.process_group, self.num_processes)
        names, current = candidates(nodes), self.pilot.choice
        self._tell(f"compressed_auto measures the network and {len(names)} exchanges.")
        profile = recorder.profile(min(recorder.steps - 1, self.pilot.warm_up), nodes.size, exchanging=True)
        link = self._link(module, nodes)
        place = self.global_rank, nodes
        costs = {
            choice: measure_costs(choice.as_run, module.module, profile, *place)
            for choice in dict.fromkeys([*map(Choice, names), current])
        }
        alone = calibrated(current.as_run, profile, costs[current], link, self.pilot.seconds)
        predictions = [predict(choice.as_run, alone, costs[choice], link) for choice in map(Choice, names)]
        best = recommend(predictions)
        limit = as_fast_as_any(predictions)
        whole = Choice(best.method)
        choice, said = spare(whole, costs[whole], module.module, alone, link, limit, *place)
        return choice, " ".join(filter(None, (explain(best, predictions), said)))

    def _link(self, module: DistributedDataParallel, nodes: Nodes) -> Link:
        return measure_link(module.process_group, self.root_device, nodes)

    def _agreed(self, mine: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rank 0's."""
        message = [mine]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    def _switch(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self._pending, self._in_force = False, self.pilot.choice
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.exchange.switch(
            self._arguments(self._in_force), self.model, scaler, self._timeout, ranks_per_node=self.num_processes
        )

    def _use(self, choice: Choice) -> None:
        """Before there are memories."""
        self.pilot.choice = self._in_force = choice
        self.exchange.choose(**self._arguments(choice))

    def _arguments(self, choice: Choice) -> dict[str, Any]:
        return {**choice.arguments, **self._always}

    def _names(self) -> dict[int, str]:
        assert isinstance(self.model, DistributedDataParallel)
        return {id(p): name for name, p in self.model.module.named_parameters()}

    def _wait_for_device(self) -> None:
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)

    def _say(self) -> None:
        if self.pilot.settled:
            self._tell(f"compressed_auto: {self.pilot.choice}. {self.pilot.reason}\nTo pin it:\n{self.pin()}")
        else:
            self._tell(f"compressed_auto tries {self.pilot.choice}.")

    def pin(self) -> str:
        """The YAML that gives the strategy in force without measuring, with the arguments that this strategy was given."""
        own = {k: v for k, v in self._given.items() if v is not None and v != _DEFAULTS.get(k)}
        left_out = sorted(name for name, value in own.items() if not _is_plain(value))
        note = f"# add what YAML cannot say here: {', '.join(left_out)}\n" if left_out else ""
        further = {k: str(v) if isinstance(v, timedelta) else v for k, v in own.items() if _is_plain(v)}
        text: str = yaml.safe_dump({"trainer": {"strategy": self._pinned(further)}}, sort_keys=False)
        return note + text

    def _pinned(self, further: dict[str, Any]) -> str | dict[str, Any]:
        chosen = self._arguments(self.pilot.choice)
        if not further and chosen == {"compressor": "none"}:
            return "ddp"
        if not further and chosen == PRESETS.get(f"_{self.pilot.method}"):
            return f"compressed_{self.pilot.method}"
        if isinstance(rule := chosen.get("dense"), DenseRule):
            stated = {"code": rule.code, "max_numel": rule.max_numel, "patterns": list(rule.patterns)}
            chosen["dense"] = {"class_path": "lightning_compress.DenseRule", "init_args": stated}
        return {"class_path": "lightning_compress.CompressedStrategy", "init_args": {**chosen, **further}}


def candidates(nodes: Nodes) -> list[str]:
    """What is compared; what is hierarchical only where there are several nodes with several ranks each."""
    hierarchical = [HIERARCHICAL + name for name in CANDIDATES if name != "fp32"]
    return [*CANDIDATES, *(hierarchical if nodes.nested else [])]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, timedelta))


_DEFAULTS: dict[str, Any] = {
    **{name: p.default for name, p in inspect.signature(DistributedDataParallel.__init__).parameters.items()},
    "save_state": "exact",
    "start_method": "popen",
    "timeout": default_pg_timeout,
}
"""Of what this strategy takes: strategy names and configuration files spell them out."""


class _ObservedExchange(GradientExchange):
    """Tells a recorder, while there is one, of every bucket."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.recorder: StepRecorder | None = None

    # DDP inspects the signature
    @override
    def _hook(self, _state, bucket):  # type: ignore[no-untyped-def]
        if self.recorder is not None:
            self.recorder.bucket(bucket)
        return super()._hook(_state, bucket)  # type: ignore[no-untyped-call]

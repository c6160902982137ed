"""One host of ``prediction.py``: measures what the planner measures, and the steps of several methods in turn.

Started by ``hosts.sh`` on every host, with the command line of ``step_time_rank.py``.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.methods import REFERENCE, SETTINGS, SYNC_BUFFERS, Wrapped, corrects_momentum, wrap
from benchmarks.step_time_rank import WARM_UP, Interface, Run, Training, gather, join, leave, measure
from benchmarks.workloads import WORKLOADS, Workload
from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.costs import measure_costs
from lightning_compress.planner.link import Link, measure_link
from lightning_compress.planner.methods import DDP, Method
from lightning_compress.planner.predict import Prediction, predict
from lightning_compress.planner.profile import Profile, StepRecorder
from lightning_compress.planner.training import exchange_nothing

_DEVICE = torch.device("cpu")
PLANNED = (*DDP, *SETTINGS)
"""Methods of ``step_time.py`` that the planner knows."""


def planned(method: str) -> Method:
    """The planner's picture of a method of ``step_time.py``: torch's hooks, or an exchange of ours."""
    return Method(method, SETTINGS[method]) if method in SETTINGS else Method.named(method)


class ProfiledTraining(Training):
    """A training whose steps under the hook that exchanges nothing are recorded.

    They take turns with those of the methods, so that a drift of the machine hits prediction and measurement alike.
    """

    def __init__(self, workload: Workload, rank: int, corrected: bool, broadcast_buffers: bool) -> None:
        super().__init__(workload, rank, corrected)
        self._recorder = StepRecorder(_DEVICE, {id(p): name for name, p in self.model.named_parameters()})
        ddp = DistributedDataParallel(self.model, init_sync=False, **{SYNC_BUFFERS: broadcast_buffers})
        ddp.register_comm_hook(self._recorder, exchange_nothing)
        self.alone = Wrapped(ddp, None)

    @override
    def step(self, wrapped: Wrapped) -> float:
        if wrapped is not self.alone:
            return super().step(wrapped)
        start = time.perf_counter()
        self._recorder.begin()
        loss = self.forward(wrapped.ddp)
        self._recorder.backward()
        loss.backward()
        self._recorder.gradients()
        self.update()
        self._recorder.end()
        return (time.perf_counter() - start) * 1e3

    def profile(self) -> Profile:
        """Of the measured steps."""
        return self._recorder.profile(WARM_UP)


def predicted(method: str, training: Training, profile: Profile, link: Link) -> Prediction:
    """The step of one method; without an exchange it is the profile's own."""
    if method == REFERENCE:
        low, middle, high = (profile.at(share).total for share in (0.25, 0.5, 0.75))
        return Prediction(method, middle, low, high, 0.0, 0)
    ours, nodes = planned(method), Nodes.alone(link.world_size)
    return predict(ours, profile, measure_costs(ours, training.model, profile, dist.get_rank(), nodes), link)


def main() -> None:
    """Predicts and measures, as one of the hosts."""
    args = join()
    corrected = any(map(corrects_momentum, args.methods))
    training = ProfiledTraining(WORKLOADS[args.model], dist.get_rank(), corrected, args.broadcast_buffers)
    group = dist.group.WORLD
    assert group is not None
    link = measure_link(group, _DEVICE, Nodes.alone(dist.get_world_size()))
    methods = [method for method in args.methods if method != REFERENCE]
    runs = [
        Run(REFERENCE, training.alone),
        *(Run(method, wrap(training.model, method, args.broadcast_buffers)) for method in methods),
    ]
    measure(training, runs, args.steps, Interface(os.environ["GLOO_SOCKET_IFNAME"]))
    profile = training.profile()
    predictions = {run.method: predicted(run.method, training, profile, link).as_row() for run in runs}
    rows = [
        {**row, "link": link.describe(), "prediction": predictions[row["method"]]}
        for row in gather(runs, training.nbytes)
    ]
    leave(runs, rows, args.output)


if __name__ == "__main__":
    main()

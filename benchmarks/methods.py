"""The gradient exchanges that are compared, torch's own and ours: each is a DDP wrapper of one and the same model."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import GradientExchange, MomentumCorrection, TopK
from lightning_compress.presets import PRESETS

REFERENCE = "noop"
"""The limit: a hook that exchanges nothing."""
TORCH_METHODS = (REFERENCE, "fp32", "fp16", "bf16", "powersgd")
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"compressed{suffix}": arguments for suffix, arguments in PRESETS.items()},
    "compressed_two_way": {"exchange": "two_way"},
    "compressed_topk_0.001": {"compressor": TopK(0.001)},
    "compressed_dgc_0.001": {**PRESETS["_dgc"], "compressor": TopK(0.001)},
}
"""Arguments of ours by name: the presets, how the default goes on more than two ranks, and the papers' sparsest (CLAN's:
``register_comm_hook(ddp, TopK(0.001))``)."""
METHODS = (*TORCH_METHODS, *SETTINGS)
_ONE_BUCKET_MB = 1 << 20
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""DDP's argument for the broadcast of batch norm's statistics in every step; its name depends on the version of torch."""


@dataclass
class Wrapped:
    """A model wrapped for one method."""

    ddp: DistributedDataParallel
    exchange: GradientExchange | None

    def predicted_bytes(self, method: str, gradient_nbytes: int) -> int | None:
        """Bytes that this rank should put on the wire in one step, None where nothing predicts them."""
        if self.exchange is not None:
            return int(self.exchange.stats()["last"]["bytes_sent"])
        ring = ring_nbytes(gradient_nbytes, dist.get_world_size())
        return {REFERENCE: 0, "fp32": ring, "fp16": ring // 2, "bf16": ring // 2}.get(method)

    def close(self) -> None:
        """Ends the exchange's threads."""
        if self.exchange is not None:
            self.exchange.close()


def ring_nbytes(nbytes: int, world_size: int) -> int:
    """What each rank of a ring all-reduce of ``nbytes`` sends."""
    return 2 * (world_size - 1) * nbytes // world_size


def make_exchange(method: str) -> GradientExchange:
    """The exchange of a name in ``SETTINGS``, after its warm-up.

    Raises:
        ValueError: The preset cannot be made in this version.
    """
    return GradientExchange(**{**SETTINGS[method], "schedule": None})


def corrects_momentum(method: str) -> bool:
    """Whether the method exchanges velocities, which needs an optimizer (``DGCSGD``) that does not apply momentum again."""
    return method.startswith("compressed") and isinstance(make_exchange(method).settings.memory, MomentumCorrection)


def wrap(module: nn.Module, method: str, broadcast_buffers: bool = False) -> Wrapped:
    """Wraps ``module`` for one method; called on all ranks.

    Several wrappers of one module can take turns: a reducer acts only on a backward whose forward went through it. That
    keeps one copy of weights, gradients and optimizer state for all methods.
    """
    # PowerSGD's hook waits inside a future's callback: with several buckets in flight all of gloo's threads would wait
    bucket_cap_mb = _ONE_BUCKET_MB if method == "powersgd" else None
    ddp = DistributedDataParallel(
        module, init_sync=False, bucket_cap_mb=bucket_cap_mb, **{SYNC_BUFFERS: broadcast_buffers}
    )
    if method.startswith("compressed"):
        return Wrapped(ddp, make_exchange(method).attach(ddp))
    if method == "powersgd":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    elif method != "fp32":
        hooks = {REFERENCE: debugging_hooks.noop_hook, "fp16": default_hooks.fp16_compress_hook, "bf16": bf16_hook}
        ddp.register_comm_hook(None, hooks[method])
    return Wrapped(ddp, None)


def memory_factor(method: str) -> float:
    """Memory of a wrapper in units of the gradients' size, rounded up: buckets, residuals, buffers in flight."""
    if method.startswith("compressed"):
        return 4.5 if corrects_momentum(method) else 3.5
    return {REFERENCE: 1.0, "fp32": 1.0, "powersgd": 3.0}.get(method, 2.0)


# Under its own name DDP refuses torch's bf16 hook without NCCL, though gloo adds bf16 up. DDP inspects the signature.
def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Torch's bf16 hook, for any backend."""
    return default_hooks.bf16_compress_hook(state, bucket)

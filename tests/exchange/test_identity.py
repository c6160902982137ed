"""compressor="none" is DDP to the last bit (invariant 2)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import register_comm_hook
from tests.exchange.training import SMALL_BUCKETS, batch, content, make_net, mean_square
from tests.ranks import run_ranks


class Mixed(nn.Module):
    """Number formats and layouts that have buckets of their own: complex, float64, half precision, sparse, channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c64 = nn.Parameter(torch.randn(20, 5, dtype=torch.complex64))
        self.f64 = nn.Linear(20, 5).double()
        self.b16 = nn.Linear(20, 5).bfloat16()
        self.f16 = nn.Linear(20, 5).half()
        self.conv = nn.Conv2d(4, 5, 2).to(memory_format=torch.channels_last)
        self.embedding = nn.Embedding(50, 5, sparse=True)

    def forward(self, x):
        image = x.reshape(-1, 4, 5, 1).expand(-1, -1, -1, 3)
        ids = (x.abs() * 40).long().clamp_max(49)
        parts = [
            torch.view_as_real(x.to(torch.complex64) @ self.c64).sum(-1),
            self.f64(x.double()),
            self.b16(x.bfloat16()),
            self.f16(x.half()),
            self.conv(image).mean((2, 3)),
            self.embedding(ids).mean(1),
        ]
        return sum(part.float() for part in parts)


def trained(make_model, compressor, ddp, set_to_none=True, accumulate=1):
    model = DistributedDataParallel(make_model(), **ddp)
    exchange = register_comm_hook(model, compressor) if compressor else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        for part in range(accumulate):
            model.require_backward_grad_sync = part == accumulate - 1
            mean_square(model, batch(accumulate * step + part)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    if exchange:
        exchange.close()
    return content(model.parameters())


CASES = {
    "several buckets": {"ddp": {}},
    "one bucket": {"ddp": {"bucket_cap_mb": 25}},
    "static_graph": {"ddp": {"static_graph": True}},
    "find_unused_parameters": {"ddp": {"find_unused_parameters": True}},
    "gradient_as_bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "gradients kept by zero_grad": {"ddp": {}, "set_to_none": False},
    "accumulation": {"ddp": {}, "accumulate": 2},
    "accumulation in bucket views": {"ddp": {"gradient_as_bucket_view": True}, "accumulate": 2},
    "other number formats": {"ddp": {"find_unused_parameters": False}, "make_model": Mixed},
}


def differing_from_ddp():
    wrong = []
    for name, case in CASES.items():
        case = {"make_model": make_net, **case, "ddp": {"bucket_cap_mb": SMALL_BUCKETS, **case["ddp"]}}  # noqa: PLW2901
        if trained(compressor=None, **case) != trained(compressor="none", **case):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_none_is_ddp_bit_for_bit(ranks):
    assert run_ranks(differing_from_ddp, ranks) == [[]] * ranks

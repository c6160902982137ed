"""The messages that stand in for gloo's all-to-all and, between two ranks, its all-gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_compress.exchange.collectives import AllGather, AllToAll, Messages
from tests.ranks import run_ranks


class Group:
    """Notes in which order messages are issued; what is sent arrives nowhere."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, int]] = []
        self.waits = 0

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.issued.append(("recv", peer))
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.issued.append(("send", peer))
        return self

    def wait(self) -> None:
        self.waits += 1


def test_a_rank_is_ready_to_receive_before_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    group: Any = Group()
    sends, receives = [torch.full((2,), float(rank)) for rank in range(4)], [torch.zeros(2) for _ in range(4)]
    receives[3] = sends[3] = torch.zeros(0)  # nothing is to be sent
    messages = Messages(sends, receives, group)
    assert [what for what, _ in group.issued] == ["recv"] * 2 + ["send"] * 2
    assert {peer for _, peer in group.issued} == {0, 2}
    assert receives[1].tolist() == [1.0, 1.0]
    messages.wait()
    messages.wait()  # gloo would wait for another message
    assert group.waits == 4


def exchange_parts() -> list[torch.Tensor]:
    """Several under way at once, of which the larger ones do not fit into a socket's buffer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    found, works = [], []
    for size in (1, 3_000_000, 0, 500):
        splits = [size * (peer + 1) for peer in range(ranks)]
        send = torch.cat([torch.full((n,), 10 * rank + peer, dtype=torch.uint8) for peer, n in enumerate(splits)])
        receive = torch.empty(splits[rank] * ranks, dtype=torch.uint8)
        works.append(AllToAll(send, receive, splits).start(dist.group.WORLD))
        gathered = torch.empty(size * ranks, dtype=torch.uint8)
        works.append(AllGather(torch.full((size,), rank, dtype=torch.uint8), gathered).start(dist.group.WORLD))
        found += [receive, gathered]
    for work in works:
        work.wait()
    return [part.view(ranks, -1).unique_consecutive(dim=1) if part.numel() else part for part in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_everybody_gets_his_parts(ranks: int) -> None:
    for rank, parts in enumerate(run_ranks(exchange_parts, ranks)):
        for number, part in enumerate(parts):
            from_each = [[10 * peer + rank] if number % 2 == 0 else [peer] for peer in range(ranks)]
            assert part.tolist() == (from_each if number not in (4, 5) else [])

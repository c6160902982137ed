"""Ranks that drift apart are found, and parameters that DDP would never exchange are an error."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import register_comm_hook
from lightning_compress.exchange.verification import checksum
from tests.exchange.training import batch, content, make_net, mean_square, residuals, train, wrap
from tests.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_the_checksum_sees_every_bit_and_every_place(dtype):
    tensor = torch.arange(1, 2049).reshape(64, 32).to(dtype)
    same = torch.empty(32, 64, dtype=dtype).t().copy_(tensor)  # other strides
    assert checksum(tensor) == checksum(same)
    found = {int(checksum(tensor))}
    for place in (0, 1, 2047):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1)[place : place + 1].view(torch.uint8)[-1] ^= 1 << bit
            found.add(int(checksum(changed)))
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    found.add(int(checksum(swapped)))
    assert len(found) == 1 + 3 * 8 + 1


def test_the_checksum_of_a_large_tensor_is_that_of_all_its_pieces():
    tensor = torch.zeros(3 << 20)
    changed = tensor.clone()
    changed[-1] = -0.0
    assert checksum(tensor) != checksum(changed)
    assert checksum(torch.zeros(0)) == 0


def drift(settings):
    ddp, exchange = wrap(make_net(), verify_every=2, **settings)
    train(ddp, 3)
    if dist.get_rank() == 2:
        ddp.module.second.weight.data.view(torch.int32)[3, 4] ^= 1  # the lowest bit of one element
        ddp.module.last.bias.data += 1.0
    train(ddp, 1, first=3)  # not its turn
    with pytest.raises(RuntimeError) as error:
        train(ddp, 1, first=4)
    exchange.close()
    return str(error.value)


@pytest.mark.parametrize("settings", [{}, {"compressor": "none"}], ids=["two_way", "none"])
def test_a_rank_that_drifts_is_found_on_all_ranks_at_once(settings):
    first, second, third = run_ranks(drift, 3, settings)
    assert first == second == third
    assert "step 4 " in first
    assert "'second.weight' differs from rank 0's on rank 2" in first
    # last.weight and others follow at the next optimizer step: what differs is bits, not who caused it
    assert "parameters differ" in first


def tiny():
    exchange = register_comm_hook(DistributedDataParallel(torch.nn.Linear(3, 3)), verify_every=7)
    assert exchange.settings.verify_every == 7
    exchange.close()
    said = []
    for model, compressor in (
        (torch.nn.Linear(20, 5), "randomk"),
        (torch.nn.Linear(20, 5), "none"),
        (torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Linear(500, 5)), "randomk"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp, exchange = wrap(model, compressor=compressor, start_step=1)
            train(ddp, 4)
            exchange.close()
        said.append([str(w.message) for w in caught if "dense DDP" in str(w.message)])
    return said


def test_a_model_too_small_for_its_compressor_is_said_once():
    (small, plain, large), other = run_ranks(tiny, 2)
    assert len(small) == 1
    assert "training is slower" in small[0]
    assert "compressor='bf16'" in small[0]
    assert plain == large == []
    assert other == [[], [], []]


def thaw(settings):
    net = make_net()
    net.second.requires_grad_(False)
    ddp, exchange = wrap(net, verify_every=1, **settings)
    train(ddp, 3)
    net.second.requires_grad_(True)
    with pytest.raises(RuntimeError) as error:
        mean_square(ddp, batch(3)).backward()
    before = residuals(exchange)
    net.norm.requires_grad_(False)
    del ddp
    ddp = DistributedDataParallel(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exchange.attach(ddp)
    said = ["does not train are dropped: norm.bias, norm.weight" in str(w.message) for w in caught]
    assert said == [True] * (dist.get_rank() == 0)
    after = residuals(exchange)
    kept = []
    for name, old in before.items():
        if "norm" in name:
            continue
        both = [old.clone(), after[name].clone()]
        if name.startswith("owner"):  # other ranks own other blocks now
            for part in both:
                dist.all_reduce(part)
        kept.append(both[0].equal(both[1]) and bool(both[0].any()) == bool(old.numel()))
    zero = not any(after[name].any() for name in after if "second" in name)
    frozen, thawed = content(net.norm.parameters()), content(net.second.parameters())
    train(ddp, 3, first=3)
    moved = (content(net.norm.parameters()) != frozen, content(net.second.parameters()) != thawed)
    return str(error.value), kept, zero, moved, sorted(n for n in after if "second" in n), content(net.parameters())


def test_a_parameter_that_is_unfrozen_is_an_error_and_a_new_wrap_keeps_the_other_memories():
    first, second, third = run_ranks(thaw, 3, {})
    assert first == second == third
    said, kept, zero, moved, names, _ = first
    assert "'second.weight' was frozen when DDP wrapped the model" in said
    assert "exchange.attach(ddp)" in said
    assert len(kept) == 12
    assert all(kept)
    assert zero
    assert moved == (False, True)
    assert names == ["owner second.bias", "owner second.weight", "worker second.bias", "worker second.weight"]

"""The flat stores: named places, and steps that can be undone."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.exchange.memories import Memories
from lightning_compress.exchange.plan import BlockPlan, ParameterSpec
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.memory.store import Store

SIZES = {"a": 3, "empty": 0, "b": 2}


def make_store(transactional=True, sizes=SIZES):
    return Store(sizes, torch.float32, torch.device("cpu"), transactional)


def write(store, names, value):
    """What an exchange does: adds to what it reads, and writes that."""
    view = store.view(names)
    for i, name in enumerate(names):
        first, size = store.offsets[name], store.sizes[name]
        old = store.data[first + int(view.read[i]) :][:size].clone()
        store.data[first + int(view.write[i]) :][:size] = old + value
    view.mark_written(torch.ones(len(names), dtype=torch.bool))


@pytest.mark.parametrize("transactional", [False, True])
def test_places_do_not_overlap(transactional):
    store = make_store(transactional)
    write(store, ["b", "a"], 1.0)
    store.commit(["a", "b"], True)
    write(store, ["b"], 10.0)
    store.commit(["b"], True)
    assert store.read("a").tolist() == [1, 1, 1]
    assert store.read("b").tolist() == [11, 11]
    assert store.read("empty").numel() == 0


def test_without_transactions_what_is_written_is_there_at_once():
    store = make_store(transactional=False)
    write(store, ["a"], 1.0)
    store.forget(True)
    assert store.read("a").tolist() == [1, 1, 1]
    assert store.data.numel() == 5


def test_a_step_that_was_taken_is_kept():
    store = make_store()
    write(store, ["a", "b"], 1.0)
    assert store.read("a").tolist() == [0, 0, 0]
    store.commit(["a", "b", "unknown"], True)
    store.forget(True)  # too late
    assert store.read("a").tolist() == [1, 1, 1]


def test_a_step_that_was_skipped_has_not_been():
    store = make_store()
    for value, taken in ((1.0, True), (5.0, False), (2.0, True)):
        write(store, ["a"], value)
        if taken:
            store.commit(["a"], True)
        else:
            store.forget(True)
    assert store.read("a").tolist() == [3, 3, 3]


def test_a_fused_optimizer_that_found_an_overflow_has_not_stepped():
    store = make_store()
    write(store, ["a"], 1.0)
    store.commit(["a"], torch.tensor(False))
    write(store, ["a"], 2.0)
    store.commit(["a"], torch.tensor(True))
    assert store.read("a").tolist() == [2, 2, 2]


def test_several_exchanges_before_one_step_add_up_and_are_undone_together():
    store = make_store()
    write(store, ["a"], 1.0)
    store.commit(["a"], True)
    write(store, ["a"], 2.0)
    store.forget(False)
    write(store, ["a"], 4.0)
    assert store.read("a").tolist() == [1, 1, 1]
    store.forget(True)
    write(store, ["a"], 8.0)
    write(store, ["a"], 16.0)
    store.commit(["a"], True)
    assert store.read("a").tolist() == [25, 25, 25]


def test_each_optimizer_decides_for_its_parameters():
    store = make_store()
    write(store, ["a"], 1.0)  # its optimizer skips
    write(store, ["b"], 1.0)
    store.commit(["b"], True)
    store.forget(True)
    assert store.read("a").tolist() == [0, 0, 0]
    assert store.read("b").tolist() == [1, 1]


def test_what_was_not_written_stays():
    store = make_store()
    write(store, ["a", "b"], 1.0)
    store.commit(["a", "b"], True)
    view = store.view(["a", "b"])
    store.data[store.offsets["a"] + int(view.write[0])] = 7.0
    view.mark_written(torch.tensor([False, True]))
    store.commit(["a", "b"], True)
    assert store.read("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize("transactional", [False, True])
def test_take_empties_a_place(transactional):
    store = make_store(transactional)
    write(store, ["a", "b"], 3.0)
    store.commit(["a", "b"], True)
    assert store.take("a").tolist() == [3, 3, 3]
    store.commit(["a"], True)
    assert store.read("a").tolist() == [0, 0, 0]
    assert store.read("b").tolist() == [3, 3]


def make_memories(transactional, **settings):
    settings = ExchangeSettings.make(**settings)
    plan = BlockPlan([ParameterSpec("a", 3, 3, dense=False)], settings.compressor, settings.dense_compressor, 1)
    return Memories(plan, settings, 0, transactional)


def step(memories, value):
    memories.views(["a"], torch.zeros(3))
    write(memories.stores["worker", torch.float32], ["a"], value)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_loss_scale_says_which_steps_were_skipped(as_tensor):
    memories = make_memories(True, compressor="quantize")
    # the scale before each exchange: it falls after a skipped step, and grows after some good ones
    for scale, value, stepped in (
        (8, 1.0, True),
        (8, 2.0, True),
        (16, 4.0, False),
        (8, 8.0, True),
        (8, 16.0, False),
        (4, 0.0, True),
    ):
        memories.settle(torch.tensor(float(scale)) if as_tensor else float(scale))
        step(memories, value)
        if stepped:
            memories.note_step(["a"], True)
    assert memories.read("worker", "a", torch.float32).tolist() == [11, 11, 11]


def test_a_new_scaler_is_not_compared_with_the_old_one():
    memories = make_memories(True, compressor="quantize")
    memories.settle(64.0)
    step(memories, 1.0)  # no optimizer has stepped yet
    memories.watch(2.0)
    memories.settle(2.0)
    memories.note_step(["a"], True)
    assert memories.read("worker", "a", torch.float32).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "sides"),
    [
        ({"compressor": "quantize"}, {"worker", "owner"}),
        ({"compressor": "quantize", "exchange": "all_gather"}, {"worker"}),
        ({"compressor": "none", "exchange": "all_gather"}, set()),
        ({"compressor": "none"}, set()),
    ],
)
def test_stores_exist_where_something_is_remembered(settings, sides):
    memories = make_memories(False, **settings)
    memories.views(["a"], torch.zeros(3, dtype=torch.bfloat16))
    memories.views(["a"], torch.zeros(3, dtype=torch.float64))
    assert set(memories.stores) == {(side, dtype) for side in sides for dtype in (torch.float32, torch.float64)}


def test_memories_fit_only_the_same_parameters():
    assert make_memories(False).fits(make_memories(False))
    assert not make_memories(False).fits(make_memories(True))
    assert not make_memories(False).fits(make_memories(False, exchange="all_gather"))

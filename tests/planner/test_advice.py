"""Which method is recommended, and what is said about it."""

from __future__ import annotations

import pytest

from lightning_compress.exchange.nodes import Nodes
from lightning_compress.planner.advice import explain, recommend
from lightning_compress.planner.methods import check_names, method_names, mildness
from tests.planner.hand_made import prediction


def test_compute_bound_takes_no_compression() -> None:
    found = [prediction("fp32", 1.01), prediction("bf16", 1.0), prediction("quantize", 0.99), prediction("topk", 0.985)]
    assert recommend(found).method == "fp32"
    sentence = explain(found[0], found)
    assert sentence.startswith('Use fp32 DDP (strategy="ddp"): you are compute bound')
    assert sentence.count(".") == 2  # one full stop, and that of 0.99x
    assert "0.99x over bf16 DDP (1000 ms)" in sentence


def test_bf16_where_it_suffices() -> None:
    found = [prediction("fp32", 1.5, 0.5), prediction("bf16", 1.02), prediction("quantize", 1.0)]
    assert recommend(found).method == "bf16"
    assert '"compressed_bf16"' in explain(found[1], found)
    assert "compute bound" in explain(found[1], found)


def test_bf16_where_compressing_costs_what_it_saves() -> None:
    found = [prediction("fp32", 3.0, 2.0), prediction("bf16", 2.0, 1.0), prediction("quantize", 2.2, 1.2)]
    assert recommend(found).method == "bf16"
    assert "compute bound" not in explain(found[1], found)
    assert "costs what it saves" in explain(found[1], found)


def test_slow_link_takes_the_mildest_that_hides_it() -> None:
    found = [
        prediction("topk", 1.0),
        prediction("ternary", 1.01),
        prediction("quantize", 1.02),
        prediction("bf16", 4.0, 3.0),
        prediction("fp32", 8.0, 7.0),
    ]
    chosen = recommend(found)
    assert chosen.method == "quantize"
    assert 'strategy="compressed_quantize"' in explain(chosen, found)
    assert "7.84x over fp32 DDP (8000 ms) and 3.92x over bf16 DDP (4000 ms)" in explain(chosen, found)


def test_noise_makes_the_choice_milder() -> None:
    found = [prediction("bf16", 1.15), prediction("quantize", 1.0, spread=0.05)]
    assert recommend(found).method == "quantize"
    assert recommend([found[0], prediction("quantize", 1.0, spread=0.2)]).method == "bf16"


def test_what_needs_another_optimizer_is_not_recommended() -> None:
    assert recommend([prediction("bf16", 5.0), prediction("dgc", 1.0)]).method == "bf16"


def test_methods_are_the_presets_mildest_first() -> None:
    names = method_names()
    assert names[:2] == ["fp32", "bf16"]
    assert {"quantize", "topk", "dgc"} < set(names)
    assert names.index("quantize") < names.index("ternary") < names.index("onebit") < names.index("topk")
    assert mildness("clan") == mildness("onebit") + 1  # nearly the same code
    assert names[-1] == "dgc"  # the only one that is not placed
    assert check_names(["topk", "fp32", "topk"], Nodes.alone(2)) == ["fp32", "topk"]
    with pytest.raises(ValueError, match="'topq' is unknown; known are fp32, bf16"):
        check_names(["topq"], Nodes.alone(2))


def test_hierarchical_where_nodes_have_several_ranks() -> None:
    nested = Nodes.of(["a", "a", "b", "b"])
    assert check_names(["hierarchical_topk", "hierarchical_quantize"], nested) == [
        "hierarchical_quantize",
        "hierarchical_topk",
    ]
    assert not {"hierarchical_dgc", "hierarchical_clan", "hierarchical_fp32"} & set(method_names(nested))
    for flat in (Nodes.alone(4), Nodes.of(["a", "a"])):
        with pytest.raises(ValueError, match="hierarchical_topk needs several ranks on each of several nodes"):
            check_names(["hierarchical_topk"], flat)


def test_of_equally_mild_methods_the_faster_one() -> None:
    found = [prediction("bf16", 4.0), prediction("quantize", 1.02), prediction("hierarchical_quantize", 1.0)]
    chosen = recommend(found)
    assert chosen.method == "hierarchical_quantize"
    assert explain(chosen, found).startswith('Use CompressedStrategy("quantize", exchange="hierarchical"): ')
    assert recommend([prediction("ternary", 1.0), prediction("hierarchical_quantize", 1.0)]).method == chosen.method

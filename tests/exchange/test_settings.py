"""Wrong settings are errors that name the argument and the remedy, before any process starts."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from lightning_compress import (
    Cast,
    DenseRule,
    DensityWarmup,
    ErrorFeedback,
    GradientExchange,
    MomentumCorrection,
    NoCompression,
    Quantize,
    RandomK,
    TopK,
)
from lightning_compress.exchange.dense import dense_rule
from lightning_compress.exchange.settings import ExchangeSettings
from lightning_compress.exchange.topology import GatherAll, ReduceAll, TwoWay
from tests.exchange.training import make_net
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("settings", "names_and_remedy"),
    [
        ({"compressor": "topkk"}, ["compressor='topkk'", "quantize"]),
        ({"compressor": None}, ["compressor", "name"]),
        ({"compressor": TopK}, ["compressor", "TopK()"]),
        ({"exchange": "ring"}, ["exchange='ring'", "two_way"]),
        ({"exchange": None}, ["exchange=None", "auto"]),
        ({"exchange": "all_reduce"}, ["exchange='all_reduce'", "Quantize", "two_way"]),
        ({"compressor": "fp8", "exchange": "all_reduce"}, ["exchange='all_reduce'", "fp8", "two_way"]),
        ({"memory": "momentum"}, ["memory='momentum'", "error_feedback"]),
        ({"memory": ErrorFeedback}, ["memory", "ErrorFeedback()"]),
        ({"memory": True}, ["memory=True", "error_feedback"]),
        ({"start_step": -1}, ["start_step", "0 or more", "-1"]),
        ({"start_step": True}, ["start_step", "True"]),
        ({"start_step": 1.0}, ["start_step", "1.0"]),
        ({"dense": "int3"}, ["dense='int3'", "bf16"]),
        ({"dense": True}, ["dense", "True", "auto"]),
        ({"dense": None}, ["dense", "None", "auto"]),
        ({"dense": -1}, ["dense", "-1"]),
        ({"compressor": "fp16", "dense": "bf16"}, ["dense='bf16'", "exchange='all_reduce'", "'auto'"]),
        ({"compressor": "none", "dense": "bf16"}, ["dense='bf16'", "compressor='none'", "'auto'"]),
    ],
    ids=str,
)
def test_an_error_names_argument_and_remedy(settings, names_and_remedy):
    with pytest.raises((ValueError, TypeError)) as error:
        GradientExchange(**settings)
    assert [part for part in names_and_remedy if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("make", "names_and_remedy"),
    [
        (lambda: DenseRule("int3"), ["'int3'", "bf16"]),
        (lambda: DenseRule(max_numel=-1), ["max_numel", "-1"]),
        (lambda: DenseRule(patterns="*norm*"), ["patterns", "['*norm*']"]),
        (lambda: DenseRule(["bf16"]), ["['bf16']", "'auto'"]),
        (lambda: DenseRule(max_numel="3"), ["max_numel", "'3'"]),
        (lambda: DenseRule(max_numel=1.5), ["max_numel", "1.5"]),
        (lambda: DenseRule(patterns=3), ["patterns", "3"]),
        (lambda: DenseRule(patterns=[3]), ["patterns", "[3]"]),
        (lambda: MomentumCorrection("0.9"), ["momentum", "'0.9'"]),
        (lambda: MomentumCorrection(None), ["momentum", "None"]),
        (lambda: MomentumCorrection(clip_norm="1"), ["clip_norm", "'1'"]),
        (lambda: MomentumCorrection(clip_norm=float("nan")), ["clip_norm", "nan"]),
        (lambda: MomentumCorrection(nesterov="no"), ["nesterov", "'no'"]),
        (lambda: MomentumCorrection(factor_masking=1), ["factor_masking", "1"]),
        (lambda: DensityWarmup([None]), ["densities", "None"]),
        (lambda: DensityWarmup(epochs="1"), ["epochs", "'1'"]),
        (lambda: DensityWarmup(steps=True), ["steps", "True"]),
        (lambda: RandomK(unbiased="yes"), ["unbiased", "'yes'"]),
        (lambda: GradientExchange(verify_every=1.0), ["verify_every", "1.0", "0 for none"]),
        (lambda: GradientExchange(compression_threads=0), ["compression_threads", "1 or more", "0"]),
        (lambda: GradientExchange(compression_threads=2.0), ["compression_threads", "2.0"]),
        (lambda: GradientExchange(compression_threads=True), ["compression_threads", "True"]),
        (lambda: GradientExchange(compression_threads="auto"), ["compression_threads", "'auto'"]),
    ],
)
def test_wrong_types_are_named(make, names_and_remedy):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the parts of its message are checked below)
        make()
    assert [part for part in names_and_remedy if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("compressor", "exchange", "topology"),
    [
        (NoCompression(), "auto", None),
        (NoCompression(), "two_way", TwoWay),
        (NoCompression(), "all_reduce", ReduceAll),
        (Cast("bf16"), "auto", ReduceAll),
        (Cast("bf16"), "all_gather", GatherAll),
        (Cast("fp8"), "auto", TwoWay),
        (Quantize(), "auto", TwoWay),
    ],
)
def test_auto_takes_all_reduce_where_codes_can_be_added(compressor, exchange, topology):
    assert ExchangeSettings.make(compressor, exchange=exchange).topology is topology


@pytest.mark.parametrize(
    ("compressor", "memory", "expected"),
    [
        (NoCompression(), "auto", None),
        (NoCompression(), "error_feedback", ErrorFeedback()),
        (Quantize(), "auto", ErrorFeedback()),
        (Quantize(), ErrorFeedback(), ErrorFeedback()),
        (Quantize(), "none", None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is biased")
def test_auto_remembers_what_biased_codes_leave_out(compressor, memory, expected):
    assert ExchangeSettings.make(compressor, memory, "two_way").memory == expected


def test_a_biased_code_without_memory_warns():
    with pytest.warns(UserWarning, match="biased.*memory='error_feedback'"):
        GradientExchange("quantize", memory="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientExchange("quantize")
        GradientExchange("none", memory="none")


@pytest.mark.parametrize(
    ("dense", "rule"),
    [
        ("auto", DenseRule()),
        ("fp16", DenseRule("fp16")),
        (0, DenseRule(max_numel=0)),
        (4096, DenseRule(max_numel=1023)),  # tensors below 4096 bytes
        (4097, DenseRule(max_numel=1024)),
        (DenseRule(max_numel=3, patterns=["*x*"]), DenseRule(max_numel=3, patterns=["*x*"])),
    ],
)
def test_dense_may_be_a_code_a_size_in_bytes_or_a_rule(dense, rule):
    assert dense_rule(dense) == rule


@pytest.mark.parametrize(
    ("compressor", "exchange", "expected"),
    [
        (Quantize(4), "two_way", Cast("bf16")),
        (Quantize(2), "two_way", Cast("bf16")),
        (TopK(0.01), "two_way", Quantize(8)),
        (TopK(0.5), "two_way", Cast("bf16")),
        (Cast("fp16"), "all_reduce", Cast("fp16")),
        (Cast("fp16"), "two_way", Cast("fp16")),
        (NoCompression(), "two_way", NoCompression()),
    ],
)
def test_small_tensors_get_a_mild_code(compressor, exchange, expected):
    assert ExchangeSettings.make(compressor, exchange=exchange).dense_compressor == expected


def test_pythons_reducer_of_torch_compile_is_refused(monkeypatch):
    assert run_ranks(attach_to_pythons_reducer, 1) == [True]


def attach_to_pythons_reducer():
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = torch.nn.parallel.DistributedDataParallel(make_net())
    with pytest.raises(ValueError, match=r"python_reducer.*optimize_ddp = True"):
        GradientExchange().attach(ddp)
    return True


PLAIN_DDP = """
import sys, torch, torch.distributed as dist
import lightning_compress as lc
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
exchange = lc.register_comm_hook(ddp, compressor="quantize", exchange="two_way")
ddp(torch.ones(2, 4)).sum().backward()
assert exchange.stats()["steps"] == 1
exchange.close()
lightning = [m for m in sys.modules if m.split(".")[0] in ("pytorch_lightning", "lightning", "lightning_fabric")]
assert lightning == [], lightning
extras = ("torchvision", "transformers", "torchmetrics", "sklearn", "jsonargparse")
heavy = [m for m in sys.modules if m.split(".")[0] in extras]
assert heavy == [], heavy
"""


def test_plain_ddp_needs_no_lightning():
    done = subprocess.run([sys.executable, "-c", PLAIN_DDP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

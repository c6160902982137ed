"""Which tensors are small, and the code they travel in."""

from __future__ import annotations

import pytest

from lightning_compress import (
    Cast,
    CenteredTopK,
    Compressor,
    DenseRule,
    LinearDithering,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    Ternary,
    TopK,
)
from lightning_compress.exchange.settings import ExchangeSettings


@pytest.mark.parametrize(
    ("compressor", "dense"),
    [
        (Quantize(4), Cast("bf16")),
        (Quantize(2), Cast("bf16")),
        (LinearDithering(5), Cast("bf16")),
        (Cast("fp8"), Cast("fp8")),
        (Cast("fp16"), Cast("fp16")),
        (Ternary(), Quantize(8)),
        (OneBit(), Quantize(8)),
        (OneBit(block_size=None), Quantize(8)),
        (CenteredTopK(), Quantize(8)),
        (TopK(0.06), Quantize(8)),
        (TopK(0.003), Quantize(8)),
        (TopK(0.002), Quantize(3)),  # 28 bits for each of 0.2 % are less than a sixteenth of a bit per element
        (TopK(0.08), Cast("bf16")),  # and for each of 8 % more than two bits
        (TopK(0.06, dtype="fp32"), Cast("bf16")),
        (RandomK(), Cast("fp32")),  # rides in the one float32 array of the all-reduce
    ],
    ids=repr,
)
def test_the_code_of_small_tensors_follows_that_of_large_ones(compressor: Compressor, dense: Compressor) -> None:
    assert ExchangeSettings.make(compressor).dense_compressor == dense


def test_without_error_feedback_small_tensors_are_rounded_to_16_bits_only() -> None:
    settings = ExchangeSettings.make(RandomK(1 / 32, unbiased=True), memory="none", exchange="two_way")
    assert settings.dense_compressor == Cast("bf16")


@pytest.mark.parametrize(
    ("rule", "name", "shape", "matches"),
    [
        (DenseRule(), "conv.bias", (4096,), True),
        (DenseRule(), "scalar", (), True),
        (DenseRule(), "small.weight", (32, 32), True),
        (DenseRule(), "large.weight", (32, 33), False),
        (DenseRule(patterns=["*decoder*"]), "word_embeddings.weight", (1000, 100), False),
        (DenseRule(patterns=["*embeddings*"]), "word_embeddings.weight", (1000, 100), True),
        (DenseRule(max_numel=0), "small.weight", (32, 32), False),
    ],
)
def test_which_tensors_are_small(rule: DenseRule, name: str, shape: tuple[int, ...], matches: bool) -> None:
    numel = 1
    for size in shape:
        numel *= size
    assert rule.matches(name, shape, numel) is matches


def test_a_number_of_bytes_is_the_papers_rule() -> None:
    rule = ExchangeSettings.make("onebit", dense=1_024_000).dense
    assert rule.matches("w", (255_999, 1), 255_999)
    assert not rule.matches("w", (256_000, 1), 256_000)


@pytest.mark.parametrize(
    ("dense", "message"),
    [("int8", "dense='int8'"), (1.5, "dense must be"), (True, "dense must be"), (None, "dense must be")],
)
def test_unknown_forms_are_refused(dense: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangeSettings.make("topk", dense=dense)  # type: ignore[arg-type]


def test_a_string_of_patterns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['\*bias'\]"):
        DenseRule(patterns="*bias")


def test_no_compression_has_no_small_tensors() -> None:
    assert ExchangeSettings.make("none").topology is None
    assert ExchangeSettings.make("none", exchange="two_way").dense_compressor == NoCompression()

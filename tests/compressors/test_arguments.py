"""Bad arguments are refused at construction by an error that names them."""

from __future__ import annotations

import pytest

from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.onebit import OneBit
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.ternary import Ternary
from lightning_compress.testing import check_compressor


@pytest.mark.parametrize("family", [Cast, Quantize, Ternary, OneBit])
@pytest.mark.parametrize("block_size", [0, -1, 65537, 2.5, "1024"])
def test_block_size(family, block_size):
    with pytest.raises(ValueError, match="block_size"):
        family(block_size=block_size)


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -4, 4.0, 4.5, "4", True, None, [4]])
def test_bits(bits):
    with pytest.raises(ValueError, match="bits"):
        Quantize(bits)


@pytest.mark.parametrize("dtype", ["fp64", "float16", "", None, 16, ["fp16"]])
def test_dtype(dtype):
    with pytest.raises(ValueError, match="dtype"):
        Cast(dtype)


def test_unknown_check():
    with pytest.raises(KeyError, match="no_such_check"):
        check_compressor(Ternary(), ["no_such_check"])


def test_settings_make_the_identity():
    assert Ternary(64) == Ternary(64) != Ternary(128)
    assert len({OneBit(), OneBit(), OneBit(37), Ternary()}) == 3
    assert repr(Quantize(4, block_size=None)) == "Quantize(bits=4, block_size=None)"

"""What a payload is: one family per file, the contract in ``base``, the names in ``registry``."""

from functools import partial

from lightning_compress.compressors.base import Blocks, Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.centered import CenteredTopK
from lightning_compress.compressors.dithering import LinearDithering
from lightning_compress.compressors.natural import NaturalDithering
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.onebit import OneBit
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.randomk import RandomK
from lightning_compress.compressors.registry import compressor_names, get_compressor, register_compressor
from lightning_compress.compressors.ternary import Ternary
from lightning_compress.compressors.topk import TopK

__all__ = [
    "Blocks",
    "Cast",
    "CenteredTopK",
    "Compressor",
    "LinearDithering",
    "NaturalDithering",
    "NoCompression",
    "OneBit",
    "Quantize",
    "RandomK",
    "Ternary",
    "TopK",
    "compressor_names",
    "get_compressor",
    "register_compressor",
]

register_compressor("none", NoCompression)
register_compressor("fp16", partial(Cast, "fp16"))
register_compressor("bf16", partial(Cast, "bf16"))
register_compressor("fp8", partial(Cast, "fp8"))
register_compressor("quantize", Quantize)
register_compressor("ternary", Ternary)
register_compressor("centered", CenteredTopK)
register_compressor("onebit", OneBit)
register_compressor("topk", TopK)
register_compressor("randomk", RandomK)
register_compressor("dithering", LinearDithering)
register_compressor("natural", NaturalDithering)

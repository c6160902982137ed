"""What a payload is: one family per file, the contract in ``base``, the names in ``registry``."""

from lightning_compress.compressors.base import Blocks, Compressor
from lightning_compress.compressors.cast import Cast
from lightning_compress.compressors.none import NoCompression
from lightning_compress.compressors.quantize import Quantize
from lightning_compress.compressors.registry import compressor_names, get_compressor, register_compressor

__all__ = [
    "Blocks",
    "Cast",
    "Compressor",
    "NoCompression",
    "Quantize",
    "compressor_names",
    "get_compressor",
    "register_compressor",
]

register_compressor("none", NoCompression)
register_compressor("quantize", Quantize)

"""Optimizers made for compressed exchanges."""

from lightning_compress.optim.compressed_adam import CompressedAdam
from lightning_compress.optim.dgc_sgd import DGCSGD
from lightning_compress.optim.lans import LANS

__all__ = ["DGCSGD", "LANS", "CompressedAdam"]

"""How gradients travel."""

from lightning_compress.exchange.dense import DenseRule
from lightning_compress.exchange.hook import GradientExchange, register_comm_hook

__all__ = ["DenseRule", "GradientExchange", "register_comm_hook"]

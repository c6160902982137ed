"""Optimizers made for compressed exchanges."""

from lightning_compress.optim.dgc_sgd import DGCSGD

__all__ = ["DGCSGD"]

"""Measures a model, its device and its network, and predicts what every gradient exchange would cost."""

from lightning_compress.planner.methods import method_names
from lightning_compress.planner.planning import Plan, plan

__all__ = ["Plan", "method_names", "plan"]

"""For authors and tests: the conformance suite for compressors, and the one-process simulator of N workers."""

from lightning_compress.testing.simulation import SimulatedExchange, simulate

__all__ = ["SimulatedExchange", "simulate"]

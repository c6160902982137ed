"""For tests of compressors and for research: what every compressor must satisfy, and N workers in one process."""

from lightning_compress.testing.conformance import CHECKS, check_compressor
from lightning_compress.testing.simulation import SimulatedExchange, simulate

__all__ = ["CHECKS", "SimulatedExchange", "check_compressor", "simulate"]

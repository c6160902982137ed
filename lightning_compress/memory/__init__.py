"""What is remembered between steps."""

from lightning_compress.memory.error_feedback import ErrorFeedback
from lightning_compress.memory.momentum import MomentumCorrection
from lightning_compress.memory.shared_momentum import SharedMomentum

__all__ = ["ErrorFeedback", "MomentumCorrection", "SharedMomentum"]

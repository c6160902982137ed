"""What is remembered between steps."""

from lightning_compress.memory.error_feedback import ErrorFeedback
from lightning_compress.memory.momentum import MomentumCorrection

__all__ = ["ErrorFeedback", "MomentumCorrection"]

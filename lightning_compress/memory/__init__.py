"""What is remembered between steps."""

from lightning_compress.memory.error_feedback import ErrorFeedback

__all__ = ["ErrorFeedback"]

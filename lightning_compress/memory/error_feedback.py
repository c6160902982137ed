"""Error feedback: what a code left out is added to the next gradient."""

from __future__ import annotations


class ErrorFeedback:
    """What a code leaves out of p = g + e becomes e = p - decode(encode(p)) (arXiv 2105.07829).

    The error that is fed back is the LOCAL one: each worker keeps what its own code left out, each owner what its second
    encoding left out. No learning-rate factor. The arithmetic is fused into the encoding kernels (``exchange.codec``); the
    residuals live in a ``Store``, float32 (float64 for float64 parameters), keyed by parameter name.
    """

    def __repr__(self) -> str:
        return "ErrorFeedback()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

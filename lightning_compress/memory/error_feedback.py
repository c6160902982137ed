"""Error feedback: what a code left out is added to the next gradient."""

from __future__ import annotations


class ErrorFeedback:
    """p = g + e is encoded instead of g, and e = p - decode(encode(p)) is kept (arXiv 2105.07829; ALGORITHMS.md section 2).

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

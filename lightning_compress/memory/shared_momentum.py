"""The memory of an exchange that carries momenta: error feedback on what 1-bit Adam sends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedMomentum:
    """Ranks exchange momenta instead of gradients (1-bit Adam, Tang et al. 2021, arXiv 2102.02888, algorithm 1).

    Before ``freeze_step`` it is error feedback on gradients. From then on rank i sends m_i = b1 m + (1 - b1) g_i with the
    optimizer's m, which is the same on all ranks, and what the code leaves out of it is fed back. The mean of what arrives
    is the next m. Residuals of gradients are worth nothing among momenta: both sides begin the new phase at zero.

    ``optim.CompressedAdam(exchanged="momentum")`` makes it.

    Args:
        freeze_step: Number of the first exchange that carries momenta.
    """

    freeze_step: int

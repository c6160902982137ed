"""Compiled form of ``kernels.reference.hashing``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit

GOLDEN = np.uint32(0x9E3779B1)
FIRST, SECOND = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


@njit()
def mix(word):
    """Mixes one 32-bit word. numba widens every operation, so each result is cut back: vector code needs 32 bits."""
    word = np.uint32((word ^ (word >> np.uint32(16))) * FIRST)
    word = np.uint32((word ^ (word >> np.uint32(13))) * SECOND)
    return np.uint32(word ^ (word >> np.uint32(16)))


@njit()
def block_base(salt, key):
    """What all elements of a parameter share."""
    return mix(np.uint32(key ^ salt))


@njit()
def element_hash(base, element):
    """32-bit hash of an element of the parameter that ``base`` belongs to."""
    return mix(base ^ np.uint32(np.uint32(element) * GOLDEN))

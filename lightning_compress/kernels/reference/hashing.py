"""Counter-based random numbers: a hash of (seed, parameter name, step, element[, rank]), the same on every device.

Nothing is drawn from a generator, so nothing has to be saved: a resumed run continues the same sequence.
The mixer is the 32-bit finaliser of MurmurHash3. 32-bit words are held in int64, since torch has no uint32 arithmetic.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def mix(word: int) -> int:
    """Mixes one 32-bit word on the host."""
    word &= _MASK
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK
    return word ^ (word >> 16)


def mix_tensor(words: Tensor) -> Tensor:
    """Mixes 32-bit words held in an int64 tensor."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _MASK
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _MASK
    return words ^ (words >> 16)


def name_key(name: str) -> int:
    """A 32-bit key of a parameter's name."""
    return mix(zlib.crc32(name.encode()))


def salt(seed: int, step: int, rank: int | None = None) -> int:
    """What is the same for all elements of one exchange; ``rank=None`` gives all ranks the same numbers."""
    word = mix(mix(seed) ^ step)
    return word if rank is None else mix(word ^ (rank + 1) * _GOLDEN)


def element_hash(salt: int, key: Tensor, element: Tensor) -> Tensor:
    """32-bit hashes of elements.

    Args:
        salt: From :func:`salt`.
        key: Name keys, int64 of shape [m].
        element: Element numbers inside the parameter, int64 of shape [m, n].

    Returns:
        int64 of shape [m, n], uniform in [0, 2**32).
    """
    base = mix_tensor((key ^ salt) & _MASK).unsqueeze(-1)
    return mix_tensor(base ^ (element * _GOLDEN & _MASK))


def uniform(salt: int, key: Tensor, element: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) with 24 random bits; arguments as :func:`element_hash`."""
    return (element_hash(salt, key, element) >> 8).to(torch.float32) * 2.0**-24

"""BERT's masking: which tokens are to be guessed, and what the model sees in their place (Devlin et al. 2018, section 3.1)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from .tokens import special_ids

IGNORED = -100
"""Label of the tokens that are not to be guessed: torch's cross entropy leaves them out."""


class Masking:
    """Hides a share of the tokens: 80 % become [MASK], 10 % another token, 10 % stay. Special tokens are never chosen."""

    def __init__(self, tokenizer: Tokenizer, share: float) -> None:
        """Remember the tokenizer's numbers.

        Args:
            tokenizer: Of the sequences.
            share: Of the tokens that are hidden: 0.15 in the paper. At least one per sequence is.
        """
        self.share = share
        ids = special_ids(tokenizer)
        self.mask = ids.mask
        self.special = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
        self.special[list(ids)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def __call__(self, tokens: Tensor, seeds: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Hide tokens.

        Args:
            tokens: ``int64[batch, length]``.
            seeds: For every sequence the numbers that decide what is hidden in it, alone: neither its place in the batch
                nor the number of ranks matters.

        Returns:
            What the model sees, ``int64[batch, length]``, and the tokens to guess, of the same shape and type, -100 at all
            others.
        """
        shown = tokens.numpy().copy()
        draws = np.stack([np.random.default_rng(seed).random((3, shown.shape[1])) for seed in seeds], axis=1)
        chosen = self._choose(shown, draws[0])
        labels = np.where(chosen, shown, IGNORED)
        shown[chosen & (draws[1] < 0.8)] = self.mask
        other = self.ordinary[(draws[2] * len(self.ordinary)).astype(np.int64)]
        shown = np.where(chosen & (draws[1] >= 0.9), other, shown)
        return torch.from_numpy(shown), torch.from_numpy(labels)

    def _choose(self, tokens: NDArray[np.int64], order: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The same number of tokens in every sequence, the first in a random order that ends with the special ones."""
        special = self.special[tokens]
        count = max(1, round(self.share * (tokens.shape[1] - 2)))
        first = np.argsort(np.where(special, 2.0, order), axis=1)[:, :count]
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, first, True, axis=1)
        return chosen & ~special

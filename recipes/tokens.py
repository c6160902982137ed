"""WordPiece tokenizers: trained from the text at hand, or read from a folder or a checkpoint."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

UNK = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", UNK, "[CLS]", "[SEP]", "[MASK]")
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINT_KEY = "tokenizer"
MAX_VOCABULARY = 1 << 16
"""Tokens are stored in 16 bits."""


class SpecialIds(NamedTuple):
    """The numbers of the special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a lower-case WordPiece vocabulary as BERT's.

    Args:
        texts: Read once.
        vocab_size: Most tokens, special ones included. A small text gives fewer.

    Raises:
        ValueError: If there is no room for the special tokens, or for 16 bits.
    """
    if not len(SPECIAL_TOKENS) < vocab_size <= MAX_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} must be more than {len(SPECIAL_TOKENS)} and at most {MAX_VOCABULARY}"
        )
    tokenizer = _bert_tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False),
    )
    _add_specials(tokenizer)
    return tokenizer


def load_tokenizer(source: str) -> Tokenizer:
    """Read a tokenizer.

    Args:
        source: A folder with ``tokenizer.json`` (as of Hugging Face's ``save_pretrained``) or ``vocab.txt`` (one token on a
            line, taken as lower-case), or the ``.ckpt`` file of a model that was trained with :class:`MLMData`.

    Raises:
        FileNotFoundError: If there is none, with what to put where.
        ValueError: If it is not BERT's kind.
    """
    path = Path(source)
    if path.suffix == ".ckpt" and path.is_file():
        text = checkpoint_tokenizer(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        if text is None:
            raise FileNotFoundError(f"{path} holds no tokenizer: it was not trained with MLMData")
        tokenizer = Tokenizer.from_str(text)
    elif (path / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
    elif (path / "vocab.txt").is_file():
        tokenizer = _bert_tokenizer(models.WordPiece.from_file(str(path / "vocab.txt"), unk_token=UNK))
        _add_specials(tokenizer)
    else:
        raise FileNotFoundError(
            f"no tokenizer in {path}: name a folder with {TOKENIZER_FILE} or vocab.txt, or a checkpoint"
        )
    special_ids(tokenizer)  # all must be there
    if tokenizer.get_vocab_size() > MAX_VOCABULARY:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} tokens, at most {MAX_VOCABULARY} can be stored")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def checkpoint_tokenizer(checkpoint: dict[str, Any]) -> str | None:
    """Return the tokenizer in a checkpoint of Lightning's, None if it has none."""
    text: str | None = checkpoint.get("MLMData", {}).get(CHECKPOINT_KEY)
    return text


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of a tokenizer."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Return the numbers of a tokenizer's special tokens.

    Raises:
        ValueError: If one is missing.
    """
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    missing = [token for token, number in zip(SPECIAL_TOKENS, ids, strict=True) if number is None]
    if missing:
        raise ValueError(f"the tokenizer is not one as BERT's: it lacks {', '.join(missing)}")
    return SpecialIds(*(int(number) for number in ids if number is not None))


def _bert_tokenizer(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _add_specials(tokenizer: Tokenizer) -> None:
    """[CLS] text [SEP], or [CLS] text [SEP] pair [SEP]."""
    ids = special_ids(tokenizer)  # before the next line, which would append what is missing
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids.sep), ("[CLS]", ids.cls))


def padded(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Return token sequences of several lengths as the arguments of transformers' BERT, ``int64[batch, longest]`` each."""
    longest = max(map(len, ids))
    rows = [[*row, *[pad] * (longest - len(row))] for row in ids]
    return {
        "input_ids": torch.tensor(rows),
        "token_type_ids": torch.tensor([[*row, *[0] * (longest - len(row))] for row in types]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
    }

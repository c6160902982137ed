"""SQuAD's questions: reading them, cutting long texts into windows, and finding the answer in what the network says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor


class Question:
    """A question about a text.

    Attributes:
        id: The file's name for it.
        question: The question.
        context: The text.
        answers: The right answers and the characters of the text at which they begin. Empty: the text has no answer.
        answerable: Whether it is sure that there is an answer, as in version 1.1.
        windows: The tokens, set before validation.
    """

    # Not a dataclass or a named tuple: Lightning would walk through all of it to move a batch to the device.
    def __init__(self, id: str, question: str, context: str, answers: list[tuple[str, int]], answerable: bool) -> None:  # noqa: A002
        """Take over the attributes."""
        self.id = id
        self.question = question
        self.context = context
        self.answers = answers
        self.answerable = answerable
        self.windows: list[Window] = []

    def is_placed(self) -> bool:
        """Return whether the first answer, if there is one, stands in the text where the file says."""
        return all(start >= 0 and self.context.startswith(text, start) for text, start in self.answers[:1])

    def right_answers(self) -> dict[str, list[str] | list[int]]:
        """Return the answers as torchmetrics expects them."""
        answers = self.answers or [("", 0)]
        return {"text": [text for text, _ in answers], "answer_start": [start for _, start in answers]}


class Window(NamedTuple):
    """A question with as much of its text as fits into a sequence.

    Attributes:
        ids: Tokens: [CLS] question [SEP] text [SEP].
        types: 0 for the question, 1 for the text.
        offsets: For every token the characters where it begins and ends.
        text: The positions of the text's tokens.
    """

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    text: range

    def positions(self, answer: tuple[str, int] | None) -> tuple[int, int]:
        """Return the first and the last token of an answer; both are 0, the [CLS], if it is not wholly in this window."""
        if answer is None:
            return 0, 0
        start, end = answer[1], answer[1] + len(answer[0])
        touched = [at for at in self.text if self.offsets[at][0] < end and self.offsets[at][1] > start]
        if not touched or self.offsets[touched[0]][0] > start or self.offsets[touched[-1]][1] < end:
            return 0, 0
        return touched[0], touched[-1]


class Windows:
    """Cuts questions into windows."""

    def __init__(self, tokenizer: Tokenizer, seq_len: int, overlap: int, max_question: int) -> None:
        """Set the lengths, in tokens.

        Args:
            tokenizer: Taken as a copy.
            seq_len: Most tokens of a window.
            overlap: Tokens of the text that follow-up windows repeat.
            max_question: Longer questions are cut off.
        """
        self._questions = Tokenizer.from_str(tokenizer.to_str())
        self._questions.enable_truncation(max_question)
        self._pairs = Tokenizer.from_str(tokenizer.to_str())
        self._pairs.enable_truncation(seq_len, stride=overlap, strategy="only_second")

    def __call__(self, questions: Sequence[Question]) -> list[list[Window]]:
        """Return the windows of each question."""
        cut = self._questions.encode_batch([one.question for one in questions], add_special_tokens=False)
        shortened = [
            one.question[: code.offsets[-1][1] if code.ids else 0] for one, code in zip(questions, cut, strict=True)
        ]
        pairs = [(text, one.context) for text, one in zip(shortened, questions, strict=True)]
        return [[_window(code) for code in (first, *first.overflowing)] for first in self._pairs.encode_batch(pairs)]


def read_questions(path: Path) -> list[Question]:
    """Read a file in SQuAD's JSON, version 1.1 or 2.0.

    Raises:
        ValueError: If it is not such a file, with what is wrong in it.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            _question(item, paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not SQuAD's JSON: {error!r}") from None


def _question(item: dict[str, Any], context: str) -> Question:
    found = [(answer["text"], answer["answer_start"]) for answer in item["answers"]]
    texts = (item["question"], context, *(text for text, _ in found))
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(start, int) for _, start in found):
        raise TypeError(f"question {item['id']!r} has a text that is none, or an answer_start that is no number")
    return Question(item["id"], item["question"], context, found, answerable="is_impossible" not in item)


def answers(starts: Tensor, ends: Tensor, questions: Sequence[Question], max_answer: int) -> list[str]:
    """Return the most likely answers.

    Args:
        starts: ``float[windows, length]``: how likely an answer begins at a token. The windows of all questions in a row.
        ends: The same for its end.
        questions: With their windows.
        max_answer: Most tokens of an answer.

    Returns:
        For each question the best part of its text over all its windows. "" where having no answer is more likely (the
        start and end at [CLS], in the window that is least sure of it) and not ruled out.
    """
    starts, ends = starts.float().cpu(), ends.float().cpu()
    row = 0
    result = []
    for question in questions:
        best, none, answer = float("-inf"), float("inf"), ""
        for window in question.windows:
            none = min(none, float(starts[row, 0] + ends[row, 0]))
            if window.text:
                score, first, last = _best_span(starts[row], ends[row], window.text, max_answer)
                if score > best:
                    best, answer = score, question.context[window.offsets[first][0] : window.offsets[last][1]]
            row += 1
        result.append(answer if question.answerable or best > none else "")
    return result


def _best_span(starts: Tensor, ends: Tensor, text: range, max_answer: int) -> tuple[float, int, int]:
    """The score and the ends of the best span of at most ``max_answer`` tokens in the text."""
    scores = starts[text.start : text.stop, None] + ends[None, text.start : text.stop]
    allowed = torch.ones_like(scores).triu().tril(max_answer - 1).bool()
    best = int(scores.masked_fill(~allowed, float("-inf")).argmax())
    first, last = divmod(best, len(text))
    return float(scores[first, last]), text.start + first, text.start + last


def _window(code: Any) -> Window:
    of_text = [at for at, part in enumerate(code.sequence_ids) if part == 1]
    text = range(of_text[0], of_text[-1] + 1) if of_text else range(0)
    return Window(code.ids, code.type_ids, code.offsets, text)

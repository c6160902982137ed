"""Questions and texts for :class:`~lightning_compress.recipes.BertQuestionAnswering`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from .loading import check_files, check_one_batch_per_process, check_positive, find_folder, make_loader
from .squad import Question, Window, Windows, read_questions
from .tokens import load_tokenizer, padded, special_ids

Version = Literal["1.1", "2.0"]


class SquadData(LightningDataModule):
    """SQuAD's questions from local files in its JSON format. Nothing is ever downloaded.

    Training sees every window of a long text as a sequence of its own. In validation the windows of a question stay
    together, so that its answer is found on one rank.
    """

    def __init__(
        self,
        tokenizer: str,
        root: str | None = None,
        version: Version = "1.1",
        seq_len: int = 384,
        overlap: int = 128,
        max_question: int = 64,
        batch_size: int = 4,
        num_workers: int = 0,
    ) -> None:
        """Check the settings and find the files, without reading them yet.

        Args:
            tokenizer: A folder with ``tokenizer.json`` or ``vocab.txt``, or the checkpoint of a pre-trained model.
            root: Folder with ``train-v<version>.json`` and ``dev-v<version>.json``; else the environment variable
                LC_DATA_ROOT is asked.
            version: ``"2.0"`` has questions without an answer.
            seq_len: Most tokens of a window.
            overlap: Tokens of the text that the next window of it repeats.
            max_question: Longer questions are cut off.
            batch_size: Windows per process and step in training, questions in validation.
            num_workers: Loader processes beside each training process.

        Raises:
            ValueError: If a number is out of range or the version unknown.
            FileNotFoundError: If the files are not there, with what to put where.
        """
        super().__init__()
        check_positive(batch_size=batch_size, max_question=max_question)
        if version not in get_args(Version):
            raise ValueError(f"version={version!r} is unknown; choose one of {', '.join(get_args(Version))}")
        if not 0 <= overlap < seq_len - max_question - 3:
            raise ValueError(
                f"overlap={overlap} must be less than seq_len - max_question - 3 = {seq_len - max_question - 3}"
            )
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        # Looked for here, in the one process that builds everything: later it would fail on each rank separately.
        self.train_file, self.dev_file = _find(root, version)
        self.tokenizer = load_tokenizer(tokenizer)
        self._pad = special_ids(self.tokenizer).pad
        self._windows = Windows(self.tokenizer, seq_len, overlap, max_question)
        self.train: list[tuple[Window, tuple[int, int]]] = []
        self.questions: list[Question] = []

    @override
    def setup(self, stage: str) -> None:
        """Read the files and cut the training texts into windows, without questions whose answer is not where they say.

        Raises:
            ValueError: If a file is damaged, or training has less than one batch per process.
        """
        if stage == "fit" and not self.train:
            questions = _placed(read_questions(self.train_file))
            for question, windows in zip(questions, self._windows(questions), strict=True):
                answer = question.answers[0] if question.answers else None
                self.train += [(window, window.positions(answer)) for window in windows]
            check_one_batch_per_process(self, self.batch_size, len(self.train), "windows")
        self.questions = self.questions or read_questions(self.dev_file)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches, all of the same size so that every rank takes the same number of steps."""
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "collate_fn": self._training_batch}
        return make_loader(self.train, self.batch_size, self.num_workers, **options)  # type: ignore[arg-type]

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Return the questions of the dev file."""
        return make_loader(self.questions, self.batch_size, self.num_workers, collate_fn=self._validation_batch)  # type: ignore[arg-type]

    def _training_batch(self, items: Sequence[tuple[Window, tuple[int, int]]]) -> dict[str, Tensor]:
        starts, ends = torch.tensor([positions for _, positions in items]).T
        return {**self._inputs([window for window, _ in items]), "start_positions": starts, "end_positions": ends}

    def _validation_batch(self, questions: list[Question]) -> tuple[dict[str, Tensor], list[Question]]:
        for question, windows in zip(questions, self._windows(questions), strict=True):
            question.windows = windows
        return self._inputs([window for question in questions for window in question.windows]), questions

    def _inputs(self, windows: Sequence[Window]) -> dict[str, Tensor]:
        return padded([window.ids for window in windows], [window.types for window in windows], self._pad)


def _placed(questions: list[Question]) -> list[Question]:
    placed = [one for one in questions if one.is_placed()]
    if lost := [one for one in questions if not one.is_placed()]:
        rank_zero_warn(
            f"{len(lost)} of {len(questions)} questions are left out of training: their text has no such answer at "
            f"answer_start; the first is {lost[0].id!r}"
        )
    return placed


def _find(root: str | None, version: Version) -> tuple[Path, Path]:
    """SQuAD's two files."""
    names = (f"train-v{version}.json", f"dev-v{version}.json")
    folder = find_folder(root, f"{names[0]} and {names[1]} (https://rajpurkar.github.io/SQuAD-explorer)")
    check_files(folder, *names)
    return folder / names[0], folder / names[1]

"""SQuAD's files, the windows over long texts, and the answers found in them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_compress.recipes import BertQuestionAnswering, SquadData
from lightning_compress.recipes.squad import Question, Windows, answers, read_questions
from lightning_compress.recipes.tokens import load_tokenizer, train_tokenizer

PLACES = ("oslo", "rome", "lima", "cairo")
CONTEXT = " ".join(f"person{number} lives in {PLACES[number % 4]} ." for number in range(12))


def write_squad(folder: Path, version: str = "1.1") -> None:
    """Twelve questions about one text, the answers of which are towns, and in version 2.0 one without an answer."""
    items: list[dict[str, Any]] = []
    for number in range(12):
        place = PLACES[number % 4]
        start = CONTEXT.index(f"person{number} lives") + len(f"person{number} lives in ")
        answer = [{"text": place, "answer_start": start}]
        items.append({"id": str(number), "question": f"where lives person{number} ?", "answers": answer})
    if version == "2.0":
        items = [{**item, "is_impossible": False} for item in items]
        items.append({"id": "none", "question": "where lives nobody ?", "answers": [], "is_impossible": True})
    content = {"version": version, "data": [{"title": "", "paragraphs": [{"context": CONTEXT, "qas": items}]}]}
    for split in ("train", "dev"):
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content))


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    train_tokenizer([CONTEXT + " where nobody ?"] * 20, 120).save(str(folder / "tokenizer.json"))
    return str(folder)


def squad(tmp_path: Path, vocabulary: str, **settings: Any) -> SquadData:
    options: dict[str, Any] = {"seq_len": 40, "overlap": 8, "max_question": 12, "batch_size": 4, **settings}
    return SquadData(vocabulary, str(tmp_path), **options)


def test_windows_cover_the_text_and_mark_the_answer(tmp_path: Path, vocabulary: str) -> None:
    write_squad(tmp_path)
    data = squad(tmp_path, vocabulary)
    data.setup("fit")
    assert len(data.train) > 24  # several windows for each question
    question = data.questions[5]
    (windows,) = data._windows([question])
    assert all(len(window.ids) <= 40 for window in windows)
    ends = [(window.offsets[window.text.start][0], window.offsets[window.text.stop - 1][1]) for window in windows]
    assert (ends[0][0], ends[-1][1]) == (0, len(CONTEXT))
    assert all(later[0] < earlier[1] for earlier, later in pairwise(ends))  # they overlap
    marked = [window.positions(question.answers[0]) for window in windows]
    found = {
        CONTEXT[window.offsets[first][0] : window.offsets[last][1]]
        for window, (first, last) in zip(windows, marked, strict=True)
        if first
    }
    assert found == {"rome"}
    assert (0, 0) in marked  # the answer is not in all of them
    assert windows[0].positions(None) == (0, 0)


def test_part_of_an_answer_is_none(vocabulary: str) -> None:
    question = Question("0", "where ?", CONTEXT, [], True)
    tokenizer = load_tokenizer(vocabulary)
    first, second, *_ = Windows(tokenizer, 30, 0, 8)([question])[0]
    cut = first.offsets[first.text.stop - 1][1]
    across = (CONTEXT[cut - 3 : cut + 9], cut - 3)
    assert first.positions(across) == second.positions(across) == (0, 0)


def test_questions_are_cut(vocabulary: str) -> None:
    tokenizer = load_tokenizer(vocabulary)
    question = Question("0", "lives " * 30, CONTEXT, [], True)
    (window, *_) = Windows(tokenizer, 30, 0, 4)([question])[0]
    assert window.text.start == 1 + 4 + 1  # [CLS], four tokens, [SEP]


def test_answers_over_windows(vocabulary: str, tmp_path: Path) -> None:
    write_squad(tmp_path, "2.0")
    data = squad(tmp_path, vocabulary, version="2.0")
    data.setup("validate")
    sure, maybe = data.questions[0], data.questions[12]
    sure.answerable = True
    (inputs, asked) = data._validation_batch([sure, maybe])
    rows, length = inputs["input_ids"].shape
    per_question = len(sure.windows)
    starts, ends = torch.zeros(rows, length), torch.zeros(rows, length)
    starts[:, 0] = ends[:, 0] = 5.0  # no answer
    window = sure.windows[1]
    first = window.text.start + 2
    starts[1, first], ends[1, first + 1] = 3.0, 3.0
    ends[1, first - 1] = 5.0  # before the start: no span
    ends[1, 1] = 99.0  # in the question
    expected = CONTEXT[window.offsets[first][0] : window.offsets[first + 1][1]]
    assert answers(starts, ends, asked, 5) == [expected, ""]
    assert answers(starts, ends, asked, 1)[0] != expected
    certain = maybe.windows[0].text.start + 3
    starts[per_question, certain] = 20.0
    first_character, last_character = maybe.windows[0].offsets[certain]
    assert answers(starts, ends, asked, 1)[1] == CONTEXT[first_character:last_character] != ""
    assert sure.right_answers() == {"text": ["oslo"], "answer_start": [17]}
    assert maybe.right_answers() == {"text": [""], "answer_start": [0]}


def test_what_is_missing_is_named(tmp_path: Path, vocabulary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_DATA_ROOT", raising=False)
    with pytest.raises(FileNotFoundError, match=r"needs a folder with train-v1\.1\.json and dev-v1\.1\.json"):
        SquadData(vocabulary)
    with pytest.raises(FileNotFoundError, match=r"has no train-v2\.0\.json and no dev-v2\.0\.json"):
        squad(tmp_path, vocabulary, version="2.0")
    with pytest.raises(ValueError, match="version='3' is unknown"):
        squad(tmp_path, vocabulary, version="3")
    with pytest.raises(ValueError, match="overlap=25 must be less than seq_len - max_question - 3 = 25"):
        squad(tmp_path, vocabulary, overlap=25)
    (tmp_path / "a.json").write_text('{"data": [{}]}')
    with pytest.raises(ValueError, match=r"a\.json is not SQuAD's JSON: KeyError\('paragraphs'\)"):
        read_questions(tmp_path / "a.json")


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    good = {"id": "7", "question": "where ?", "answers": [{"text": "oslo", "answer_start": 17}]}
    path = tmp_path / "a.json"
    for bad in ({"question": None}, {"answers": None}, {"answers": [{"text": "oslo", "answer_start": "17"}]}):
        path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": [{**good, **bad}]}]}]}))
        with pytest.raises(ValueError, match=r"a\.json is not SQuAD's JSON: TypeError"):
            read_questions(path)
    path.write_bytes('{"data": "Größe"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.json is not SQuAD's JSON: UnicodeDecodeError"):
        read_questions(path)


@pytest.mark.parametrize("start", [18, 5000, 17 - len(CONTEXT)])
def test_answers_at_another_place_are_left_out_of_training_and_said(
    tmp_path: Path, vocabulary: str, start: int
) -> None:
    write_squad(tmp_path)
    path = tmp_path / "train-v1.1.json"
    content = json.loads(path.read_text())
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = start
    everything = squad(tmp_path, vocabulary)
    everything.setup("fit")
    path.write_text(json.dumps(content))
    data = squad(tmp_path, vocabulary)
    with pytest.warns(UserWarning, match="1 of 12 questions are left out of training.*first is '0'"):
        data.setup("fit")
    assert len(data.train) == len(everything.train) * 11 // 12


def test_a_text_without_words_has_no_answer(vocabulary: str) -> None:
    question = Question("0", "where ?", "  ", [], True)
    (question.windows,) = Windows(load_tokenizer(vocabulary), 30, 0, 8)([question])
    assert answers(torch.zeros(1, 30), torch.zeros(1, 30), [question], 5) == [""]


def test_learns_the_answers(tmp_path: Path, vocabulary: str) -> None:
    pl.seed_everything(0)
    paragraphs = []
    for number in range(32):  # a text of eight words, in three of four a town among them
        words = ["lives"] * (number % 7) + ["in"] * (7 - number % 7)
        words.insert(number % 8, PLACES[number % 4] if number % 4 else "person")
        context, place = " ".join(words), PLACES[number % 4]
        answer = [{"text": place, "answer_start": context.index(place)}] if number % 4 else []
        item = {"id": str(number), "question": "where ?", "answers": answer, "is_impossible": not answer}
        paragraphs.append({"context": context, "qas": [item]})
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    data = squad(tmp_path, vocabulary, version="2.0", batch_size=8)
    model = BertQuestionAnswering("tiny", 120, dropout=0.0, lr=3e-3)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=30, default_root_dir=tmp_path, **options)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/exact"] > 90  # without an answer to any it would be 25
    assert trainer.callback_metrics["val/f1"] >= trainer.callback_metrics["val/exact"]

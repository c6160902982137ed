"""What comes out of ``TextClassData``, and what it says when the texts are not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_compress.recipes import TextClassData

ROWS = [("good film", "yes"), ('a "bad" film', "no"), ("good story", "yes"), ("bad story", "no")]


def write(folder: Path, kind: str) -> None:
    for split, rows in (("train", ROWS), ("dev", ROWS[:2])):
        if kind == "tsv":
            lines = ["id\tsentence\tother\tlabel", *(f"1\t{text}\tmore of it\t{label}" for text, label in rows)]
        else:
            lines = [json.dumps({"sentence": text, "other": "more of it", "label": label}) for text, label in rows]
        (folder / f"{split}.{kind}").write_text("\n".join(lines) + "\n")


def prepared(folder: Path, **settings: Any) -> TextClassData:
    options: dict[str, Any] = {"vocab_size": 60, "batch_size": 2, "cache_dir": str(folder / "cache"), **settings}
    data = TextClassData(**options)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_reads_files(tmp_path: Path, kind: Any) -> None:
    write(tmp_path, kind)
    data = prepared(tmp_path, source=kind, root=str(tmp_path), seq_len=6)
    assert [one.text for one in data.train] == [text for text, _ in ROWS]
    assert data.labels == {"no": 0, "yes": 1}
    assert data.num_classes == 2
    batch = next(iter(data.val_dataloader()))
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"].shape == (2, 6)  # the longer one is cut
    assert batch["attention_mask"].sum(dim=1).tolist() == [4, 6]
    assert data.tokenizer.encode("good film").tokens == ["[CLS]", "good", "film", "[SEP]"]


def test_pairs(tmp_path: Path) -> None:
    write(tmp_path, "tsv")
    data = prepared(tmp_path, source="tsv", root=str(tmp_path), pair_column="other")
    batch = next(iter(data.val_dataloader()))
    assert data.train[0].pair == "more of it"
    assert batch["token_type_ids"][0].tolist()[:8] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_docstrings_are_labelled_by_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("first_for_test", "second_for_test"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        for number in range(40):
            (folder / f"m{number}.py").write_text(
                f'"""Module {number} of {package}."""\ndef f():\n    """Its function."""\n'
            )
    monkeypatch.syspath_prepend(tmp_path)
    data = prepared(tmp_path, packages=["first_for_test", "second_for_test"])
    assert data.labels == {"first_for_test": 0, "second_for_test": 1}
    assert len(data.train) + len(data.validation) == 160
    assert 0 < len(data.validation) < 40
    assert all(one.label in one.text for one in data.train if one.text.startswith("Module"))
    train, held_out = (
        {one.text for one in part if one.text.startswith("Module")} for part in (data.train, data.validation)
    )
    assert not train & held_out


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_DATA_ROOT", raising=False)
    with pytest.raises(FileNotFoundError, match=r"needs a folder with train\.tsv and dev\.tsv"):
        TextClassData("tsv")
    with pytest.raises(FileNotFoundError, match=r"has no train\.jsonl and no dev\.jsonl"):
        TextClassData("jsonl", str(tmp_path))
    with pytest.raises(ValueError, match="source='csv' is unknown; choose one of docstrings, tsv, jsonl"):
        TextClassData("csv")  # type: ignore[arg-type]
    write(tmp_path, "tsv")
    with pytest.raises(ValueError, match="has no column 'text': set text_column, pair_column and label_column"):
        prepared(tmp_path, source="tsv", root=str(tmp_path), text_column="text")
    with pytest.raises(ValueError, match="batch_size=5 x 1 processes is more than the 4 texts to train on"):
        prepared(tmp_path, source="tsv", root=str(tmp_path), batch_size=5)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nso so\tperhaps\n")
    with pytest.raises(ValueError, match="labels in dev that are not in train: perhaps"):
        prepared(tmp_path, source="tsv", root=str(tmp_path))
    (tmp_path / "train.jsonl").write_text(json.dumps({"sentence": "a", "label": "b"}) + "\n{")
    (tmp_path / "dev.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: Expecting"):
        prepared(tmp_path, source="jsonl", root=str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("tsv", "sentence\tlabel\ngood\tyes\nbad\n", "line 3: no text in column 'label'"),
        ("jsonl", '{"sentence": null, "label": 1}\n', "line 1: no text in column 'sentence'"),
        ("jsonl", '{"sentence": 5, "label": 1}\n', "line 1: no text in column 'sentence'"),
        ("jsonl", "[1]\n", "line 1: no JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, kind: Any, content: str, message: str) -> None:
    write(tmp_path, kind)
    (tmp_path / f"train.{kind}").write_text(content)
    with pytest.raises(ValueError, match=rf"train\.{kind}, {message}"):
        prepared(tmp_path, source=kind, root=str(tmp_path))


def test_a_mark_of_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    write(tmp_path, "tsv")
    for split in ("train", "dev"):
        path = tmp_path / f"{split}.tsv"
        path.write_text("\ufeff" + path.read_text().removeprefix("id\t").replace("\n1\t", "\n"))
    assert prepared(tmp_path, source="tsv", root=str(tmp_path)).labels == {"no": 0, "yes": 1}

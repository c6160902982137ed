"""Where the text comes from, what is said when it is not there, and the tokenizers made from it."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_compress.recipes import text, tokens
from lightning_compress.recipes.cache import cache_folder, make_once

WORDS = "the quick brown fox jumps over a lazy dog and runs away"


class TestFiles:
    def test_blank_lines_end_documents(self, tmp_path: Path) -> None:
        (tmp_path / "below").mkdir()
        (tmp_path / "a.txt").write_text("\n\none\nstill one\n \ntwo\n")
        (tmp_path / "below" / "b.txt").write_text("three")
        (tmp_path / "c.md").write_text("of another kind")
        read = text.text_files(str(tmp_path), "**/*.txt", "blank_line").documents
        assert list(read()) == ["one\nstill one\n", "two\n", "three"]
        assert list(read()) == list(read())

    def test_one_document_in_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LC_DATA_ROOT", str(tmp_path))
        (tmp_path / "a.md").write_text("one\n\ntwo")
        assert list(text.text_files(None, "*.md", "file").documents()) == ["one\n\ntwo"]

    def test_missing_says_what_to_put_where(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LC_DATA_ROOT", raising=False)
        with pytest.raises(FileNotFoundError, match=r"plain text in .*: name it by `root` or by the .* LC_DATA_ROOT"):
            text.text_files(None, "**/*.txt", "blank_line")
        with pytest.raises(FileNotFoundError, match="put plain UTF-8 text there, an empty line between documents"):
            text.text_files(str(tmp_path), "**/*.txt", "blank_line")
        with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
            text.text_files(str(tmp_path / "nowhere"), "**/*.txt", "blank_line")

    def test_other_encoding_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes("Gr\xfc\xdfe".encode("latin-1"))
        with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text"):
            list(text.text_files(str(tmp_path), "*.txt", "file").documents())

    def test_stamp_changes_with_the_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one")
        first = text.text_files(str(tmp_path), "*.txt", "file").stamp
        assert text.text_files(str(tmp_path), "*.txt", "file").stamp == first
        (tmp_path / "a.txt").write_text("two!")
        assert text.text_files(str(tmp_path), "*.txt", "file").stamp != first


class TestSavedDataset:
    """Hugging Face's library is no dependency: a stand-in shows what is asked of it."""

    def saved(self, folder: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
        (folder / "state.json").write_text("{}")
        library = types.ModuleType("datasets")
        library.load_from_disk = lambda path: content if path == str(folder) else None  # type: ignore[attr-defined]
        library.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "datasets", library)

    class Table(list[dict[str, str | None]]):
        @property
        def column_names(self) -> list[str]:
            return list(self[0])

    def test_reads_the_column_of_the_training_split(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        train, test = self.Table([{"text": "one"}, {"text": "two"}]), self.Table([{"text": "three"}])
        self.saved(tmp_path, monkeypatch, {"test": test, "train": train})
        assert list(text.saved_dataset(str(tmp_path)).documents()) == ["one", "two"]
        self.saved(tmp_path, monkeypatch, test)
        assert list(text.saved_dataset(str(tmp_path)).documents()) == ["three"]
        self.saved(tmp_path, monkeypatch, self.Table([{"text": "four"}, {"text": ""}, {"text": None}]))
        assert list(text.saved_dataset(str(tmp_path)).documents()) == ["four"]

    def test_what_is_missing_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved(tmp_path, monkeypatch, {"test": None})
        with pytest.raises(ValueError, match="has the splits test, but no 'train'"):
            text.saved_dataset(str(tmp_path))
        self.saved(tmp_path, monkeypatch, self.Table([{"content": "one"}]))
        with pytest.raises(ValueError, match="has the columns content, but no 'text'"):
            text.saved_dataset(str(tmp_path))
        (tmp_path / "state.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"was not written by Dataset\.save_to_disk"):
            text.saved_dataset(str(tmp_path))

    def test_missing_library_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "state.json").write_text("{}")
        monkeypatch.setattr(text, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
            text.saved_dataset(str(tmp_path))


class TestInstalledText:
    def test_docstrings_of_a_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "package_for_test"
        package.mkdir()
        (package / "__init__.py").write_text('"""The package."""\ndef f():\n    """A function."""\n')
        (package / "a.py").write_text('class A:\n    """A class."""\n')
        (package / "none.py").write_text("x = 1\n")
        (package / "template.py").write_text("def {{ name }}():")
        monkeypatch.syspath_prepend(tmp_path)
        corpus = text.docstrings(["package_for_test"])
        assert list(corpus.documents()) == ["The package.\n\nA function.", "A class."]
        with pytest.raises(FileNotFoundError, match="'no_such_package' is not an installed package"):
            text.docstrings(["no_such_package"])

    def test_python_docs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text, "PYTHON_DOCS_SYSTEM_FOLDER", tmp_path)
        with pytest.raises(FileNotFoundError, match="apt-get install python3-doc"):
            text.python_docs()
        page = tmp_path / "python3.99" / "html" / "_sources" / "library" / "ast.rst.txt"
        page.parent.mkdir(parents=True)
        page.write_text("A page.\n\nIts end.")
        assert list(text.python_docs().documents()) == ["A page.\n\nIts end."]

    def test_documents_are_held_out_by_their_content(self) -> None:
        kept = [text.is_held_out(str(number), 0.1) for number in range(2000)]
        assert 150 < sum(kept) < 250
        assert kept == [text.is_held_out(str(number), 0.1) for number in range(2000)]
        assert not any(text.is_held_out(str(number), 0.0) for number in range(2000))
        # Raising the share moves documents in one direction only.
        assert all(text.is_held_out(str(number), 0.2) for number in range(2000) if kept[number])


class TestCache:
    def test_made_once_and_as_a_whole(self, tmp_path: Path) -> None:
        folder = cache_folder(str(tmp_path / "new"), kind="test", number=1)
        assert folder != cache_folder(str(tmp_path / "new"), kind="test", number=2)

        def fail(target: Path) -> None:
            (target / "half").write_text("")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make_once(folder, fail)
        assert not list(folder.parent.iterdir())

        made = []
        for _ in range(2):
            make_once(folder, lambda target: made.append((target / "whole").write_text("x")))
        assert made == [1]
        assert (folder / "whole").read_text() == "x"

    def test_another_node_may_be_faster(self, tmp_path: Path) -> None:
        folder = tmp_path / "shared"

        def lose(target: Path) -> None:
            (target / "mine").write_text("")
            folder.mkdir()
            (folder / "theirs").write_text("")

        make_once(folder, lose)
        assert list(tmp_path.iterdir()) == [folder]
        assert list(folder.iterdir()) == [folder / "theirs"]

    def test_default_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder(None, a=1).parent == tmp_path / "lightning-compress"


class TestTokenizers:
    def test_learns_words_and_comes_back_from_disk(self, tmp_path: Path) -> None:
        tokenizer = tokens.train_tokenizer([WORDS] * 50, 200)
        code = tokenizer.encode("The QUICK dog", "unknowable!")
        assert code.tokens[:5] == ["[CLS]", "the", "quick", "dog", "[SEP]"]
        assert code.type_ids[:6] == [0, 0, 0, 0, 0, 1]
        assert code.tokens[-1] == "[SEP]"
        assert tokens.special_ids(tokenizer) == (0, 1, 2, 3, 4)
        tokenizer.enable_truncation(3)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        loaded = tokens.load_tokenizer(str(tmp_path))
        assert loaded.encode("The QUICK dog", "unknowable!").ids == code.ids

    def test_vocabulary_of_one_token_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.txt").write_text("\n".join([*tokens.SPECIAL_TOKENS, "the", "dog", "##s"]))
        code = tokens.load_tokenizer(str(tmp_path)).encode("The dogs [MASK]")
        assert code.tokens == ["[CLS]", "the", "dog", "##s", "[MASK]", "[SEP]"]

    def test_what_is_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(
            FileNotFoundError, match=r"name a folder with tokenizer\.json or vocab\.txt, or a checkpoint"
        ):
            tokens.load_tokenizer(str(tmp_path))
        (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe")
        with pytest.raises(ValueError, match=r"not one as BERT's: it lacks \[MASK\]"):
            tokens.load_tokenizer(str(tmp_path))
        torch.save({"state_dict": {}}, tmp_path / "vision.ckpt")
        with pytest.raises(FileNotFoundError, match="holds no tokenizer: it was not trained with MLMData"):
            tokens.load_tokenizer(str(tmp_path / "vision.ckpt"))
        many = [*tokens.SPECIAL_TOKENS, *(f"w{number}" for number in range(tokens.MAX_VOCABULARY))]
        (tmp_path / "vocab.txt").write_text("\n".join(many))
        with pytest.raises(ValueError, match="at most 65536 can be stored"):
            tokens.load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("size", [5, 65_537])
    def test_size_out_of_range(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"vocab_size={size} must be more than 5 and at most 65536"):
            tokens.train_tokenizer([WORDS], size)

    def test_padding(self) -> None:
        batch = tokens.padded([[2, 7, 3], [2, 3]], [[0, 0, 1], [0, 0]], 9)
        assert {name: value.tolist() for name, value in batch.items()} == {
            "input_ids": [[2, 7, 3], [2, 3, 9]],
            "token_type_ids": [[0, 0, 1], [0, 0, 0]],
            "attention_mask": [[1, 1, 1], [1, 1, 0]],
        }

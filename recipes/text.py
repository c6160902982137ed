"""Where the text comes from: one function per source, none of which ever downloads."""

import ast
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from .loading import find_folder

PYTHON_DOCS_PACKAGE = "python3-doc"
PYTHON_DOCS_SYSTEM_FOLDER = Path(
    "/usr/share/doc"
)  # that Debian package puts them into python3.<version>/html/_sources below

Separator = Literal["blank_line", "file"]


class Corpus(NamedTuple):
    """Running text.

    Attributes:
        stamp: Changes when the files do.
        documents: Reads the documents, one after the other. May be called again, and can be pickled.
    """

    stamp: str
    documents: Callable[[], Iterator[str]]


def text_files(root: str | None, pattern: str, separator: Separator) -> Corpus:
    """Return the text of plain UTF-8 files.

    Args:
        root: Folder; else the environment variable LC_DATA_ROOT is asked.
        pattern: Which files below it, as for ``Path.glob``.
        separator: What ends a document: an empty line (BERT's own format has one sentence on a line and an empty line
            between documents), or only the end of the file.

    Raises:
        FileNotFoundError: With what to put where.
    """
    folder = find_folder(root, f"plain text in {pattern}")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise FileNotFoundError(
            f"no file {pattern} in {folder}: put plain UTF-8 text there, an empty line between documents or one document "
            'in each file (separator="file"), or name other files by `pattern`'
        )
    read = _whole_file if separator == "file" else _split_at_blank_lines
    return Corpus(stamp(paths), partial(_read_all, paths, read))


def saved_dataset(root: str | None) -> Corpus:
    """Return the column "text" of what Hugging Face's ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote.

    Args:
        root: That folder; else the environment variable LC_DATA_ROOT is asked. Of several splits "train" is read.

    Raises:
        FileNotFoundError: With what to put where.
        ModuleNotFoundError: If the library is not installed.
        ValueError: If there is no such split or column.
    """
    folder = find_folder(root, "what Dataset.save_to_disk wrote")
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise FileNotFoundError(
            f"{folder} was not written by Dataset.save_to_disk: it has no state.json or dataset_dict.json"
        )
    if find_spec("datasets") is None:
        raise ModuleNotFoundError('source="datasets" needs Hugging Face\'s library: pip install datasets')
    import datasets

    data = datasets.load_from_disk(str(folder))
    if isinstance(data, dict):
        if "train" not in data:
            raise ValueError(
                f"{folder} has the splits {', '.join(data)}, but no 'train'; name the folder of one split by `root`"
            )
        data = data["train"]
    if "text" not in data.column_names:
        raise ValueError(
            f"{folder} has the columns {', '.join(data.column_names)}, but no 'text': rename_column before saving"
        )
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return Corpus(stamp(paths), partial(_column, data))


def python_docs() -> Corpus:
    """Return the sources of Python's documentation (12 MB, 500 pages) from Debian's package.

    Raises:
        FileNotFoundError: With the package's name.
    """
    paths = sorted(PYTHON_DOCS_SYSTEM_FOLDER.glob("python3.*/html/_sources/**/*.rst.txt"))
    if not paths:
        raise FileNotFoundError(
            f"Python's documentation is not in {PYTHON_DOCS_SYSTEM_FOLDER}/python3.*/html/_sources: "
            f"`apt-get install {PYTHON_DOCS_PACKAGE}` puts it there on Debian and Ubuntu"
        )
    return Corpus(stamp(paths), partial(_read_all, paths, _whole_file))


def docstrings(packages: Sequence[str]) -> Corpus:
    """Return the docstrings of installed packages, those of one module as one document.

    Args:
        packages: Names as in ``import``.

    Raises:
        FileNotFoundError: If one of them is not installed.
    """
    paths = [path for package in packages for path in _modules(package)]
    return Corpus(stamp(paths), partial(_joined_docstrings, packages))


@cache  # parsing takes seconds, and both a tokenizer and a corpus are made from the result
def module_docstrings(package: str) -> Sequence[Sequence[str]]:
    """Return for every module of an installed package that has any its docstrings.

    Raises:
        FileNotFoundError: If it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escape sequences
        found = [_docstrings(path) for path in _modules(package)]
    return [texts for texts in found if texts]


def stamp(paths: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and times of files: cheap, and different when one of them is written again."""
    lines = (f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document is kept from training: decided by its content, so copies and other orders change nothing.

    Args:
        text: The document.
        share: Of all documents, in [0, 1).
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


def _read_all(paths: Iterable[Path], read: Callable[[Path], Iterator[str]]) -> Iterator[str]:
    return (document for path in paths for document in read(path))


def _column(data: Iterable[dict[str, str]]) -> Iterator[str]:
    return (row["text"] for row in data if row["text"])  # saved corpora have rows without text


def _joined_docstrings(packages: Iterable[str]) -> Iterator[str]:
    return ("\n\n".join(found) for package in packages for found in module_docstrings(package))


def _whole_file(path: Path) -> Iterator[str]:
    yield "".join(lines(path))


def _split_at_blank_lines(path: Path) -> Iterator[str]:
    document: list[str] = []
    for line in lines(path):
        if line.strip():
            document.append(line)
        elif document:
            yield "".join(document)
            document = []
    if document:
        yield "".join(document)


def lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 file.

    Raises:
        ValueError: If it is not UTF-8, with its name.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:  # Excel and others put a mark of byte order before the first line
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def _modules(package: str) -> list[Path]:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"packages: {package!r} is not an installed package")
    return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or a test of a parser
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in found if text]

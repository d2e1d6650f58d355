"""Documents: the files to read, in an order that is the same on every machine."""

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.errors import DataError

# More than half of the standard library's bytes are tests: 12 of 31 MB remain (Python 3.11).
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """`size` bytes of a file from `offset`.

    name: path relative to the common directory of all documents
    path: the file
    size: bytes
    offset: first byte in the file
    """

    name: str
    path: Path
    size: int
    offset: int = 0

    def cut(self, size: int) -> tuple["Document", "Document"]:
        """Returns the first `size` bytes and the remainder."""
        return replace(self, size=size), replace(self, size=self.size - size, offset=self.offset + size)


def stdlib_documents(directory: Path | None = None) -> list[Document]:
    """Returns the source files of this interpreter's standard library (or of `directory`), without tests.

    Raises DataError if the library has no readable source, as in a zipped or frozen Python.
    """
    root = directory or Path(sysconfig.get_path("stdlib"))
    documents = _documents(_source_files(root), root=root)
    if not documents:
        raise DataError(
            "the standard library has no source to train on.",
            got=f"no *.py file in {root}",
            why="this Python keeps its library zipped or compiled",
            fix='data.source = "text" with data.paths = ["data/*.txt"]',
        )
    return documents


def text_documents(patterns: Sequence[str]) -> list[Document]:
    """Returns the non-empty files that match any of the globs (`**` and `~` are supported), each once.

    Raises DataError for a pattern without a match, for a file that cannot be read, and if all files are
    empty.
    """
    found: set[str] = set()
    for pattern in patterns:
        files = [os.path.abspath(path) for path in _matches(pattern)]
        if not files:
            raise DataError(
                "data.paths has a pattern that matches no file.",
                got=f"{pattern!r}, looked up from {Path.cwd()}",
                fix="a path or a glob of files, such as data/**/*.txt",
            )
        found.update(files)
    root = Path(os.path.commonpath([os.path.dirname(path) for path in found]))
    documents = _documents(map(Path, found), root=root)
    if not documents:
        raise DataError(
            "there is no text to train on.",
            got=f"{len(found)} files in {root}, all empty",
            fix="files with text in data.paths",
        )
    return documents


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Returns the error for a file or directory that cannot be read."""
    return DataError(
        f"{path} cannot be read.",
        got=error.strerror or str(error),
        fix="make it readable, or leave it out of data.paths",
    )


def _source_files(root: Path) -> Iterable[Path]:
    def stop(error: OSError) -> None:
        raise unreadable(error.filename or root, error) from error

    for directory, inner, files in os.walk(root, onerror=stop):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _matches(pattern: str) -> list[str]:
    paths = glob.glob(os.path.expanduser(pattern), recursive=True)
    return [path for path in paths if not os.path.isdir(path)]


def _documents(paths: Iterable[Path], *, root: Path) -> list[Document]:
    """Returns non-empty documents sorted by name. Raises DataError for a path that is not a regular file."""
    documents: list[Document] = []
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is no regular file.", why="its size is not known before it is read")
        if found.st_size:
            documents.append(Document(path.relative_to(root).as_posix(), path, found.st_size))
    return sorted(documents, key=lambda document: document.name)

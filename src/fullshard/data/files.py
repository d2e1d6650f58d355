"""Lists and opens the files of data sources, in an order that is the same on every machine."""

import bz2
import glob
import gzip
import io
import lzma
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from fullshard.errors import DataError, MissingExtraError
from fullshard.quantities import count_text

FileKind = Literal["text", "jsonl", "parquet", "memmap"]

# More than half of the standard library's bytes are tests: 12 of 31 MB remain (Python 3.11).
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Endings of the files that are taken from a directory. Any file may be text.
_ENDINGS: dict[FileKind, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "memmap": (".npy", ".bin", ".idx"),
}


@dataclass(frozen=True)
class SourceFile:
    """A file of a data source.

    path: absolute path
    size: bytes, as stored
    """

    path: str
    size: int


def list_stdlib_files(directory: Path | None = None) -> list[SourceFile]:
    """Returns the *.py files of this interpreter's standard library (or `directory`), sorted by path.

    Tests, installed packages and empty files are left out. Raises DataError if none remain (a zipped Python).
    """
    root = directory or Path(sysconfig.get_path("stdlib"))
    paths = (str(path) for path in _walk_files(root, skipped=_NOT_LIBRARY) if path.suffix == ".py")
    files = [file for file in stat_files(sorted(paths)) if file.size]
    if not files:
        raise DataError(
            "the standard library has no source to train on.",
            got=f"no *.py file in {root}",
            why="this Python keeps its library zipped or compiled",
            fix='data.source = "text" with data.paths = ["data/*.txt"]',
        )
    return files


def list_matching_files(patterns: Sequence[str], *, kind: FileKind) -> list[SourceFile]:
    """Returns the non-empty files that match any of the globs (with `**` and `~`), sorted by path.

    A path that exists is taken by its name, also if that has wildcards. A pattern that matches directories
    alone stands for the files of `kind` below them. Raises DataError for a pattern without a match, for a
    path that is not a regular file, and if all are empty; MissingExtraError for a compression whose package
    is not installed.
    """
    found: dict[str, SourceFile] = {}
    for pattern in patterns:
        found |= {file.path: file for file in _list_files(pattern, kind)}
    for path in found:
        if _suffix(path) in (".zst", ".lz4") and find_spec("pyarrow") is None:
            raise MissingExtraError("data", package="pyarrow", needed_for=path)
    # Sorting by text makes the order independent of the directory in which the files lie.
    files = [found[path] for path in sorted(found) if found[path].size]
    if not files:
        raise DataError(
            "there is no text to train on.",
            got=f"{count_text(len(found), 'file')}, all empty",
            fix="files with text in data.paths",
        )
    return files


def _list_files(pattern: str, kind: FileKind) -> Iterable[SourceFile]:
    paths = _existing_path_or_matches(os.path.expanduser(pattern.removeprefix("file://")))
    files = [path for path in paths if not os.path.isdir(path)]
    if not files:
        below = [str(path) for directory in paths for path in _walk_files(Path(directory))]
        files = _select_files_of_kind(below, kind, pattern=pattern)
    return stat_files(map(os.path.abspath, files))


def _existing_path_or_matches(pattern: str) -> list[str]:
    """Returns `pattern` if it exists, else the paths that match it.

    A file or leading directory that exists is meant by its name, even with wildcards, as in `data [v2]`.
    """
    if os.path.lexists(pattern):
        return [pattern]
    head = os.path.dirname(pattern)
    while head and not os.path.isdir(head):
        head = os.path.dirname(head)
    return glob.glob(glob.escape(head) + pattern[len(head) :], recursive=True)


def is_compressed(path: str) -> bool:
    return _suffix(path) in _OPENERS


def path_without_compression_suffix(path: str) -> str:
    return path.removesuffix(_suffix(path) if is_compressed(path) else "")


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix


@contextmanager
def open_source_file(path: str) -> Generator[BinaryIO]:
    """Opens a file for reading, and decompresses it if its name says so. Raises DataError, also in the block.

    A compressed file has no usable `seek`.
    """
    opener = _OPENERS.get(_suffix(path))
    try:
        with open(path, "rb") as stored:
            if opener is None:
                yield stored
            else:
                with opener(stored) as plain:
                    yield plain
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise unreadable_path_error(path, error) from error


def unreadable_path_error(path: str | Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read.",
        got=getattr(error, "strerror", None) or str(error),
        fix="make it readable, or leave it out of data.paths",
    )


def _open_decompressed_with_arrow(stored: BinaryIO, *, codec: str) -> BinaryIO:
    import pyarrow

    # Python has zstd from 3.14 on; Arrow has it everywhere, and refuses a file that is cut off.
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, mode="r"), codec))


_OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": partial(_open_decompressed_with_arrow, codec="zstd"),
    ".lz4": partial(_open_decompressed_with_arrow, codec="lz4"),
}


def _select_files_of_kind(paths: Sequence[str], kind: FileKind, *, pattern: str) -> list[str]:
    """Returns the files of `kind` among the files below a directory. Raises DataError if there are none."""
    if not paths:
        raise DataError(
            "data.paths has a pattern that matches no file.",
            got=f"{pattern!r}, looked up from {Path.cwd()}",
            fix="a path, a directory or a glob of files, such as data/**/*.txt",
        )
    # Files that Spark and others write beside their data, such as `_SUCCESS`, have no such ending.
    may_be_compressed = kind in ("text", "jsonl")
    names = {path: path_without_compression_suffix(path) if may_be_compressed else path for path in paths}
    found = [path for path, name in names.items() if name.endswith(_ENDINGS[kind])]
    if not found:
        endings = " or ".join(f"*{ending}" for ending in _ENDINGS[kind])
        raise DataError(
            f"data.paths has a directory without a file of {kind}.",
            got=f"{pattern!r}, with {paths[0]}",
            why=f"{endings} would be taken, and their compressed forms",
            fix="a directory with such files, or a glob of the files, such as data/**/*.txt",
        )
    return found


def _walk_files(root: Path, *, skipped: frozenset[str] = frozenset()) -> Iterable[Path]:
    """Yields the files below `root`, except hidden ones and those in hidden or `skipped` directories."""

    def raise_unreadable(error: OSError) -> None:
        raise unreadable_path_error(error.filename or root, error) from error

    for directory, inner, files in os.walk(root, onerror=raise_unreadable, followlinks=True):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def stat_files(paths: Iterable[str]) -> list[SourceFile]:
    """Returns the files with their sizes. Raises DataError for one that is absent or not a regular file."""
    files: list[SourceFile] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise unreadable_path_error(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a regular file.", why="its size is not known before it is read")
        files.append(SourceFile(path, found.st_size))
    return files

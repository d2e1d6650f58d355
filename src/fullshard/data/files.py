"""Lists the files of data sources, in an order that is the same on every machine."""

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from fullshard.errors import DataError

# More than half of the standard library's bytes are tests: 12 of 31 MB remain (Python 3.11).
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def stdlib_file_sizes(directory: Path | None = None) -> dict[Path, int]:
    """Returns the size in bytes of each *.py file of this interpreter's standard library (or `directory`).

    Tests are left out. Raises DataError if the library has no *.py files, as in a zipped or frozen Python.
    """
    root = directory or Path(sysconfig.get_path("stdlib"))
    sizes = _non_empty_file_sizes(_iterate_python_files(root))
    if not sizes:
        raise DataError(
            "the standard library has no source to train on.",
            got=f"no *.py file in {root}",
            why="this Python keeps its library zipped or compiled",
            fix='data.source = "text" with data.paths = ["data/*.txt"]',
        )
    return sizes


def matching_file_sizes(patterns: Sequence[str]) -> dict[Path, int]:
    """Returns the size in bytes of each non-empty file that matches any of the globs (with `**` and `~`).

    Raises DataError for a pattern without a match, for a file that cannot be read, and if all are empty.
    """
    found: set[Path] = set()
    for pattern in patterns:
        paths = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [Path(os.path.abspath(path)) for path in paths if not os.path.isdir(path)]
        if not files:
            raise DataError(
                "data.paths has a pattern that matches no file.",
                got=f"{pattern!r}, looked up from {Path.cwd()}",
                fix="a path or a glob of files, such as data/**/*.txt",
            )
        found.update(files)
    sizes = _non_empty_file_sizes(found)
    if not sizes:
        raise DataError(
            "there is no text to train on.",
            got=f"{len(found)} files, all empty",
            fix="files with text in data.paths",
        )
    return sizes


def unreadable_path_error(path: str | Path, error: OSError) -> DataError:
    """Returns the error for a file or directory that cannot be read."""
    return DataError(
        f"{path} cannot be read.",
        got=error.strerror or str(error),
        fix="make it readable, or leave it out of data.paths",
    )


def _iterate_python_files(root: Path) -> Iterable[Path]:
    def raise_unreadable(error: OSError) -> None:
        raise unreadable_path_error(error.filename or root, error) from error

    for directory, inner, files in os.walk(root, onerror=raise_unreadable):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _non_empty_file_sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Returns the bytes of each non-empty file. Raises DataError for a path that is not a regular file."""
    sizes: dict[Path, int] = {}
    # Sorting by text makes the order independent of the directory in which the files lie.
    for path in sorted(paths, key=Path.as_posix):
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable_path_error(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a regular file.", why="its size is not known before it is read")
        if found.st_size:
            sizes[path] = found.st_size
    return sizes

"""FIXTURES: checkpoints that other trainers wrote, each an archive in `fixtures/`, unpacked when used."""

import atexit
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ARCHIVES = Path(__file__).with_name("fixtures")


@cache
def _make_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="fullshard-fixtures-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@cache
def _unpack(name: str) -> Path:
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(_make_directory(), filter="data")
    return _make_directory() / name


class Fixtures:
    """`FIXTURES / "NAME/source"` is that path in this process's copy of NAME, which no test changes."""

    def __truediv__(self, path: str) -> Path:
        name, _, inside = path.partition("/")
        return _unpack(name) / inside


FIXTURES = Fixtures()


def pack(directory: Path) -> None:
    """Writes the archive of a fixture's directory, in place of its older form. Equal files, equal bytes."""
    with tarfile.open(ARCHIVES / f"{directory.name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted([directory, *directory.rglob("*")]):
            entry = archive.gettarinfo(path, str(path.relative_to(directory.parent)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with path.open("rb") if path.is_file() else tempfile.TemporaryFile() as content:
                archive.addfile(entry, content)

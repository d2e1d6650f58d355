"""What was made of data once, kept: directories that are there whole or not at all, named by their content.

[Note: what a name stands for]
An entry is named by a digest over everything that it follows from: the content of the files, the tokenizer,
the settings. Content, and not paths or times: a copied or moved data set is the same, and an edited one is
another. But to read terabytes at each start only to name them takes longer than the start. So the digest of
a file (XXH3-128 of its bytes) is remembered with its size and its time of change, and holds as long as both
are the same. A file that was changed less than two seconds before it was read is not remembered: another
change might leave the same time behind.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import xxhash

from fullshard.errors import DataError
from fullshard.spec.small_files import VALUE_BYTES, parse_json, read_bytes

MANIFEST = "manifest.json"
FORMAT = 1
_SETTLED_SECONDS = 2.0
_POLL_SECONDS = 0.2
_READ_BYTES = 4 << 20
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Heartbeat = Callable[[], None]
"""Called now and then while something long goes on, so that whoever watches knows."""


def no_heartbeat() -> None:
    """An Alive that tells nobody."""


def key_of(facts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that follow from plain data alone."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cache_root(directory: str) -> Path:
    """The cache's directory, made where it is not there. Raises DataError where it cannot be."""
    root = Path(os.path.expanduser(directory)).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(root, error) from error
    return root


def manifest_of(entry: Path) -> dict[str, Any]:
    """What `built` was told about an entry, and `files`: the bytes of each of its files."""
    return cast(dict[str, Any], parse_json(read_bytes(entry / MANIFEST, most_bytes=VALUE_BYTES)))


def get_or_build(
    root: Path, name: str, *, build: Callable[[Path], Mapping[str, Any]], alive: Heartbeat = no_heartbeat
) -> Path:
    """`root/name`, which `build` fills, as an empty directory elsewhere, if it is not there yet.

    What `build` returns stands in its manifest. The directory appears by one rename, when all is down to the
    disk. One process at a time makes an entry; others wait, and find it. What raises in `build` leaves
    nothing. Raises DataError where the cache cannot be written.
    """
    entry = root / name
    if _is_whole(entry):
        return entry
    with exclusive(root / f".{name}.lock", alive=alive):
        if _is_whole(entry):
            return entry
        for left in [entry, *root.glob(f".{name}.tmp-*")]:  # of a machine that went down, or files taken away
            shutil.rmtree(left, ignore_errors=True)
        draft = root / f".{name}.tmp-{secrets.token_hex(4)}"
        try:
            draft.mkdir()
            _commit(draft, entry, facts=build(draft))
        except OSError as error:
            raise _not_written(root, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return entry


@contextmanager
def exclusive(lock: Path, *, alive: Heartbeat = no_heartbeat) -> Generator[None]:
    """While it is open, no other process is in a block with the same `lock`; waits for those that are.

    The kernel lets it go with the process. Where the file system knows no locks there is none: both write,
    and whoever is second finds the entry made.
    """
    try:
        file = lock.open("a")
    except OSError as error:
        raise _not_written(lock.parent, error) from error
    with file:
        while not _taken(file.fileno()):
            alive()
            time.sleep(_POLL_SECONDS)
        yield


def digests(paths: Iterable[Path], *, root: Path, alive: Heartbeat = no_heartbeat) -> list[str]:
    """The digest of each file's content (each path once). See [Note: what a name stands for].

    Raises DataError for a file that cannot be read.
    """
    memory = cache_root(str(root / "digests"))
    found = {path: _remembered(path, memory) for path in paths}
    if None not in found.values():
        return [digest for digest in found.values() if digest is not None]
    # Ranks that start together: one reads the files, the others remember.
    with exclusive(memory / ".lock", alive=alive):
        return [
            digest or _remembered(path, memory) or _remember(path, memory, alive=alive)
            for path, digest in found.items()
        ]


def _is_whole(entry: Path) -> bool:
    """Whether every file is there with its bytes. An entry is committed whole; somebody may have tidied."""
    try:
        files = manifest_of(entry)["files"]
        return all((entry / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _commit(draft: Path, entry: Path, *, facts: Mapping[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    text = json.dumps({**facts, "format": FORMAT, "files": files}, indent=1)
    (draft / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        _flush(path)
    try:
        draft.rename(entry)
    except OSError:
        if not _is_whole(entry):  # without locks another may have been first
            raise
    _flush(entry.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _remembered(path: Path, memory: Path) -> str | None:
    try:
        said = parse_json(read_bytes(_place(path, memory), most_bytes=VALUE_BYTES))
        now = path.stat()
        return str(said["digest"]) if [now.st_size, now.st_mtime_ns] == said["seen"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, memory: Path, *, alive: Heartbeat) -> str:
    at = time.time()
    seen, digest = _digest(path, alive=alive)
    if at - seen.st_mtime < _SETTLED_SECONDS:
        return digest
    place = _place(path, memory)
    draft = place.with_name(f"{place.name}.tmp-{secrets.token_hex(4)}")
    with suppress(OSError):  # it will be read again
        draft.write_text(json.dumps({"seen": [seen.st_size, seen.st_mtime_ns], "digest": digest}))
        draft.replace(place)
    return digest


def _place(path: Path, memory: Path) -> Path:
    return memory / hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()


def _digest(path: Path, *, alive: Heartbeat) -> tuple[os.stat_result, str]:
    """(what the file was when it was opened, the digest of what was read)."""
    hasher, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            seen = os.fstat(file.fileno())
            while count := file.readinto(buffer):
                hasher.update(view[:count])
                alive()
    except OSError as error:
        raise DataError(f"{path} cannot be read.", got=error.strerror or str(error)) from error
    return seen, hasher.hexdigest()


def _not_written(root: Path, error: OSError) -> DataError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"the cache of data in {root} cannot be written.",
        got=error.strerror or str(error),
        why="tokens are made once, and kept there" + ("; nothing was left of what was begun" if full else ""),
        fix="data.cache = a directory with room, that can be written",
    )

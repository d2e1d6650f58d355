"""Cache of tokens and row layouts: directories that appear only when complete, named by their content.

[Note: what a name stands for]
An entry is named by a digest of everything that determines it: the content of the files, the tokenizer, the
settings. The digest covers content, not paths or times, so a copied or moved data set has the same name and
an edited one has another. Reading terabytes at each start to compute the name would take longer than the
start itself. So the digest of a file (XXH3-128 of its bytes) is remembered together with its size and
modification time, and is valid as long as both are unchanged. A file modified less than two seconds before it
was read is not remembered, because a later change could leave the same time. A remote file is not read for
its digest: its store reports one (ETag), or the time of its last change.
"""

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import xxhash

from fullshard.data.files import SourceFile
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSection
from fullshard.system.files import atomic_replace_context, fsync_path
from fullshard.system.lock import hold_exclusive_file_lock
from fullshard.system.small_files import VALUE_BYTES, parse_json, read_bytes

MANIFEST = "manifest.json"
FORMAT = 1
_SETTLED_SECONDS = 2.0
_READ_BYTES = 4 << 20

Heartbeat = Callable[[], None]
"""Called regularly during long work, so that a watchdog sees progress."""


def no_heartbeat() -> None:
    """A Heartbeat that does nothing."""


def cache_key(facts: Mapping[str, Any]) -> str:
    """Returns a digest of `facts` (plain data) as 32 hexadecimal digits, for the name of a cache entry."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def make_cache_directory(directory: str | Path) -> Path:
    """Returns the cache directory, and creates it if needed. Raises DataError if it cannot be created.

    A container may run as a user without a home. The default cache is then in the temporary directory, in one
    that only this user can write.
    """
    root = Path(os.path.expanduser(directory)).absolute()
    try:
        if os.path.expanduser(directory).startswith("~"):
            root = _private_temporary_directory(str(directory))
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_cache_error(root, error) from error
    return root


def _private_temporary_directory(named: str) -> Path:
    if named != DataSection.model_fields["cache"].default:
        raise DataError(
            f"data.cache = {named!r} cannot be used.",
            got="no home: neither HOME nor an entry of this user in /etc/passwd",
            fix="data.cache = a directory that begins with /",
        )
    place = Path(tempfile.gettempdir(), f"fullshard-data-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(place))
    return place


def read_manifest(entry: Path) -> dict[str, Any]:
    """Returns the manifest of a cache entry: the data that `build` returned, and `files` (name -> bytes)."""
    return cast(dict[str, Any], parse_json(read_bytes(entry / MANIFEST, most_bytes=VALUE_BYTES)))


def get_or_build_entry(
    root: Path, name: str, *, build: Callable[[Path], Mapping[str, Any]], alive: Heartbeat = no_heartbeat
) -> Path:
    """Returns the cache entry `root/name`. If it does not exist yet, `build` fills an empty draft directory.

    The data that `build` returns is written to the manifest. The draft is renamed to the entry after all its
    files are synced to disk, or removed if `build` raises. One process at a time builds an entry; others wait
    (calling `alive`) and then find it. Raises DataError if the cache cannot be written.
    """
    root = make_cache_directory(root)
    entry = root / name
    if _is_complete_entry(entry):
        return entry
    with _hold_cache_lock(root / f".{name}.lock", alive=alive):
        if _is_complete_entry(entry):
            return entry
        for left in [entry, *root.glob(f".{name}.tmp-*")]:  # left by a crash, or files were removed
            shutil.rmtree(left, ignore_errors=True)
        draft = root / f".{name}.tmp-{secrets.token_hex(4)}"
        try:
            draft.mkdir()
            _commit_draft(draft, entry, facts=build(draft))
        except OSError as error:
            raise unwritable_cache_error(root, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return entry


@contextmanager
def _hold_cache_lock(lock: Path, *, alive: Heartbeat) -> Generator[None]:
    """Holds an exclusive lock on the file `lock` while the block runs. Waits until the lock is free.

    On a file system without locks, both processes write, and the second one finds the entry complete.
    """
    try:
        with hold_exclusive_file_lock(lock, patience_seconds=math.inf, waiting=alive, required=False):
            yield
    except OSError as error:
        raise unwritable_cache_error(lock.parent, error) from error


def file_digests(paths: Iterable[Path], *, root: Path, alive: Heartbeat = no_heartbeat) -> list[str]:
    """Returns the digest of each file's content, once per path, in order. See [Note: what a name stands for].

    The cache directory `root` remembers the digests. Raises DataError for a file that cannot be read.
    """
    memory = make_cache_directory(root / "digests")
    found = {path: _find_remembered_digest(path, memory) for path in paths}
    if None not in found.values():
        return [digest for digest in found.values() if digest is not None]
    # Of ranks that start together, one reads the files and the others use the remembered digests.
    with _hold_cache_lock(memory / ".lock", alive=alive):
        return [
            digest or _find_or_compute_digest(path, memory, alive=alive) for path, digest in found.items()
        ]


def source_file_digests(
    files: Iterable[SourceFile], *, root: Path, alive: Heartbeat = no_heartbeat
) -> list[str]:
    """Returns a text per file that determines its content: the version of a remote file, or a digest."""
    files = list(files)
    local = [Path(file.path) for file in files if file.version is None]
    digests = iter(file_digests(local, root=root, alive=alive))
    return [next(digests) if file.version is None else file.version for file in files]


def _is_complete_entry(entry: Path) -> bool:
    """Returns True if every file of the entry exists with its recorded size: files may be deleted later."""
    try:
        files = read_manifest(entry)["files"]
        return all((entry / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _commit_draft(draft: Path, entry: Path, *, facts: Mapping[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    text = json.dumps({**facts, "format": FORMAT, "files": files}, indent=1)
    (draft / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        fsync_path(path)
    try:
        draft.rename(entry)
    except OSError:
        if not _is_complete_entry(entry):  # without locks another process may have been first
            raise
    fsync_path(entry.parent)


def _find_remembered_digest(path: Path, memory: Path) -> str | None:
    try:
        said = parse_json(read_bytes(_remembered_digest_path(path, memory), most_bytes=VALUE_BYTES))
        now = path.stat()
        return str(said["digest"]) if [now.st_size, now.st_mtime_ns] == said["seen"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_or_compute_digest(path: Path, memory: Path, *, alive: Heartbeat) -> str:
    if (remembered := _find_remembered_digest(path, memory)) is not None:
        return remembered
    at = time.time()
    seen, digest = _read_status_and_digest(path, alive=alive)
    if at - seen.st_mtime < _SETTLED_SECONDS:
        return digest
    place = _remembered_digest_path(path, memory)
    with suppress(OSError), atomic_replace_context(place) as draft:  # else the file is read again next time
        draft.write_text(json.dumps({"seen": [seen.st_size, seen.st_mtime_ns], "digest": digest}))
    return digest


def _remembered_digest_path(path: Path, memory: Path) -> Path:
    return memory / hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()


def _read_status_and_digest(path: Path, *, alive: Heartbeat) -> tuple[os.stat_result, str]:
    """Returns (status of the file when it was opened, digest of the bytes read)."""
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


def unwritable_cache_error(root: Path, error: OSError) -> DataError:
    """Returns the error for a cache directory that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"the cache of data in {root} cannot be written.",
        got=error.strerror or str(error),
        why="tokens are made once, and kept there" + ("; the incomplete entry was removed" if full else ""),
        fix="data.cache = a directory with room, that can be written",
    )

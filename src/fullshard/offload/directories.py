"""The directory of a rank's files on a drive: its lock, its owner, manifests of complete generations.

<offload.path>/<run id>/rank-00003/
    lock               held while a process uses the directory
    identity.json      the owner of these files
    state-0.data       records at fixed offsets       state-1.data
    state-0.payload    bytes for commit_generation    state-1.payload
    state-0.json       the manifest: written last     state-1.json

Each JSON file ends with its own digest, so that a flipped bit is always detected.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from fullshard.errors import DamagedOffloadError, ForeignOffloadError, OffloadError
from fullshard.offload.drive import (
    CHECK_DRIVE,
    SYSTEM,
    DriveSystemCalls,
    offload_error_from_os_error,
    write_all,
)
from fullshard.quantities import format_bytes
from fullshard.spec.groups import page_aligned_bytes
from fullshard.spec.value import FrozenModel, NonNegativeInt, PositiveInt
from fullshard.system import files
from fullshard.system.direct_io import ALIGNMENT
from fullshard.system.small_files import read_bytes

IDENTITY = "identity.json"
LOCK = "lock"
RANKS, FIRST_RANK = "rank-*", "rank-00000"
_PATIENCE_SECONDS = 1.0


def rank_directory(path: Path, *, run_id: str, rank: int) -> Path:
    """Returns the directory of a rank's files, below the directory `path` (`offload.path`)."""
    return path / run_id / f"rank-{rank:05d}"


def no_space_error(directory: Path, *, needed_bytes: int, free_bytes: int) -> OffloadError:
    return OffloadError(
        f"not enough space for optimizer state in {directory}.",
        got=f"{format_bytes(free_bytes)} free, {format_bytes(needed_bytes)} needed by this rank",
        why="it is allocated before the first step: two generations, one of which is whole at any moment",
        fix=f"remove what earlier runs have left in {directory.parent.parent}; or offload.path = a directory "
        "on a drive with more room",
    )


@contextmanager
def lock_directory(directory: Path) -> Generator[None]:
    """Makes `directory`, and locks it until the context ends. Raises OffloadError if it cannot."""
    with ExitStack() as stack:
        try:
            files.make_durable_directory(directory)
            lock = files.hold_exclusive_file_lock(
                directory / LOCK,
                held_error=lambda holder: OffloadError(
                    f"another process keeps its state in {directory}.",
                    got=holder,
                    why="two would write over each other's",
                    fix="wait for it or end it, or another run.dir or offload.path",
                ),
                patience_seconds=_PATIENCE_SECONDS,
                required=False,
                mode=0o600,
            )
            stack.enter_context(lock)
        except OSError as error:
            path, what, where = directory.parent.parent, f"{directory} cannot be used.", ""
            if not os.path.isdir(path):  # `Path.is_dir` raises if a parent cannot be read
                what, where = f"offload.path = {path} is not a directory, and cannot be made one.", str(path)
            raise offload_error_from_os_error(what, error, where=where) from error
        yield


def remove_empty_parents(rank_directory: Path, *, up_to: Path) -> None:
    """Removes the directories above a rank's directory and below `up_to` if they are empty."""
    with suppress(OSError):
        for one in rank_directory.parents:
            if one == up_to or up_to not in one.parents:
                break
            one.rmdir()


def remove_file_and_flush(path: Path, *, system: DriveSystemCalls = SYSTEM) -> None:
    """Removes a file, if it exists, and flushes the removal to the drive."""
    path.unlink(missing_ok=True)
    # Flushed even if the file does not exist: an earlier removal may have failed before its flush.
    files.fsync_path(path.parent, fsync=system.fsync)


def replace_file_atomically(path: Path, data: bytes, *, system: DriveSystemCalls) -> None:
    """Replaces a file atomically: after a crash it has its old content, or all of `data`."""
    with files.atomic_replace_context(path, draft=path.with_name(f".{path.name}.tmp")) as draft:
        write_file_start_and_flush(draft, data, system=system)
    files.fsync_path(path.parent, fsync=system.fsync)


def write_file_start_and_flush(path: Path, data: bytes, *, system: DriveSystemCalls) -> None:
    """Writes `data` over the beginning of a file, or a new file, and flushes it. Later bytes stay."""
    descriptor = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, memoryview(data), offset=0, system=system)
        system.fdatasync(descriptor)
    finally:
        os.close(descriptor)


SLOTS = (0, 1)
_MOST_BYTES = 256 << 20
_FOREIGN_FIX = "another offload.path; or remove the directory, if nothing in it is needed"


class RunRankIdentity(FrozenModel):
    """The owner of a directory's files: a rank of a run.

    layout: digest of the names, shapes, dtypes and offsets of all records
    """

    run_id: str
    rank: NonNegativeInt
    world_size: PositiveInt
    layout: str


class DataFileRegion(FrozenModel):
    """A record: a named region of a generation's data file. `offset_bytes` is a multiple of 4096."""

    name: str
    offset_bytes: NonNegativeInt
    length_bytes: PositiveInt


class GenerationManifest(FrozenModel):
    """Description of a complete generation.

    step: number of steps after which the state was written
    digests: digest of each record's bytes, in the order of `records`
    payload_bytes: length of the payload; the rest of its file is unused
    """

    format: Literal[1] = 1
    identity: RunRankIdentity
    step: NonNegativeInt
    records: tuple[DataFileRegion, ...]
    digests: tuple[str, ...]
    payload_bytes: NonNegativeInt
    payload_digest: str


def data_path(directory: Path, slot: int) -> Path:
    return directory / f"state-{slot}.data"


def payload_path(directory: Path, slot: int) -> Path:
    return directory / f"state-{slot}.payload"


def manifest_path(directory: Path, slot: int) -> Path:
    return directory / f"state-{slot}.json"


def data_file_bytes(records: Sequence[DataFileRegion]) -> int:
    """Returns the size of a data file that holds `records`: whole blocks of 4 KiB, at least one."""
    return page_aligned_bytes(max((one.offset_bytes + one.length_bytes for one in records), default=1), 1)


def check_aligned_and_disjoint(records: Sequence[DataFileRegion]) -> None:
    """Asserts that records begin at blocks, have unique names, and do not overlap."""
    assert len({record.name for record in records}) == len(records), "two records of one name"
    end = 0
    for record in sorted(records, key=lambda one: one.offset_bytes):
        assert record.offset_bytes % ALIGNMENT == 0, f"{record.name} does not begin at a block"
        assert record.offset_bytes >= end, f"{record.name} begins in another record"
        end = record.offset_bytes + record.length_bytes


def json_with_digest(value: FrozenModel) -> bytes:
    """Returns the value as JSON, followed by a line with the digest of this JSON."""
    text = value.model_dump_json().encode()
    return text + b"\n" + files.xxh3_digest(text).encode() + b"\n"


def claim_directory(directory: Path, identity: RunRankIdentity, *, system: DriveSystemCalls) -> None:
    """Writes `identity` into a new `directory`. Raises ForeignOffloadError if another owner has files there.

    If the identity file is damaged, the manifests show the owner instead.
    """
    text, path = json_with_digest(identity), directory / IDENTITY
    if not path.exists() and not any(os.path.lexists(data_path(directory, slot)) for slot in SLOTS):
        replace_file_atomically(path, text, system=system)
        return
    try:
        other = RunRankIdentity.model_validate_json(_verified_json_bytes(path))
    except (FileNotFoundError, ValidationError, DamagedOffloadError):
        if any(one.identity == identity for one in read_undamaged_manifests(directory)):
            replace_file_atomically(path, text, system=system)
            return
        got = f"no {IDENTITY} that can be read"
    else:
        if other == identity:
            return
        here, there = identity.model_dump(), other.model_dump()
        differ = (name for name in here if there[name] != here[name])
        got = ", ".join(f"{name} {there[name]} there, {here[name]} here" for name in differ)
    raise ForeignOffloadError(
        f"{directory} holds state of another run, or of other ranks or shapes.",
        got=got,
        why="its bytes would be taken for those of other parameters",
        fix=_FOREIGN_FIX,
    )


def read_world_size(directory: Path) -> int | None:
    """Returns the number of ranks of the run that wrote the files in `directory`; None if unreadable."""
    with suppress(OSError, ValidationError, DamagedOffloadError):
        return RunRankIdentity.model_validate_json(_verified_json_bytes(directory / IDENTITY)).world_size
    return None


def read_undamaged_manifests(directory: Path) -> list[GenerationManifest]:
    """Returns the undamaged manifests in a rank's directory, for any owner."""
    found: list[GenerationManifest] = []
    for slot in SLOTS:
        with suppress(OSError, ValidationError, DamagedOffloadError):
            text = _verified_json_bytes(manifest_path(directory, slot))
            found.append(GenerationManifest.model_validate_json(text))
    return found


@dataclass(frozen=True)
class SavedRunState:
    """State that a run left in its directory on a drive of one node.

    step: newest step that is complete on all ranks with files in the directory
    taken_bytes: bytes that these ranks' files take on the drive
    """

    directory: Path
    step: int
    world_size: int
    taken_bytes: int


def find_saved_run_state(directory: Path) -> SavedRunState | None:
    """Finds the state in a run's directory, `<offload.path>/<run id>`, without checking records.

    Returns None if there is no step that a run can resume from, or if this user cannot read the files.
    """
    world_size = read_world_size(directory / FIRST_RANK)
    if world_size is None:
        return None
    with suppress(OSError):
        # Ranks of another world size are leftovers of an earlier run.
        own = [one for one in directory.glob(RANKS) if read_world_size(one) == world_size]
        # No run resumes from a generation without a payload, which was committed during a load.
        steps = [{one.step for one in read_undamaged_manifests(rank) if one.payload_bytes} for rank in own]
        if common := set[int].intersection(*steps):
            taken_bytes = sum(file.lstat().st_blocks * 512 for one in own for file in one.iterdir())
            return SavedRunState(directory, max(common), world_size, taken_bytes)
    return None


def read_manifest(
    directory: Path, slot: int, *, identity: RunRankIdentity, records: Sequence[DataFileRegion]
) -> GenerationManifest | None:
    """Returns the manifest of a slot after verifying its payload, or None if there is no manifest.

    Raises OSError, and DamagedOffloadError if the manifest or the payload is damaged.
    """
    path = manifest_path(directory, slot)
    if not os.path.lexists(path):
        return None
    try:
        manifest = GenerationManifest.model_validate_json(_verified_json_bytes(path))
    except ValidationError as error:
        raise DamagedOffloadError(f"{path} is damaged.", got=error.errors()[0]["msg"]) from error
    if manifest.identity != identity or manifest.records != tuple(records):
        raise DamagedOffloadError(f"{path} is damaged.", got="a manifest of other files")
    if len(manifest.digests) != len(manifest.records):
        raise DamagedOffloadError(f"{path} is damaged.", got="digests that are not those of its records")
    read_payload(directory, slot, manifest=manifest)
    return manifest


def read_payload(directory: Path, slot: int, *, manifest: GenerationManifest) -> bytes:
    """Returns the payload of a slot. Raises DamagedOffloadError if its digest does not match, and OSError."""
    path = payload_path(directory, slot)
    if not path.exists():
        raise DamagedOffloadError(f"{path} is missing.")
    with open(path, "rb", opener=files.open_regular_file) as file:
        data = file.read(min(manifest.payload_bytes, os.fstat(file.fileno()).st_size))
    if len(data) < manifest.payload_bytes:
        got = f"{len(data)} bytes, {manifest.payload_bytes} expected"
        raise DamagedOffloadError(f"{path} is truncated.", got=got)
    if files.xxh3_digest(data) != manifest.payload_digest:
        raise digest_mismatch_error(path, f"all {len(data)} bytes")
    return data


def digest_mismatch_error(path: Path, what: str) -> DamagedOffloadError:
    """Returns the error for bytes (`what`) of a file whose digest does not match."""
    return DamagedOffloadError(
        f"{path} holds other bytes than were written.",
        got=f"{what}, whose digest is another",
        why="the drive, or something on the way to it, changed them",
        fix=CHECK_DRIVE,
    )


def _verified_json_bytes(path: Path) -> bytes:
    """Returns the JSON of a file that `json_with_digest` made. Raises OSError or DamagedOffloadError."""
    text = read_bytes(path, most_bytes=_MOST_BYTES)
    body, _, stated = text.removesuffix(b"\n").rpartition(b"\n")
    if text != body + b"\n" + files.xxh3_digest(body).encode() + b"\n":
        raise DamagedOffloadError(f"{path} is damaged.", got=f"its own digest is another ({stated[:40]!r})")
    return body

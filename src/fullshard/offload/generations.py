"""A rank's state in two files, one generation each, of which one is complete at any moment.

[Note: one whole generation] The newest state is never overwritten. A generation is complete while its
manifest exists. The manifest is removed, and the removal flushed to the drive, before the first byte of the
data is overwritten. It is written when all other files are flushed. If a process is killed, or the machine
loses power, the other generation is unchanged. A digest per record detects damaged records.

The newest steps of two ranks differ by at most one if all ranks commit a step before any of them begins the
next. To resume, the ranks agree on a step that all have, and each drops newer generations.
"""

import errno
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from fullshard.distributed.host import allocate_host_memory, as_memoryview
from fullshard.errors import DamagedOffloadError
from fullshard.offload import directories
from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls, allocate_file, translate_os_errors
from fullshard.system.direct_io import ALIGNMENT
from fullshard.system.files import fsync_path, xxh3_digest

logger = logging.getLogger("fullshard")

PAYLOAD_BYTES = 16 << 20  # allocated for each payload; a larger one can still be written
_MARGIN_BYTES = 1 << 20  # manifests and file system metadata
# Files of a rank's directory, and drafts of them, except the lock.
_OWN_FILE = re.compile(r"\.?(state-[01]|identity|parameters|frozen)\.(data|payload|json)(\.tmp)?")
_PIECE_BYTES = 16 << 20  # read while the previous piece is digested


@dataclass(frozen=True)
class Generation:
    """A complete state after `step` steps, in the files of slot 0 or 1."""

    step: int
    slot: int


class GenerationFiles(AbstractContextManager["GenerationFiles"]):
    """Reads one generation while it writes the next: start, write every record, commit.

    Several threads may read and write different records. All other methods are for one thread, while no
    record is read or written. Every error is an OffloadError. After an error in `commit_generation`, the new
    generation can never become complete: call `start_next_generation` again, or stop.
    """

    def __init__(
        self,
        directory: Path,
        records: Sequence[directories.DataFileRegion],
        *,
        identity: directories.RunRankIdentity,
        payload_bytes: int = PAYLOAD_BYTES,
        system: DriveSystemCalls = SYSTEM,
    ) -> None:
        """Locks `directory` for this process, and allocates the files that are missing.

        Logs a damaged generation, and ignores it. Raises ForeignOffloadError if the files have another
        identity (`discard_rank_directory` removes them). Raises OffloadError if another process uses the
        directory, or the drive has no room.
        """
        directories.check_aligned_and_disjoint(records)
        self.directory, self.identity = directory, identity
        self.records = {record.name: record for record in records}
        self._system = system
        self._digests: tuple[dict[str, str], ...] = ({}, {})  # of each slot's records
        self._begun: int | None = None  # the slot
        with ExitStack() as stack:
            stack.enter_context(directories.lock_directory(directory))
            with translate_os_errors(f"{directory} cannot be used."):
                directories.claim_directory(directory, identity, system=system)
                size_bytes = directories.data_file_bytes(records)
                _allocate_missing_files(directory, size_bytes, payload_bytes=payload_bytes, system=system)
                self._files = [
                    stack.enter_context(
                        DriveFile.open(directories.data_path(directory, slot), size_bytes, system=system)
                    )
                    for slot in directories.SLOTS
                ]
                self._whole = _read_complete_manifests(directory, records, identity=identity)
            for slot, manifest in self._whole.items():
                self._digests[slot].update(zip(self.records, manifest.digests, strict=True))
            # One for the reading thread and one for the writing thread; each digests while its bytes move.
            self._hashing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="digest")
            stack.callback(self._hashing.shutdown)
            self._resources = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and unlocks the directory. No thread may still use it. Generations stay."""
        self._resources.close()

    def list_complete_generations(self) -> list[Generation]:
        """Returns the complete generations, at most two, the newest first. Records are not checked."""
        found = [Generation(manifest.step, slot) for slot, manifest in self._whole.items()]
        return sorted(found, key=lambda one: -one.step)

    def read_generation_payload(self, generation: Generation) -> bytes:
        """Returns the payload given to `commit_generation`. Raises DamagedOffloadError."""
        slot = generation.slot
        with translate_os_errors(f"{directories.payload_path(self.directory, slot)} cannot be read."):
            return directories.read_payload(self.directory, slot, manifest=self._whole[slot])

    def invalidate_generation(self, slot: int) -> None:
        """Removes the generation in a slot, if there is one, and flushes the removal of its manifest."""
        self._whole.pop(slot, None)
        self._digests[slot].clear()
        path = directories.manifest_path(self.directory, slot)
        with translate_os_errors(f"{path} cannot be removed."):
            directories.remove_file_and_flush(path, system=self._system)

    def start_next_generation(self) -> int:
        """Starts the next generation and returns its slot, which never has the newest complete generation.

        The slot's previous generation is lost. With several ranks, call this only once all have committed the
        newest complete generation.
        """
        self._begun = None
        newest = self.list_complete_generations()
        slot = 1 - newest[0].slot if newest else 0
        self.invalidate_generation(slot)
        self._begun = slot
        return slot

    def reopen_generation(self, slot: int) -> None:
        """Makes a complete generation the started one again: no run resumes from it until it is committed."""
        self._whole.pop(slot, None)
        self._begun = slot
        path = directories.manifest_path(self.directory, slot)
        with translate_os_errors(f"{path} cannot be removed."):
            directories.remove_file_and_flush(path, system=self._system)

    def write_record(self, name: str, data: memoryview) -> None:
        """Writes the record `name` of the started generation. `data` must not change meanwhile."""
        record, slot = self.records[name], self._begun
        assert slot is not None, "no generation was begun"
        assert data.nbytes == record.length_bytes, "a record is written whole"
        self._digests[slot].pop(name, None)
        hashing = self._hashing.submit(xxh3_digest, data)
        try:
            self._files[slot].write(data, record.offset_bytes)
        finally:  # the digest must have read `data` before the caller reuses it, also after an error
            found = hashing.result()
        self._digests[slot][name] = found

    def read_record(self, name: str, target: memoryview, *, slot: int, verify: bool = False) -> None:
        """Fills `target` with the record `name` of a complete generation, or of the started one.

        If `verify`, checks its digest. Raises DamagedOffloadError.
        """
        record, file = self.records[name], self._files[slot]
        assert target.nbytes == record.length_bytes, "a record is read whole"
        assert name in self._digests[slot], f"{name} was not written to slot {slot}"
        if not verify:
            file.read(target, record.offset_bytes)
            return
        found, end = xxhash.xxh3_128(), record.offset_bytes + target.nbytes
        with ExitStack() as last:  # waits for the last digest, also after an error
            for begin in range(0, target.nbytes, _PIECE_BYTES):
                piece = target[begin : begin + _PIECE_BYTES]
                file.read(piece, record.offset_bytes + begin)
                last.close()
                last.callback(self._hashing.submit(found.update, piece).result)
        if found.hexdigest() != self._digests[slot][name]:
            part = f"{name}, bytes {record.offset_bytes} to {end}"
            raise directories.digest_mismatch_error(file.path, part)

    def read_record_part(self, name: str, *, slot: int, offset: int, size_bytes: int) -> Tensor:
        """Returns `size_bytes` of a record, from `offset` on, as uint8. Does not check its digest."""
        record = self.records[name]
        assert name in self._digests[slot], f"{name} was not written to slot {slot}"
        assert offset + size_bytes <= record.length_bytes, "the bytes are the record's"
        before = offset % ALIGNMENT
        memory = allocate_host_memory(before + size_bytes, pinned=False)
        self._files[slot].read(as_memoryview(memory), record.offset_bytes + offset - before)
        return memory[before : before + size_bytes]

    def commit_generation(self, step: int, payload: bytes) -> Generation:
        """Completes the started generation, as the state after `step` steps, and flushes it.

        Every record must have been written since the start. `payload` is stored with the records.
        """
        slot, self._begun = self._begun, None
        assert slot is not None, "no generation was begun"
        later = any(one.step >= step for one in self._whole.values())
        assert not later, "a later generation is there: drop it first"
        written = self._digests[slot]
        missing = [name for name in self.records if name not in written]
        assert not missing, f"records that were not written: {missing}"
        manifest = directories.GenerationManifest(
            identity=self.identity,
            step=step,
            records=tuple(self.records.values()),
            digests=tuple(written[name] for name in self.records),
            payload_bytes=len(payload),
            payload_digest=xxh3_digest(payload),
        )
        self._files[slot].flush()
        path, text = directories.manifest_path(self.directory, slot), directories.json_with_digest(manifest)
        with translate_os_errors(f"step {step} cannot be kept in {self.directory}."):
            directories.write_file_start_and_flush(
                directories.payload_path(self.directory, slot), payload, system=self._system
            )
            directories.replace_file_atomically(path, text, system=self._system)
        self._whole[slot] = manifest
        return Generation(step, slot)


def _read_complete_manifests(
    directory: Path, records: Sequence[directories.DataFileRegion], *, identity: directories.RunRankIdentity
) -> dict[int, directories.GenerationManifest]:
    """Returns the manifests of complete generations, by slot. Logs damaged manifests."""
    found: dict[int, directories.GenerationManifest] = {}
    for slot in directories.SLOTS:
        try:
            manifest = directories.read_manifest(directory, slot, identity=identity, records=records)
            if manifest is not None:
                found[slot] = manifest
        except (DamagedOffloadError, OSError) as error:  # OSError: the drive cannot read it
            logger.warning("a generation of optimizer state cannot be used: %s", error)
    return found


def discard_rank_directory(directory: Path) -> None:
    """Removes a rank's files, if any, and its directory unless it has other files.

    Raises OffloadError if another process uses it.
    """
    if not os.path.exists(directory):  # also if its parent cannot be read
        return
    with directories.lock_directory(directory), translate_os_errors(f"{directory} cannot be removed."):
        for slot in directories.SLOTS:
            directories.remove_file_and_flush(directories.manifest_path(directory, slot))
        for path in directory.iterdir():
            if _OWN_FILE.fullmatch(path.name):
                path.unlink()
        (directory / directories.LOCK).unlink()
        with suppress(OSError):  # files that are not ours
            directory.rmdir()
        with suppress(FileNotFoundError):  # another rank removed the parent: see `remove_empty_parents`
            fsync_path(directory.parent)


def _allocate_missing_files(
    directory: Path, size_bytes: int, *, payload_bytes: int, system: DriveSystemCalls
) -> None:
    """Allocates missing data and payload files. Raises OffloadError if they do not fit on the drive."""
    missing = [
        slot
        for slot in directories.SLOTS
        if not _has_data_of_size_else_remove(directory, slot, size_bytes=size_bytes)
    ]
    payloads = [slot for slot in directories.SLOTS if not directories.payload_path(directory, slot).exists()]
    needed = len(missing) * size_bytes + len(payloads) * payload_bytes + _MARGIN_BYTES
    free = system.free_bytes(directory)
    if (missing or payloads) and free < needed:
        raise directories.no_space_error(directory, needed_bytes=needed, free_bytes=free)
    try:
        for slot in missing:
            allocate_file(directories.data_path(directory, slot), size_bytes, system=system)
        for slot in payloads:
            allocate_file(directories.payload_path(directory, slot), payload_bytes, system=system)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Another rank has allocated its files since `free` was read.
        raise directories.no_space_error(directory, needed_bytes=needed, free_bytes=free) from error


def _has_data_of_size_else_remove(directory: Path, slot: int, *, size_bytes: int) -> bool:
    """Returns True if a slot's data file has this size. Otherwise removes its manifest, and then the file."""
    path, manifest = directories.data_path(directory, slot), directories.manifest_path(directory, slot)
    found = path.stat().st_size if path.exists() else None
    if found == size_bytes:
        return True
    if found is not None or manifest.exists():
        fault = "is missing" if found is None else f"holds {found} bytes, {size_bytes} expected"
        logger.warning("a generation of optimizer state cannot be used: %s %s", path, fault)
    directories.remove_file_and_flush(manifest)
    directories.remove_file_and_flush(path)
    return False

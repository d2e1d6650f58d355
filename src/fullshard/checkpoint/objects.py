"""Checkpoints on object storage, where nothing can be renamed: putting the manifest is the commit.

    s3://bucket/run/step-00000300/manifest.json              the commit record, which names one attempt
                                  1f0c9a2b44d0e713/…         an attempt's files, as on a file system
                                  bad-1f0c9a2b44d0e713-….json   a damaged manifest, renamed

[Note: one put commits] Every attempt to save a step writes below its own prefix, so that two attempts never
mix. The manifest is put under a name that all attempts share, after the store has listed every file with its
size, and only if no manifest exists (if-none-match). So of two writers one commits, and a save believed dead
cannot replace a later one. A lease would not do: it has to be renewed while shards are written, and a writer
that was stopped for longer than its lease would continue regardless.
"""

import logging
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

from pydantic import ValidationError

from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.files import MANIFEST, WRITER, DiskGroup, Files, WriterProcess, write_file
from fullshard.checkpoint.manifest import Manifest, read_manifest, step_name, step_of
from fullshard.checkpoint.object_files import PART_BYTES, ObjectFiles, attempt_of
from fullshard.checkpoint.object_store import ANSWER_SECONDS, TRIES, AlteredError, Listing, Store, Stored
from fullshard.distributed.agreement import Group
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.small_files import parse_json

# An attempt without a new object for this long is considered dead.
_DEAD_AFTER = timedelta(days=1)
_REJECT = "bad-"

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class ObjectLocation:
    """Checkpoints below a prefix of an object store. See [Note: one put commits].

    url: prefix of the steps
    part_bytes: bytes sent per request while a file is written; S3 requires 5 MiB or more
    answer_seconds: see `Store`
    key: key that signs the checkpoints
    """

    is_local: ClassVar[bool] = False

    url: str
    part_bytes: int = PART_BYTES
    answer_seconds: float = ANSWER_SECONDS
    key: KeyFile | None = None

    def __str__(self) -> str:
        return self.url

    def join(self, *, group: Group = None) -> DiskGroup:
        return DiskGroup()

    def exists(self) -> bool:
        found = self.as_checkpoint().store.listing(self.url)
        return bool(found.objects or found.prefixes)

    def as_checkpoint(self) -> ObjectFiles:
        return ObjectFiles(self.url, None, self.part_bytes, self.answer_seconds, self.key)

    def steps(self) -> list[tuple[int, Files]]:
        """Returns (step, files) of every step that has a manifest, which uncommitted attempts do not have."""
        found = _listings(self.as_checkpoint().store)
        return [(step, self._at(step)) for step, below in found.items() if MANIFEST in below.objects]

    def unfinished(self) -> list[str]:
        return [str(draft) for draft in _uncommitted(self.as_checkpoint().store)]

    def quarantined(self) -> list[str]:
        found = _listings(self.as_checkpoint().store)
        return [f"{step_name(step)}/{name}" for step, below in found.items() for name in _rejects(below)]

    @contextmanager
    def writing(self) -> Generator[None]:
        """Does nothing: other writers are not refused. See [Note: one put commits]."""
        yield

    def begin(self, step: int, *, needed_bytes: int) -> Files:
        draft = self._at(step, attempt=secrets.token_hex(8))
        writer = WriterProcess.this().model_dump_json().encode()
        store = self.as_checkpoint().store
        write_file(draft, WRITER, data=writer)
        try:
            store.put_new(f"{draft}/{WRITER}", data=writer)
        except FileExistsError:
            pass  # the expected answer
        else:
            logger.warning(
                "%s does not refuse to replace an object (if-none-match): of two jobs that save there at the "
                "same time, one may replace the other's checkpoint",
                self,
            )
        _collect_leftovers(store, own=draft)
        return draft

    def prepare(self, draft: Files, manifest: Manifest) -> None:
        """Does nothing: putting the manifest is the commit."""

    def commit(self, draft: Files, manifest: Manifest) -> Files:
        """Puts the manifest. Raises CheckpointError if a file is missing or another job saved the step."""
        draft = _own(draft)
        _require_stored(draft, manifest)
        signed = manifest.model_copy(update={"attempt": draft.attempt}).encoded(draft.key)
        _put_manifest(draft, data=signed)
        return self._at(manifest.step)

    def discard(self, draft: Files) -> None:
        """Removes a draft, unless its manifest exists: its put succeeded, and only the answer was lost."""
        draft = _own(draft)
        try:
            if _committed(draft) != draft.attempt:
                _remove_attempt(draft)
        except OSError as error:
            logger.warning("%s could not be removed: %s", draft, error)

    def set_aside(self, checkpoint: Files) -> str:
        """Renames only the manifest, and returns its new URL; the files stay in place."""
        store, url = self.as_checkpoint().store, _own(checkpoint).url
        text = store.get(f"{url}/{MANIFEST}")
        aside = f"{url}/{_REJECT}{attempt_of(text)}-{secrets.token_hex(4)}.json"
        with suppress(FileExistsError):
            store.put_new(aside, data=text)
        store.remove([f"{url}/{MANIFEST}"])
        return aside

    def remove(self, checkpoint: Files) -> None:
        """Removes the manifest first, so that an interrupted removal leaves only an uncommitted attempt."""
        files = _own(checkpoint)
        store, url = self.as_checkpoint().store, files.url
        attempt, below = _committed(files), store.listing(url)
        store.remove([f"{url}/{MANIFEST}"])
        if attempt in below.prefixes:
            _remove_attempt(replace(files, attempt=attempt))
        else:  # copied from a file system
            store.remove([f"{url}/{name}" for name in set(below.objects) - {MANIFEST, *_rejects(below)}])

    def _at(self, step: int, *, attempt: str | None = None) -> ObjectFiles:
        url = f"{self.url}/{step_name(step)}"
        return ObjectFiles(url, attempt, self.part_bytes, self.answer_seconds, self.key)


def _own(files: Files) -> ObjectFiles:
    assert isinstance(files, ObjectFiles), f"{files} lies elsewhere"
    return files


def _listings(store: Store) -> dict[int, Listing]:
    """Returns the listing of every step's prefix by step, highest step first."""
    steps = [step for name in store.listing(store.url).prefixes if (step := step_of(name)) is not None]
    return {step: store.listing(f"{store.url}/{step_name(step)}") for step in sorted(steps, reverse=True)}


def _rejects(below: Listing) -> list[str]:
    return [name for name in below.objects if name.startswith(_REJECT)]


def _uncommitted(store: Store) -> list[ObjectFiles]:
    """Returns the attempts that no manifest names, neither a current one nor a damaged one."""
    found: list[ObjectFiles] = []
    for step, below in _listings(store).items():
        at = ObjectFiles(f"{store.url}/{step_name(step)}", answer_seconds=store.answer_seconds)
        named: set[str | None] = {name.split("-")[1] for name in _rejects(below)}
        if below.prefixes and MANIFEST in below.objects:
            named.add(_committed(at))
        # If a manifest names an unknown attempt, it may be damaged, and any of the attempts may be its files.
        if named <= set(below.prefixes):
            found += [replace(at, attempt=attempt) for attempt in below.prefixes if attempt not in named]
    return found


def _committed(files: ObjectFiles) -> str | None:
    """Returns the attempt in the manifest of a step, or None if there is no manifest or no attempt in it."""
    try:
        return attempt_of(files.store.get(f"{files.url}/{MANIFEST}"))
    except FileNotFoundError:
        return None


def _require_stored(draft: ObjectFiles, manifest: Manifest) -> None:
    sizes = draft.sizes()
    for name, file in manifest.files.items():
        if sizes.get(name) != file.size_bytes:
            raise CheckpointError(
                f"{draft}/{name} was not stored.",
                got=f"{sizes[name]} bytes" if name in sizes else "no such object",
                why=f"{file.size_bytes} bytes were sent, and the store said that it had them",
                fix="save again; another store, if that continues",
            )


def _put_manifest(draft: ObjectFiles, *, data: bytes) -> None:
    store, target = draft.store, f"{draft.url}/{MANIFEST}"
    failed: OSError | None = None
    for _ in range(TRIES):
        try:
            return store.put_new(target, data=data)
        except OSError as error:
            failed = error
        try:
            there = store.get(target)
        except FileNotFoundError:
            continue  # it collided with another put, which also failed
        if there == data:
            return None  # it was stored, and the answer was lost
        if isinstance(failed, AlteredError) and _is_damaged(draft):
            store.remove([target])  # ours, because nothing was there before
            continue
        raise CheckpointError(
            f"another job has saved {draft.url} meanwhile.",
            got="a manifest that is not ours",
            why="a checkpoint is never overwritten",
            fix="a place of its own for every run",
        ) from failed
    assert failed is not None, "tried at least once"
    raise failed


def _is_damaged(draft: ObjectFiles) -> bool:
    try:
        read_manifest(replace(draft, attempt=None))
    except DamagedCheckpointError:
        return True
    return False


def _remove_attempt(draft: ObjectFiles) -> None:
    """Removes the files of an attempt, last of all the file that identifies its writer."""
    store = draft.store
    store.abort_uploads(str(draft))
    names = set(store.listing(str(draft)).objects)
    store.remove([f"{draft}/{name}" for name in sorted(names - {WRITER})])
    store.remove([f"{draft}/{name}" for name in names & {WRITER}])


def _collect_leftovers(store: Store, *, own: ObjectFiles) -> None:
    """Removes uncommitted attempts that no process writes any more, except `own`. Only logs a failure."""
    try:
        now = store.listing(str(own)).objects[WRITER]
        for draft in _uncommitted(store):
            if str(draft) == str(own):
                continue
            # Looked up again: it may have committed, and ended, since the first listing.
            if is_abandoned(draft, now) and str(draft) in map(str, _uncommitted(store)):
                logger.info("removing %s: nobody writes it any more", draft)
                _remove_attempt(draft)
            else:
                logger.warning("leaving %s alone: a process may still be writing it", draft)
    except OSError as error:
        logger.warning("what broken-off saves left in %s could not be removed: %s", store.url, error)


def is_abandoned(draft: ObjectFiles, now: Stored) -> bool:
    """Returns whether no process writes an attempt: its process is dead, or it got no object for a day.

    now: an object that was just put, which has the current time by the store's clock
    """
    times = [one.changed for one in draft.store.listing(str(draft)).objects.values()]
    known = [time for time in times if time is not None]
    if now.changed and known and len(known) == len(times) and now.changed - max(known) > _DEAD_AFTER:
        return True
    try:
        return WriterProcess.model_validate(parse_json(draft.read(WRITER))).is_dead()
    except (FileNotFoundError, ValueError, ValidationError):
        return False

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

from fullshard.checkpoint.files import (
    MANIFEST,
    PART_BYTES,
    WRITER,
    CheckpointFiles,
    ObjectFiles,
    attempt_id_in_manifest,
    write_process_name,
)
from fullshard.checkpoint.manifest import Manifest, parse_step_name, read_manifest, step_name
from fullshard.errors import CheckpointError
from fullshard.system.object_store import ObjectSizeAndTime, ObjectStore, PrefixListing

# An attempt without a new object for this long is considered dead.
_DEAD_AFTER = timedelta(days=1)
_REJECT = "bad-"

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class ObjectLocation:
    """Checkpoints below a prefix of an object store. See [Note: one put commits].

    url: prefix of the steps
    part_bytes: bytes sent per request while a file is written; S3 requires 5 MiB or more
    """

    url: str
    part_bytes: int = PART_BYTES

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        found = self.root_as_checkpoint().store.list_prefix(self.url)
        return bool(found.objects or found.prefixes)

    def root_as_checkpoint(self) -> ObjectFiles:
        return ObjectFiles(self.url, None, self.part_bytes)

    def list_checkpoints(self) -> list[tuple[int, CheckpointFiles]]:
        """Returns (step, files) of every step that has a manifest, which uncommitted attempts do not have."""
        found = _prefix_listings_by_step(self.root_as_checkpoint().store)
        return [(step, self._step_files(step)) for step, below in found.items() if MANIFEST in below.objects]

    def list_drafts(self) -> list[str]:
        return [str(draft) for draft in _list_uncommitted_attempts(self.root_as_checkpoint().store)]

    def list_quarantined(self) -> list[str]:
        found = _prefix_listings_by_step(self.root_as_checkpoint().store)
        return [
            f"{step_name(step)}/{name}"
            for step, below in found.items()
            for name in _quarantined_manifest_names(below)
        ]

    @contextmanager
    def lock_for_writing(self) -> Generator[None]:
        """Does nothing: other writers are not refused. See [Note: one put commits]."""
        yield

    def clean_up_and_create_draft(self, step: int, *, needed_bytes: int) -> CheckpointFiles:
        """Creates a draft, and removes abandoned ones. Warns of a store that would replace a manifest."""
        draft = self._step_files(step, attempt=secrets.token_hex(8))
        store, writer = self.root_as_checkpoint().store, write_process_name(draft)
        try:
            store.put_new_object(f"{draft}/{WRITER}", data=writer)
        except FileExistsError:
            pass  # the expected answer
        else:
            logger.warning(
                "%s does not refuse to replace an object (if-none-match): of two jobs that save there at the "
                "same time, one may replace the other's checkpoint",
                self,
            )
        _remove_abandoned_attempts(store, own=draft)
        return draft

    def commit(self, draft: CheckpointFiles, manifest: Manifest) -> CheckpointFiles:
        """Puts the manifest. Raises CheckpointError if a file is missing or another job saved the step."""
        draft = _as_object_files(draft)
        sizes = draft.file_sizes_bytes()
        for name, file in manifest.files.items():
            if sizes.get(name) != file.size_bytes:
                raise CheckpointError(
                    f"{draft}/{name} was not stored.",
                    got=f"{sizes[name]} bytes" if name in sizes else "no such object",
                    why=f"{file.size_bytes} bytes were sent, and the store said that it had them",
                    fix="save again; another store, if that continues",
                )
        _put_manifest(draft, data=manifest.model_copy(update={"attempt": draft.attempt}).encode())
        return self._step_files(manifest.step)

    def discard_draft(self, draft: CheckpointFiles) -> None:
        """Removes a draft. Keeps one with a manifest: it was saved, and only the store's answer was lost."""
        draft = _as_object_files(draft)
        try:
            if _committed_attempt(draft) != draft.attempt:
                _remove_attempt(draft)
        except OSError as error:
            logger.warning("%s could not be removed: %s", draft, error)

    def quarantine(self, checkpoint: CheckpointFiles) -> str:
        """Renames only the manifest, and returns its new URL; the files stay in place."""
        store, url = self.root_as_checkpoint().store, _as_object_files(checkpoint).url
        text = store.read_object(f"{url}/{MANIFEST}")
        aside = f"{url}/{_REJECT}{attempt_id_in_manifest(text)}-{secrets.token_hex(4)}.json"
        with suppress(FileExistsError):
            store.put_new_object(aside, data=text)
        store.remove_objects([f"{url}/{MANIFEST}"])
        return aside

    def remove_checkpoint(self, checkpoint: CheckpointFiles) -> None:
        """Removes the manifest first, so that an interrupted removal leaves only an uncommitted attempt."""
        files = _as_object_files(checkpoint)
        store, url = self.root_as_checkpoint().store, files.url
        attempt, below = _committed_attempt(files), store.list_prefix(url)
        copied = {WRITER, *read_manifest(files).files}
        store.remove_objects([f"{url}/{MANIFEST}"])
        if attempt in below.prefixes:
            _remove_attempt(replace(files, attempt=attempt))
        else:  # copied from a file system
            store.remove_objects([f"{url}/{name}" for name in copied & below.objects.keys()])

    def _step_files(self, step: int, *, attempt: str | None = None) -> ObjectFiles:
        return replace(self.root_as_checkpoint(), url=f"{self.url}/{step_name(step)}", attempt=attempt)


def _as_object_files(files: CheckpointFiles) -> ObjectFiles:
    assert isinstance(files, ObjectFiles), f"{files} lies elsewhere"
    return files


def _prefix_listings_by_step(store: ObjectStore) -> dict[int, PrefixListing]:
    """Returns the listing of every step's prefix by step, highest step first."""
    steps = (parse_step_name(name) for name in store.list_prefix(store.url).prefixes)
    known = sorted((step for step in steps if step is not None), reverse=True)
    return {step: store.list_prefix(f"{store.url}/{step_name(step)}") for step in known}


def _quarantined_manifest_names(below: PrefixListing) -> list[str]:
    return [name for name in below.objects if name.startswith(_REJECT)]


def _list_uncommitted_attempts(store: ObjectStore) -> list[ObjectFiles]:
    """Returns the attempts that no manifest names, neither a current one nor a damaged one."""
    found: list[ObjectFiles] = []
    for step, below in _prefix_listings_by_step(store).items():
        at = ObjectFiles(f"{store.url}/{step_name(step)}")
        named: set[str | None] = {name.split("-")[1] for name in _quarantined_manifest_names(below)}
        if below.prefixes and MANIFEST in below.objects:
            named.add(_committed_attempt(at))
        # If a manifest names an unknown attempt, it may be damaged, and any of the attempts may be its files.
        if named <= set(below.prefixes):
            found += [replace(at, attempt=attempt) for attempt in below.prefixes if attempt not in named]
    return found


def _committed_attempt(files: ObjectFiles) -> str | None:
    """Returns the attempt in the manifest of a step, or None if there is no manifest or no attempt in it."""
    try:
        return attempt_id_in_manifest(files.store.read_object(f"{files.url}/{MANIFEST}"))
    except FileNotFoundError:
        return None


def _put_manifest(draft: ObjectFiles, *, data: bytes) -> None:
    """Puts a manifest. Raises CheckpointError if another one is there; OSError."""
    store, target = draft.store, f"{draft.url}/{MANIFEST}"
    try:
        store.put_new_object(target, data=data)
    except OSError as error:
        try:
            there = store.read_object(target)
        except FileNotFoundError:
            raise error from None
        if there != data:  # else it was stored, and the answer was lost
            raise CheckpointError(
                f"another job has saved {draft.url} meanwhile.",
                got="a manifest that is not ours",
                why="a checkpoint is never overwritten",
                fix="a place of its own for every run",
            ) from error


def _remove_attempt(draft: ObjectFiles) -> None:
    names = draft.store.list_prefix(str(draft)).objects
    draft.store.remove_objects([f"{draft}/{name}" for name in names])


def _remove_abandoned_attempts(store: ObjectStore, *, own: ObjectFiles) -> None:
    """Removes uncommitted attempts without a new object for a day, except `own`. Only logs a failure."""
    try:
        now = store.list_prefix(str(own)).objects[WRITER]
        for draft in _list_uncommitted_attempts(store):
            if str(draft) == str(own):
                continue
            # Looked up again: it may have committed, and ended, since the first listing.
            if is_attempt_abandoned(draft, now) and str(draft) in map(str, _list_uncommitted_attempts(store)):
                logger.info("removing %s: nothing was written there for a day", draft)
                _remove_attempt(draft)
            else:
                logger.warning("leaving %s alone: a process may still be writing it", draft)
    except OSError as error:
        logger.warning("files of interrupted saves in %s could not be removed: %s", store.url, error)


def is_attempt_abandoned(draft: ObjectFiles, just_put: ObjectSizeAndTime) -> bool:
    """Returns whether an attempt got no object for a day; False if the store does not report times.

    just_put: an object that was just put, which has the current time by the store's clock
    """
    times = [one.changed for one in draft.store.list_prefix(str(draft)).objects.values()]
    known = [time for time in times if time is not None]
    if just_put.changed is None or not known or len(known) < len(times):
        return False
    return just_put.changed - max(known) > _DEAD_AFTER

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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
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
from fullshard.system.object_store import ObjectSizeAndTime, PrefixListing

# An attempt without a new object for this long is considered dead.
_DEAD_AFTER = timedelta(days=1)
_REJECT = "bad-"

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class ObjectLocation:
    """Checkpoints below a prefix of an object store. See [Note: one put commits].

    url: prefix of the steps
    part_bytes: bytes sent per request while a file is written; S3 requires 5 MiB or more
    settled: steps where a save of this process found a manifest, and nothing to clean up
    """

    url: str
    part_bytes: int = PART_BYTES
    settled: set[int] = field(default_factory=set[int], init=False, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        found = self.root_as_checkpoint().store.list_prefix(self.url)
        return bool(found.objects or found.prefixes)

    def root_as_checkpoint(self) -> ObjectFiles:
        return ObjectFiles(self.url, None, self.part_bytes)

    def list_checkpoints(self) -> list[tuple[int, CheckpointFiles]]:
        """Returns (step, files) of every step that has a manifest, which uncommitted attempts do not have."""
        found = ((step, self.find_checkpoint(step)) for step in self.list_steps())
        return [(step, files) for step, files in found if files is not None]

    def list_steps(self) -> list[int]:
        steps = map(parse_step_name, self.root_as_checkpoint().store.list_prefix(self.url).prefixes)
        return sorted((step for step in steps if step is not None), reverse=True)

    def find_checkpoint(self, step: int) -> CheckpointFiles | None:
        files = self._step_files(step)
        return files if MANIFEST in files.store.list_prefix(files.url).objects else None

    def describe_drafts(self) -> list[str]:
        listed = _listings_by_step_url(self).items()
        drafts = [draft for url, below in listed for draft in _list_uncommitted_attempts(url, below)]
        return [f"{draft}: a save that is still running, or was not finished" for draft in drafts]

    def list_quarantined(self) -> list[str]:
        listed = _listings_by_step_url(self).items()
        names = ((url.rpartition("/")[2], _quarantined_manifest_names(below)) for url, below in listed)
        return [f"{step}/{name}" for step, many in names for name in many]

    def lock_for_writing(self) -> AbstractContextManager[None]:
        """Does nothing: other writers are not refused. See [Note: one put commits]."""
        return nullcontext()

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
        _remove_abandoned_attempts(self, own=draft)
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
        self.settled.clear()
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


def _listings_by_step_url(place: ObjectLocation) -> dict[str, PrefixListing]:
    urls = [f"{place}/{step_name(step)}" for step in place.list_steps()]
    return {url: place.root_as_checkpoint().store.list_prefix(url) for url in urls}


def _quarantined_manifest_names(below: PrefixListing) -> list[str]:
    return [name for name in below.objects if name.startswith(_REJECT)]


def _list_uncommitted_attempts(url: str, below: PrefixListing) -> list[ObjectFiles]:
    """Returns the attempts of a step that no manifest names, neither a current one nor a damaged one."""
    if _is_settled(below):
        return []
    named: set[str | None] = {name.split("-")[1] for name in _quarantined_manifest_names(below)}
    if below.prefixes and MANIFEST in below.objects:
        named.add(_committed_attempt(ObjectFiles(url)))
    # If a manifest names an unknown attempt, it may be damaged, and any of the attempts may be its files.
    unnamed = [attempt for attempt in below.prefixes if attempt not in named]
    return [ObjectFiles(url, attempt) for attempt in unnamed] if named <= set(below.prefixes) else []


def _is_settled(below: PrefixListing) -> bool:
    """Returns whether a step has a manifest, and no attempt beside the one that it may name."""
    return MANIFEST in below.objects and len(below.prefixes) < 2


def _committed_attempt(files: ObjectFiles) -> str | None:
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


def _remove_abandoned_attempts(place: ObjectLocation, *, own: ObjectFiles) -> None:
    """Removes uncommitted attempts without a new object for a day, except `own`. Only logs a failure."""
    store = own.store
    try:
        now = store.list_prefix(str(own)).objects[WRITER]
        for step in set(place.list_steps()) - place.settled:
            at = f"{place}/{step_name(step)}"
            below = store.list_prefix(at)
            if _is_settled(below):
                place.settled.add(step)
            for draft in _list_uncommitted_attempts(at, below):
                if str(draft) == str(own):
                    continue
                # Looked up again: it may have committed, and ended, since the first listing.
                again = _list_uncommitted_attempts(at, store.list_prefix(at))
                if is_attempt_abandoned(draft, now) and draft in again:
                    logger.info("removing %s: nothing was written there for a day", draft)
                    _remove_attempt(draft)
                else:
                    logger.warning("leaving %s alone: a process may still be writing it", draft)
    except OSError as error:
        logger.warning("files of interrupted saves in %s could not be removed: %s", place, error)


def is_attempt_abandoned(draft: ObjectFiles, just_put: ObjectSizeAndTime) -> bool:
    """Returns whether an attempt got no object for a day; False if the store does not report times.

    just_put: an object that was just put, which has the current time by the store's clock
    """
    times = [one.changed for one in draft.store.list_prefix(str(draft)).objects.values()]
    known = [time for time in times if time is not None]
    if just_put.changed is None or not known or len(known) < len(times):
        return False
    return just_put.changed - max(known) > _DEAD_AFTER

"""Loading and verifying the newest complete checkpoint, with any number of ranks and any strategy.

[Note: a reader beside a writer] A run may commit a checkpoint and remove an old one while another process,
such as an evaluation, reads the old one. So if a read fails and the checkpoint no longer exists, the reader
starts again with the newest checkpoint.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fullshard.checkpoint import location
from fullshard.checkpoint.files import WRITER, CheckpointFiles
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    SHARDS,
    Checkpointable,
    Manifest,
    StateLoadedInPortions,
    check_file_sizes,
    check_same_tensors,
    checkpoint_files_at,
    missing_file_reason,
    read_manifest,
    read_verified_file,
    sizes_by_name,
)
from fullshard.checkpoint.shard_file import SUFFIX, verify_piece
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.distributed.agreement import raise_on_all_ranks, rank, run_on_all_ranks, run_on_rank_zero
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import join_names
from fullshard.system.files import os_errors_as_checkpoint_errors

T = TypeVar("T")

_TRIES = 10  # attempts to read a checkpoint faster than it is removed

logger = logging.getLogger("fullshard")


def load(
    state: Checkpointable, directory: str | Path | location.CheckpointLocation, *, missing_ok: bool = False
) -> bool:
    """Loads the newest complete checkpoint of `directory` into `state`, and returns True.

    Collective: every rank calls it, and rank 0 chooses the checkpoint. `directory` may also be a checkpoint.
    The ranks and the sharding may be others than at the save. Every rank reads only the bytes that its shards
    need, and checks every block against its digest. A checkpoint that proves damaged is renamed to `.bad-…`,
    with a warning, and the next older one is loaded; if it is `directory` itself, CheckpointError is raised.

    If there is no checkpoint, returns False if `missing_ok`, else raises CheckpointError. Also raises
    CheckpointError if none of the checkpoints is complete, or if the checkpoint is of another model. After an
    error the content of `state` is undefined.

    >>> fs.load(state, "checkpoints", missing_ok=True)  # False in the first start of a run
    True
    >>> state.step
    3
    """
    place = location.location_of(directory)
    refused: dict[str, str] = {}
    for attempt in itertools.count(1):
        missing = missing_ok and attempt == 1
        find = partial(_find_newest_checkpoint, place, missing_ok=missing, refused=refused)
        found = run_on_rank_zero(find, doing=f"looking for a checkpoint in {directory}")
        if found is None:
            return False
        files, manifest = found
        try:
            _load_checkpoint(state, files, manifest=manifest)
        except CheckpointError as error:
            is_gone = partial(_is_removed_or_replaced, place, files, manifest=manifest)
            if run_on_rank_zero(is_gone, doing=f"looking for {files} again"):
                _check_attempts_left(attempt, place)
                continue  # see [Note: a reader beside a writer]
            if not isinstance(error, DamagedCheckpointError) or files.name == place.root_as_checkpoint().name:
                raise  # no other checkpoint helps, or this one was requested by name
            refused[files.name] = f"{files.name}: {error.got or error.what}"
            with raise_on_all_ranks(f"setting {files} aside"):
                if rank() == 0:
                    aside = _quarantine_and_describe(place, files)
                    logger.warning("%s\n  %s: an older checkpoint is taken instead", error, aside)
        else:
            logger.info("loaded step %d from %s", manifest.step, files)
            if refused and rank() == 0:
                logger.warning("went back to %s, since %s cannot be used", files, ", ".join(refused))
            return True
    raise AssertionError("the loop ends by itself")


def _check_attempts_left(attempt: int, place: location.CheckpointLocation) -> None:
    if attempt == _TRIES:
        raise CheckpointError(
            f"{place} changes faster than it can be read.",
            got=f"{attempt} checkpoints, each removed while it was read",
            fix="let the run that saves there keep more checkpoints (checkpoint.keep)",
        )


def _is_removed_or_replaced(
    place: location.CheckpointLocation, files: CheckpointFiles, *, manifest: Manifest
) -> bool:
    """Returns whether a checkpoint that was found in `place` was removed or replaced since.

    A checkpoint that is `place` itself never counts as removed.
    """
    if files.name == place.root_as_checkpoint().name:
        return False
    try:
        return not location.is_checkpoint_listed(place, files) or read_manifest(files) != manifest
    except CheckpointError:
        return not location.is_checkpoint_listed(place, files)


def resolve_checkpoint(
    directory: str | Path | location.CheckpointLocation,
) -> tuple[CheckpointFiles, Manifest]:
    """Returns the checkpoint `directory`, or the newest complete one in it, or raises CheckpointError."""
    with os_errors_as_checkpoint_errors(f"{directory} cannot be read."):
        found = _find_newest_checkpoint(location.location_of(directory), missing_ok=False, refused={})
    assert found is not None, "missing_ok is False"
    return found


def call_with_newest_checkpoint(
    directory: str | Path | location.CheckpointLocation, act: Callable[[CheckpointFiles, Manifest], T]
) -> T:
    """Returns `act(files, manifest)` of the checkpoint that `resolve_checkpoint` returns.

    Repeats this if the checkpoint is removed meanwhile. See [Note: a reader beside a writer].
    """
    place = location.location_of(directory)
    for attempt in itertools.count(1):
        files, manifest = resolve_checkpoint(place)
        try:
            return act(files, manifest)
        except CheckpointError:
            if not _is_removed_or_replaced(place, files, manifest=manifest):
                raise
            _check_attempts_left(attempt, place)
    raise AssertionError("the loop ends by itself")


def _load_checkpoint(state: Checkpointable, files: CheckpointFiles, *, manifest: Manifest) -> None:
    doing = f"loading {files}"
    read_index = partial(read_verified_file, files, manifest, name=SHARDS)
    index = run_on_rank_zero(read_index, doing=doing)  # for all: they would read the same bytes
    with raise_on_all_ranks(doing):
        receivers = state.load_targets(manifest.tensors)
        saved = {name: tensor for name, tensor in manifest.tensors.items() if name in receivers}
        check_same_tensors(receivers, saved)
        reader = CheckpointReader(files, manifest)
        reader.read_index(index)
    with raise_on_all_ranks(doing):
        reader.read_tensors(receivers)
    if isinstance(state, StateLoadedInPortions):
        portions = state.iterate_load_targets(manifest.tensors)
        while (portion := run_on_all_ranks(lambda: next(portions, None), doing=doing)) is not None:
            with raise_on_all_ranks(doing):
                reader.read_tensors(portion)
    with raise_on_all_ranks(doing):
        state.load_values(manifest.values_with_run, receivers)


def _quarantine_and_describe(place: location.CheckpointLocation, files: CheckpointFiles) -> str:
    try:
        return f"renamed to {place.quarantine(files)}"
    except OSError as error:  # a read-only location
        return f"it could not be renamed ({error.strerror})"


def _find_newest_checkpoint(
    place: location.CheckpointLocation, *, missing_ok: bool, refused: Mapping[str, str]
) -> tuple[CheckpointFiles, Manifest] | None:
    """Returns `place` if it is a checkpoint, else the newest complete one in it that is not `refused`."""
    # Listed before the search, so that what a run commits during it does not count as damaged.
    listed = [files.name for _, files in place.list_checkpoints()]
    # A directory that contains steps is not a checkpoint itself, whatever other files it contains.
    if place.exists() and not listed:
        files = place.root_as_checkpoint()
        manifest = _read_manifest_if_checkpoint(files, unrelated_manifest_ok=missing_ok)
        if manifest is not None:
            return files, manifest
    for files, manifest in location.iterate_complete_checkpoints(place):
        if files.name not in refused:
            return files, manifest
    others = [name for name in listed if name not in refused]
    if broken := [*refused.values(), *others] or place.list_quarantined():
        raise CheckpointError(
            f"none of the checkpoints in {place} is whole.",
            got=", ".join(broken),
            why="a run with checkpoints does not start over by itself",
            fix="another copy of them; or another directory, to start over",
        )
    if missing_ok:
        return None
    there = "an empty directory" if place.exists() else "no such directory"
    raise CheckpointError(
        f"no checkpoint in {place}.",
        got=join_names(place.describe_drafts()) or there,
        fix="the directory that holds the step-… directories, or one of these",
    )


def _read_manifest_if_checkpoint(files: CheckpointFiles, *, unrelated_manifest_ok: bool) -> Manifest | None:
    """Returns the manifest if `files` are those of one checkpoint, else None.

    Raises CheckpointError if the checkpoint is damaged. If `unrelated_manifest_ok`, and there are no shards,
    a damaged manifest counts as an unrelated file of the same name.
    """
    names = files.file_sizes_bytes()
    if MANIFEST not in names and METADATA not in names:
        return None
    try:
        manifest = read_manifest(files)
    except DamagedCheckpointError:
        if unrelated_manifest_ok and not any(name.endswith(".distcp") for name in names):
            return None
        raise
    check_file_sizes(files, manifest)
    return manifest


@dataclass(frozen=True)
class Damage:
    """Damage to one file of a checkpoint.

    file: name of the file
    what: difference from the saved file
    tensors: names of the affected tensors; all names if it cannot be known which are affected
    """

    file: str
    what: str
    tensors: tuple[str, ...]


def find_damage(files: CheckpointFiles, *, part: tuple[int, int] = (1, 1)) -> list[Damage] | None:
    """Returns the damage that `iterate_damage` yields; None if the checkpoint was removed.

    Then neither its manifest nor any data file is left.
    """
    found = list(iterate_damage(files, part=part))
    is_left = not found or any(n == MANIFEST or n.endswith(".distcp") for n in sizes_by_name(files))
    return found if is_left else None


def iterate_damage(
    checkpoint: CheckpointFiles | str | Path, *, part: tuple[int, int] = (1, 1)
) -> Iterator[Damage]:
    """Reads every byte of a checkpoint, and yields each damage: altered, missing and additional files.

    If the manifest is damaged, yields that alone. Raises CheckpointError if the checkpoint cannot be read at
    all (permissions, another format).

    part: (number from 1, of how many): reads the index and these data files alone; the first part also reads
        all other files
    """
    files = checkpoint_files_at(checkpoint)
    try:
        manifest = read_manifest(files)
    except DamagedCheckpointError as error:
        yield Damage(MANIFEST, _damage_text_in_error(error, MANIFEST), ())
        return
    reader, sizes = CheckpointReader(files, manifest), sizes_by_name(files)
    number, parts = part
    part_of = {name: i % parts + 1 for i, name in enumerate(manifest.data_file_names)}
    for name in manifest.files:
        if part_of.get(name.removesuffix(SUFFIX), 1) == number:
            yield from _iterate_file_damage(reader, name, sizes=sizes)
    for name in sorted(set(sizes) - set(manifest.files) - {MANIFEST, WRITER}) if number == 1 else ():
        yield Damage(name, "not of this checkpoint", ())


def _iterate_file_damage(
    reader: CheckpointReader, name: str, *, sizes: Mapping[str, int]
) -> Iterator[Damage]:
    saved = reader.manifest.files[name]
    if sizes.get(name) != saved.size_bytes:
        found = f"{sizes[name]} bytes" if name in sizes else missing_file_reason(reader.files, name)
        yield Damage(name, f"{found}; {saved.size_bytes} were saved", _affected_tensors(reader, name))
        return
    try:
        if name in reader.manifest.data_file_names:
            yield from _iterate_data_file_damage(reader, name)
        elif name.endswith(SUFFIX):
            reader.read_table(name.removesuffix(SUFFIX))
        elif name == SHARDS:
            reader.read_index()
        else:
            read_verified_file(reader.files, reader.manifest, name=name)
    except CheckpointError as error:
        yield Damage(name, _damage_text_in_error(error, name), _affected_tensors(reader, name))


def _iterate_data_file_damage(reader: CheckpointReader, name: str) -> Iterator[Damage]:
    """Yields damaged pieces, and shards that only the index has. Raises CheckpointError for other damage."""
    try:
        table = reader.read_table(name)
    except CheckpointError:
        if reader.manifest.files[name].digest_begin:
            raise
        return  # a table beside it is reported as a file of its own
    with suppress(CheckpointError):  # an unreadable index is reported as a file of its own
        if absent := reader.list_tensors_in_file(name, absent=True):
            yield Damage(SHARDS, f"it lists shards that are not in {name}", tuple(absent))
    scratch = memoryview(bytearray(table.block_bytes))
    with reader.open_data_file(name) as file:
        end = 0
        for piece in table.pieces:
            try:
                begin, end = end, piece.offset + piece.length
                verify_piece(file, piece, begin=begin, scratch=scratch)
            except DamagedCheckpointError as error:
                yield Damage(name, _damage_text_in_error(error, name), (piece.name,))


def _damage_text_in_error(error: CheckpointError, name: str) -> str:
    return str(error.got or error.what).removeprefix(f"{name}: ")


def _affected_tensors(reader: CheckpointReader, name: str) -> tuple[str, ...]:
    """Returns the tensors that damage of the file `name` may affect; all if the index is unreadable."""
    data_file = name.removesuffix(SUFFIX)
    if data_file not in reader.manifest.data_file_names:
        return tuple(reader.manifest.tensors) if name == SHARDS else ()
    try:
        return tuple(reader.list_tensors_in_file(data_file))
    except CheckpointError:
        return tuple(reader.manifest.tensors)

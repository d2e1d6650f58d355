"""Verification of every byte of a checkpoint against its digest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files import WRITER, CheckpointFiles
from fullshard.checkpoint.manifest import (
    MANIFEST,
    SHARDS,
    checkpoint_files_at,
    missing_file_reason,
    read_failure_error,
    read_manifest,
    read_verified_file,
)
from fullshard.checkpoint.shard_file import SUFFIX, verify_padding, verify_piece
from fullshard.checkpoint.storage import DcpCheckpointReader
from fullshard.errors import CheckpointError, DamagedCheckpointError


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


def iterate_damage(checkpoint: CheckpointFiles | str | Path) -> Iterator[Damage]:
    """Reads every byte of a checkpoint, and yields each damage: altered, missing and additional files.

    Raises CheckpointError if the checkpoint cannot be read at all (permissions, another format).
    """
    files = checkpoint_files_at(checkpoint)
    try:
        manifest = read_manifest(files)
    except DamagedCheckpointError as error:
        yield Damage(MANIFEST, _damage_text_in_error(error, MANIFEST), ())
        return
    reader, sizes = DcpCheckpointReader(files, manifest), files.file_sizes_bytes()
    damaged = False
    for name in manifest.files_on_this_disk:
        for damaged in _iterate_file_damage(reader, name, sizes=sizes):
            yield damaged
    if not damaged:
        yield from _iterate_index_damage(reader)
    for name in sorted(set(sizes) - set(manifest.files) - {MANIFEST, WRITER}):
        yield Damage(name, "not of this checkpoint", ())


def _iterate_file_damage(
    reader: DcpCheckpointReader, name: str, *, sizes: Mapping[str, int]
) -> Iterator[Damage]:
    saved = reader.manifest.files[name]
    if sizes.get(name) != saved.size_bytes:
        found = f"{sizes[name]} bytes" if name in sizes else missing_file_reason(reader.files, name)
        yield Damage(name, f"{found}; {saved.size_bytes} were saved", _affected_tensors(reader, name))
        return
    if name in reader.manifest.data_file_names_on_this_disk:
        yield from _iterate_data_file_damage(reader, name)
        return
    try:
        read_verified_file(reader.files, reader.manifest, name=name)
    except CheckpointError as error:
        yield Damage(name, _damage_text_in_error(error, name), _affected_tensors(reader, name))


def _iterate_index_damage(reader: DcpCheckpointReader) -> Iterator[Damage]:
    """Yields the damage of an unreadable index, and of its shards that this disk's data files lack."""
    manifest = reader.manifest
    if manifest.layout == "ranks":
        return
    try:
        places = reader.read_metadata().storage_data
    except CheckpointError as error:
        yield Damage(SHARDS, _damage_text_in_error(error, SHARDS), tuple(manifest.tensors))
        return
    own = manifest.data_file_names_on_this_disk
    pieces = {(name, piece.offset): piece for name in own for piece in reader.read_table(name).pieces}
    for index, (name, offset) in places.items():
        piece, dtype = pieces.get((name, offset)), manifest.tensors[index.fqn].dtype
        wanted = (index.fqn, tuple(index.offset), dtype)
        if name in own and (piece is None or (piece.name, piece.index, piece.dtype) != wanted):
            yield Damage(SHARDS, f"{index.fqn} is not where the index has it", (index.fqn,))


def _iterate_data_file_damage(reader: DcpCheckpointReader, name: str) -> Iterator[Damage]:
    try:
        table = reader.read_table(name)
    except CheckpointError:
        return  # the damaged table is reported as a file of its own
    scratch = memoryview(bytearray(table.block_bytes))
    try:
        with reader.files.open_file(name) as file:
            end = 0
            for piece in table.pieces:
                try:
                    begin, end = end, piece.offset + piece.length
                    verify_padding(file, piece, begin=begin)
                    verify_piece(file, piece, scratch=scratch)
                except DamagedCheckpointError as error:
                    yield Damage(name, _damage_text_in_error(error, name), (piece.name,))
    except OSError as error:
        explained = read_failure_error(error, f"{reader.files} cannot be read.", name=name)
        yield Damage(name, _damage_text_in_error(explained, name), _affected_tensors(reader, name))


def _damage_text_in_error(error: CheckpointError, name: str) -> str:
    """Returns the description of the damage in an error, without the file name at its start."""
    return str(error.got or error.what).removeprefix(f"{name}: ")


def _affected_tensors(reader: DcpCheckpointReader, name: str) -> tuple[str, ...]:
    """Returns the tensors in the data file `name`, or in that of the table `name`; all for the index."""
    data_file = name.removesuffix(SUFFIX)
    if data_file not in reader.manifest.data_file_names_on_this_disk:
        return tuple(reader.manifest.tensors) if name == SHARDS else ()
    try:
        return tuple(dict.fromkeys(piece.name for piece in reader.read_table(data_file).pieces))
    except CheckpointError:
        return tuple(reader.manifest.tensors)

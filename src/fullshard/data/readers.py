"""Reads files into records. Files are cut into parts that are read independently."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from fullshard.data.files import unreadable_path_error
from fullshard.errors import DataError, MissingExtraError
from fullshard.spec.data_section import DataSourceFields

SHARD_BYTES = 1 << 20
"""Approximate size of a part: large enough to be worth a message to a worker, small enough for balance."""

_ROWS_AT_ONCE = 1000

FileKind = Literal["text", "jsonl", "parquet"]
Kind = FileKind | Literal["datasets"]


@dataclass(frozen=True)
class FilePart:
    """A part of a file, from `begin` to before `end`.

    path: the file, or the dataset's directory; empty for a dataset that is loaded by name
    begin, end: bytes of text or jsonl, row groups of parquet, or rows of a dataset
    size: approximate size, bytes
    last: whether this is the last part of the file
    """

    kind: Kind
    path: str
    begin: int
    end: int
    size: int
    last: bool


@dataclass(frozen=True)
class TextRecord:
    """A document, or a part of one.

    value: the text, or a dict of the row's fields
    where: returns the record's location for messages
    begins, ends: whether the document begins and ends with this record
    """

    value: Any
    where: Callable[[], str]
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class CorruptRecord:
    """A record that cannot be read: `where` returns its location, and `why` is the reason."""

    where: Callable[[], str]
    why: str


def split_file_into_parts(kind: FileKind, path: Path, *, size: int) -> list[FilePart]:
    """Cuts `path`, of `size` bytes, into parts of about SHARD_BYTES; parquet into its row groups.

    Raises DataError for a broken parquet file.
    """
    if kind == "parquet":
        groups = open_parquet_file(path).metadata.num_row_groups
        return [FilePart(kind, str(path), i, i + 1, size // groups, i == groups - 1) for i in range(groups)]
    if path.suffix == ".gz":  # gzip cannot be read from the middle
        return [FilePart(kind, str(path), 0, size, size, last=True)]
    cuts = [*range(0, size, SHARD_BYTES), size]
    return [
        FilePart(kind, str(path), begin, end, end - begin, end == size)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]


def read_records(shard: FilePart, fields: DataSourceFields) -> Iterator[TextRecord | CorruptRecord]:
    """Yields the records of a part of a file, in order."""
    if shard.kind in ("text", "jsonl"):
        return (_read_part_as_one_text if shard.kind == "text" else _read_json_lines)(shard)
    return (_read_parquet_rows if shard.kind == "parquet" else _read_dataset_rows)(shard, fields)


def check_reader_installed(kind: str) -> None:
    """Raises MissingExtraError if the package that reads files of `kind` is not installed."""
    package = {"parquet": "pyarrow", "datasets": "datasets"}.get(kind)
    if package is not None and find_spec(package) is None:
        raise MissingExtraError("data", package=package, needed_for=f'data.source = "{kind}"')


def absent_field_error(name: str, there: Sequence[str], *, where: str) -> DataError:
    """Returns the error for a row at `where` that lacks the field `name` and has the fields `there`."""
    return DataError(
        f"there is no field {name!r} in {where}.",
        got=f"the fields {', '.join(there) or '(none)'}",
        fix="the one that is meant as data.text_field (messages_field, prompt_field, completion_field), "
        "and data.records = what a row is",
    )


def required_field_names(fields: DataSourceFields) -> list[str]:
    """Returns the names of the fields that are read from a row."""
    return {
        "messages": [fields.messages_field],
        "completion": [fields.prompt_field, fields.completion_field],
        "text": [fields.text_field],
    }[fields.records]


def _check_columns(names: Sequence[str], there: Sequence[str], *, where: str) -> None:
    """Raises DataError if a field of `names` is not among the columns `there`."""
    for name in names:
        if name not in there:
            raise absent_field_error(name, there, where=where)


def open_parquet_file(path: Path) -> Any:
    """Opens `path` as a pyarrow.parquet.ParquetFile. Raises MissingExtraError, DataError."""
    check_reader_installed("parquet")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except OSError as error:
        raise unreadable_path_error(path, error) from error
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file.", got=str(error).splitlines()[0]) from error


def open_dataset(path: str, fields: DataSourceFields) -> Any:
    """Opens a `datasets.Dataset` from the directory `path`, which `save_to_disk` wrote.

    If `path` is empty, loads the dataset `fields.name` by name. Raises MissingExtraError; DataError for a
    dataset that is absent or lacks the split.
    """
    check_reader_installed("datasets")
    import datasets

    try:
        if not path:
            name = fields.name or ""
            return datasets.load_dataset(name, fields.subset, split=fields.split, trust_remote_code=False)
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the dataset {path or fields.name!r} cannot be loaded.",
            got=(str(error).splitlines() or [type(error).__name__])[0],
            why=None if path else "by name it is looked up in this machine's cache, and online if allowed",
            fix="a directory that save_to_disk wrote" if path else "data.split, or a download beforehand",
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if fields.split not in found:
        raise DataError(
            f"{path} has no split {fields.split!r}.",
            got=f"the splits {', '.join(map(str, found))}",
            fix="data.split = one of them",
        )
    return found[fields.split]


def _read_part_as_one_text(shard: FilePart) -> Iterator[TextRecord | CorruptRecord]:
    """Yields the lines that begin within the part, as one piece of the file's single document."""
    data, skipped = _read_block_of_whole_lines(shard)
    begins, text = shard.begin == 0, ""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        at = shard.begin + skipped + error.start
        yield CorruptRecord(lambda: f"{shard.path} at byte {at}", f"no UTF-8: {error.reason}")
        if begins and shard.last:
            return
    yield TextRecord(text, lambda: shard.path, begins=begins, ends=shard.last)


def _read_json_lines(shard: FilePart) -> Iterator[TextRecord | CorruptRecord]:
    data, skipped = _read_block_of_whole_lines(shard)
    begin = shard.begin + skipped
    for line in data.split(b"\n"):
        where = partial(_format_line_location, shard.path, begin)
        begin += len(line) + 1
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # invalid JSON, invalid Unicode, or nested too deep
            yield CorruptRecord(where, f"no JSON: {error}")
            continue
        if isinstance(value, dict):
            yield TextRecord(value, where)
        else:
            yield CorruptRecord(where, f"no object of fields, but {type(value).__name__}")


def _read_parquet_rows(shard: FilePart, fields: DataSourceFields) -> Iterator[TextRecord | CorruptRecord]:
    import pyarrow

    file, row = open_parquet_file(Path(shard.path)), 0
    names = required_field_names(fields)
    _check_columns(names, file.schema_arrow.names, where=shard.path)
    place = f"{shard.path} row group {shard.begin}"
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[shard.begin], columns=names):
            for value in batch.to_pylist():
                yield TextRecord(value, lambda row=row: f"{place} row {row}")
                row += 1
    except (OSError, pyarrow.ArrowException) as error:
        yield CorruptRecord(lambda: place, str(error).splitlines()[0])


def _read_dataset_rows(shard: FilePart, fields: DataSourceFields) -> Iterator[TextRecord]:
    dataset, name = open_dataset(shard.path, fields), shard.path or fields.name
    names = required_field_names(fields)
    _check_columns(names, dataset.column_names, where=str(name))
    rows = range(shard.begin, shard.end)
    for row, value in zip(rows, dataset.select_columns(names).select(rows), strict=True):
        yield TextRecord(value, lambda row=row: f"{name} row {row}")


def _read_block_of_whole_lines(shard: FilePart) -> tuple[bytes, int]:
    """Returns (whole lines that begin within the part, number of bytes before them of an earlier line)."""
    path = Path(shard.path)
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(), 0
        with path.open("rb") as file:
            skipped = 0
            if shard.begin:
                file.seek(shard.begin - 1)
                skipped = len(file.readline()) - 1
            count = shard.end - shard.begin - skipped
            if count <= 0:  # the part lies within one long line
                return b"", skipped
            data = file.read(count)
            if len(data) < count:
                raise DataError(f"{path} changed while it was read.", got=f"{count - len(data)} bytes fewer")
            return (data if data.endswith(b"\n") else data + file.readline()), skipped
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read.", got=str(error)) from error


def _format_line_location(path: str, begin: int) -> str:
    """Returns path and number (from 1) of the line that begins at byte `begin`, for messages."""
    opened = cast(Any, gzip.open if path.endswith(".gz") else open)
    lines, left = 1, begin
    with opened(path, "rb") as file:
        while left and (block := file.read(min(left, SHARD_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{path} line {lines}"

"""Reads files into records. Files are cut into parts that are read independently."""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, BinaryIO, Literal, NamedTuple

from fullshard.data import files
from fullshard.data.conversation import drop_null_members
from fullshard.data.row_fields import UntokenizableRecordError, find_arrow_columns_to_read
from fullshard.data.worker import call_in_worker
from fullshard.errors import DataError, MissingExtraError
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.small_files import ForeignErrorTranslator

SHARD_BYTES = 1 << 20
"""Approximate size of a part: large enough to be worth a message to a worker, small enough for balance."""

TEXT_CHARACTERS = 1 << 18
"""Approximate size of a part of a long text: a tokenizer takes up to 450 bytes of memory for each byte."""

_ROWS_AT_ONCE, _BYTES_AT_ONCE, _PIECE_BYTES = 1000, 32 << 20, 128 << 20
_UNCUT_CHARACTERS, _LINE_CHARACTERS = 1 << 20, 1 << 14  # a text in one part is tokenized in half the time
# Around a part of a text, so that it is tokenized as within the text: a tokenizer may join blanks of two
# lines, or put a blank before the first word.
_CONTEXT_CHARACTERS = 256
_BLANK = re.compile(r"\s")

RecordKind = Literal["text", "jsonl", "parquet"]
Kind = RecordKind | Literal["json_array", "datasets"]
_Row = Mapping[str, Any] | UntokenizableRecordError


@dataclass(frozen=True)
class FilePart:
    """A part of a file, from `begin` to before `end`.

    path: the file, or the dataset's directory; empty for a dataset that is loaded by name
    begin, end: bytes of text or jsonl, row groups of parquet, or rows of a dataset; a compressed file and a
        JSON array have one part
    size: approximate size, bytes
    last: whether this is the last part of the file
    """

    kind: Kind
    path: str
    begin: int
    end: int
    size: int
    last: bool


class SourceRecord(NamedTuple):
    """A row of a source: a document, or a part of one.

    value: the text, a dict of the row's fields, or the error for a record that cannot be read
    where: returns the record's location for messages
    begins, ends: whether the document begins and ends with this record
    context: number of characters at the beginning and at the end of the text that belong to other records
    first_trained: index of the first character of the text that is trained on
    """

    value: Any
    where: Callable[[], str]
    begins: bool = True
    ends: bool = True
    context: tuple[int, int] = (0, 0)
    first_trained: int = 0


def split_file(kind: RecordKind, file: files.SourceFile) -> list[FilePart]:
    """Cuts `file` into parts of about SHARD_BYTES; parquet into its row groups.

    A compressed file or a JSON array stays one part. Raises DataError for a broken parquet file. See
    `check_reader_installed`.
    """
    path, size = file.path, file.size
    if kind == "parquet":
        (groups,) = call_in_worker(partial(_count_row_groups, path), what=f"{path} cannot be read.")
        return [FilePart(kind, path, i, i + 1, size // groups, i == groups - 1) for i in range(groups)]
    is_array = kind == "jsonl" and _is_json_array(path)
    if is_array or files.is_compressed(path):  # cannot be read from the middle
        return [FilePart("json_array" if is_array else kind, path, 0, size, size, last=True)]
    cuts = [*range(0, size, SHARD_BYTES), size]
    return [
        FilePart(kind, path, begin, end, end - begin, end == size)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]


def _count_row_groups(path: str) -> list[int]:
    return [open_parquet_file(path).metadata.num_row_groups]


def read_records(part: FilePart, fields: DataSourceFields) -> Iterator[SourceRecord]:
    """Yields the records of a part of a file, in order."""
    match part.kind:
        case "text":
            return _read_part_as_one_text(part)
        case "jsonl":
            return _read_json_lines(part)
        case "json_array":
            return _read_json_array(part)
        case "parquet":
            return _read_parquet_rows(part, fields)
        case "datasets":
            return _read_dataset_rows(part, fields)


def cut_text(record: SourceRecord, *, in_context: bool) -> Iterator[SourceRecord]:
    """Yields the parts of a text, with characters around each if `in_context`; a short text as one part.

    A part ends with a line, or in a long line with a word. A word is never cut.
    """
    text, (first, after) = record.value, record.context
    if len(text) <= _UNCUT_CHARACTERS and (in_context or not (first or after)):
        yield record
        return
    begin, stop, context = first, len(text) - after, _CONTEXT_CHARACTERS if in_context else 0
    while begin < stop:
        least = begin + TEXT_CHARACTERS
        line = text.find("\n", least, min(least + _LINE_CHARACTERS, stop)) + 1
        end = line or next((blank.end() for blank in _BLANK.finditer(text, least, stop)), stop)
        before, behind = max(begin - context, 0), min(end + context, len(text))
        yield record._replace(
            value=text[before:behind],
            begins=record.begins and begin == first,
            ends=record.ends and end == stop,
            context=(begin - before, behind - end),
            first_trained=max(record.first_trained - before, 0),
        )
        begin = end


def check_reader_installed(kind: str) -> None:
    """Raises MissingExtraError if the package that reads files of `kind` is not installed."""
    package = {"parquet": "pyarrow", "datasets": "datasets"}.get(kind)
    if package is not None and find_spec(package) is None:
        raise MissingExtraError("data", package=package, needed_for=f'data.source = "{kind}"')


def open_parquet_file(path: str) -> Any:
    """Opens `path` as a pyarrow.parquet.ParquetFile. Raises DataError if it cannot be read as one."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=SHARD_BYTES)  # not a column of a group at once
    except OSError as error:
        raise files.unreadable_path_error(path, error) from error
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file.", got=str(error).splitlines()[0]) from error


def open_dataset(path: str, fields: DataSourceFields) -> Any:
    """Opens a `datasets.Dataset` from the directory `path`, which `save_to_disk` wrote.

    If `path` is empty, loads the dataset `fields.name` by name. Raises DataError for a dataset that is absent
    or lacks the split.
    """
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
        if fields.split not in ("train", str(found.split)):
            raise DataError(
                f"{path} is a dataset without splits.",
                got=f"data.split = {fields.split!r}",
                why="it would be read whole",
                fix="data.split left out, or a directory that DatasetDict.save_to_disk wrote",
            )
        return found
    if fields.split not in found:
        raise DataError(
            f"{path} has no split {fields.split!r}.",
            got=f"the splits {', '.join(map(str, found))}",
            fix="data.split = one of them",
        )
    return found[fields.split]


def _read_part_as_one_text(part: FilePart) -> Iterator[SourceRecord]:
    """Yields the part's lines as one piece of the file's document, or an error and an empty piece."""
    before = after = text = ""
    with files.open_source_file(part.path) as file:
        if files.is_compressed(part.path):
            data, begin = _read(file.read, part.path), 0
        else:
            data, begin = _read_lines_beginning_in_part(file, part)
            behind = begin + len(data)
            before = _read_text_without_cut_characters(file, max(begin - _CONTEXT_CHARACTERS, 0), end=begin)
            after = _read_text_without_cut_characters(file, behind, end=behind + _CONTEXT_CHARACTERS)
    begins = part.begin == 0
    try:
        text = data.decode("utf-8-sig" if begins else "utf-8")
    except UnicodeDecodeError as error:
        at = begin + error.start
        why = UntokenizableRecordError(f"no UTF-8: {error.reason}")
        yield SourceRecord(why, lambda: f"{part.path} at byte {at}")
        if begins and part.last:
            return
    context = (len(before), len(after)) if text else (0, 0)
    text = f"{before}{text}{after}" if text else ""
    yield SourceRecord(text, lambda: part.path, begins=begins, ends=part.last, context=context)


def _read_json_lines(part: FilePart) -> Iterator[SourceRecord]:
    for begin, line in _iterate_lines(part):
        if not line.strip():
            continue
        try:
            value = _object_or_error(json.loads(line))
        except (ValueError, RecursionError) as error:  # invalid JSON, invalid Unicode, or nested too deep
            spread = "; an object has to be in one line" if line.strip() == b"{" else ""
            value = UntokenizableRecordError(f"no JSON: {error}{spread}")
        yield SourceRecord(value, partial(_format_line_location, part.path, begin))


def _read_json_array(part: FilePart) -> Iterator[SourceRecord]:
    with files.open_source_file(part.path) as file:
        try:
            values = json.loads(_read(file.read, part.path))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{part.path} is not a JSON array of objects.",
                got=str(error),
                fix="a file that is whole, or one object per line",
            ) from error
    for number, value in enumerate(values, start=1):
        yield SourceRecord(_object_or_error(value), lambda number=number: f"{part.path} element {number}")


def _object_or_error(value: Any) -> _Row:
    if isinstance(value, dict):
        return value
    return UntokenizableRecordError(f"no object of fields, but {type(value).__name__}")


def _read_parquet_rows(part: FilePart, fields: DataSourceFields) -> Iterator[SourceRecord]:
    import pyarrow

    file, row = open_parquet_file(part.path), 0
    place = f"{part.path} row group {part.begin}"

    def read_first_row() -> Mapping[str, Any]:
        batch = next(file.iter_batches(1), None)
        row = None if batch is None else next(_iterate_arrow_rows(batch, None))
        return row if isinstance(row, Mapping) else dict.fromkeys(file.schema_arrow.names)

    group = file.metadata.row_group(part.begin)
    at_once = min(_BYTES_AT_ONCE * max(group.num_rows, 1) // max(group.total_byte_size, 1) + 1, _ROWS_AT_ONCE)
    try:
        schema = file.schema_arrow
        paths = find_arrow_columns_to_read(schema, fields, where=part.path, first_row=read_first_row)
        columns = [".".join(path) for path in paths.values()]
        for batch in file.iter_batches(at_once, row_groups=[part.begin], columns=columns):
            for value in _iterate_arrow_rows(batch, paths if fields.records == "tokens" else None):
                yield _record_of_row(value, lambda row=row: f"{place} row {row}", fields=fields)
                row += 1
    except FileNotFoundError as error:
        raise files.unreadable_path_error(part.path, error) from error
    except (OSError, pyarrow.ArrowException) as error:
        yield SourceRecord(UntokenizableRecordError(str(error).splitlines()[0]), lambda: place)


def _iterate_arrow_rows(batch: Any, paths: Mapping[str, Sequence[str]] | None) -> Iterator[_Row]:
    """Yields the rows of a pyarrow.RecordBatch; the error in place of a row that cannot be decoded.

    paths: if given, the rows have the fields at these paths, by name, and lists of numbers are arrays
    """
    try:
        with ForeignErrorTranslator(UntokenizableRecordError):
            rows: list[Any] = batch.to_pylist() if paths is None else _rows_with_lists_as_arrays(batch, paths)
        yield from rows
    except UntokenizableRecordError as error:
        if len(batch) == 1:
            yield error
            return
        for i in range(len(batch)):
            yield from _iterate_arrow_rows(batch.slice(i, 1), paths)


def _rows_with_lists_as_arrays(batch: Any, paths: Mapping[str, Sequence[str]]) -> list[Any]:
    import pyarrow.compute

    kinds, columns = (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray), list[Any]()
    for head, *inner in paths.values():
        column: Any = batch.column(head)
        column = pyarrow.compute.struct_field(column, inner) if inner else column  # pyright: ignore
        # With a null in any list, numpy would have floats in all.
        is_whole = isinstance(column, kinds) and not column.flatten().null_count
        columns.append(column.to_numpy(zero_copy_only=False) if is_whole else column.to_pylist())
    return [dict(zip(paths, values, strict=True)) for values in zip(*columns, strict=True)]


def _read_dataset_rows(part: FilePart, fields: DataSourceFields) -> Iterator[SourceRecord]:
    dataset, name = open_dataset(part.path, fields), part.path or fields.name
    schema = dataset.features.arrow_schema
    paths = find_arrow_columns_to_read(schema, fields, where=str(name), first_row=lambda: dataset[0])
    selected, row = dataset.select_columns(list({path[0]: None for path in paths.values()})), part.begin
    while row < part.end:
        try:
            with ForeignErrorTranslator(UntokenizableRecordError):  # `datasets` decodes as it iterates
                for value in selected.select(range(row, part.end)):
                    row += 1
                    yield _record_of_row(value, lambda row=row: f"{name} row {row - 1}", fields=fields)
        except UntokenizableRecordError as error:
            row += 1
            yield _record_of_row(error, lambda row=row: f"{name} row {row - 1}", fields=fields)


def _record_of_row(value: _Row, where: Callable[[], str], *, fields: DataSourceFields) -> SourceRecord:
    if fields.records == "messages" and isinstance(value, Mapping):
        value = {name: drop_null_members(one) for name, one in value.items()}
    return SourceRecord(value, where)


def _iterate_lines(part: FilePart) -> Iterator[tuple[int, bytes]]:
    """Yields (byte at which the line begins, line) for the lines that begin within the part."""
    with files.open_source_file(part.path) as file:
        if files.is_compressed(part.path):
            begin = 0
            while line := _read(file.readline, part.path):
                yield begin, line
                begin += len(line)
            return
        data, begin = _read_lines_beginning_in_part(file, part)
    for line in data.split(b"\n"):
        yield begin, line
        begin += len(line) + 1


def _read_lines_beginning_in_part(file: BinaryIO, part: FilePart) -> tuple[bytes, int]:
    """Returns (whole lines that begin within the part, the byte at which the first of them begins)."""
    begin = part.begin
    if begin:
        file.seek(begin - 1)
        begin += len(_read(file.readline, part.path)) - 1
    count = part.end - begin
    if count <= 0:  # the part lies within one long line
        return b"", begin
    data = file.read(count)
    if len(data) < count:
        raise DataError(f"{part.path} changed while it was read.", got=f"{count - len(data)} bytes fewer")
    return (data if data.endswith(b"\n") else data + _read(file.readline, part.path)), begin


def _read(read: Callable[[int], bytes], path: str) -> bytes:
    """Returns a line or a whole file. Raises DataError if it is longer than _PIECE_BYTES."""
    if len(data := read(_PIECE_BYTES + 1)) > _PIECE_BYTES:
        fix = "shorter lines; a text that is not compressed; for an array, one object per line (jq -c '.[]')"
        raise DataError(f"{path} has {_PIECE_BYTES >> 20} MiB in a line, an array or a packed text.", fix=fix)
    return data


def _read_text_without_cut_characters(file: BinaryIO, begin: int, *, end: int) -> str:
    """Returns the text of some bytes of a file, without characters that are cut."""
    if end <= begin:
        return ""
    file.seek(begin)
    return file.read(end - begin).decode(errors="ignore")


def _is_json_array(path: str) -> bool:
    """Returns whether a file whose ending is .json, apart from its compression, begins with a bracket.

    Spark and others also write one object per line into .json files.
    """
    if not files.path_without_compression_suffix(path).endswith(".json"):
        return False
    with files.open_source_file(path) as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _format_line_location(path: str, begin: int) -> str:
    """Returns path and number (from 1) of the line that begins at byte `begin`, for messages."""
    lines, left = 1, begin
    with files.open_source_file(path) as file:
        while left and (block := file.read(min(left, SHARD_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{path} line {lines}"

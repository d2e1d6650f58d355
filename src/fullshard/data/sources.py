"""Opens the sources of a run as token stores, and tokenizes those that are not cached yet."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullshard.data import token_store
from fullshard.data.chat_template import read_chat_template
from fullshard.data.files import SourceFile, is_compressed, list_matching_files, list_stdlib_files
from fullshard.data.first_reading import FirstReading, report_progress
from fullshard.data.memmaps import open_memmap_stores
from fullshard.data.readers import SHARD_BYTES, FilePart, check_reader_installed, open_dataset, split_file
from fullshard.data.row_fields import TOKEN_LIMIT
from fullshard.data.tokenize import TokenizedTask, TokenizeSettings, tokenize_tasks
from fullshard.data.tokenizer import list_tokenizer_files, open_tokenizer_safely, read_tokenizer_text
from fullshard.data.worker import call_in_worker
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSection, DataSource, DataSourceFields
from fullshard.system.files import open_new_file
from fullshard.system.object_store import is_remote_url, without_secrets
from fullshard.system.process import count_usable_cores

IN_MEMORY_BYTES = 64 << 20
"""Without a tokenizer, uncompressed texts of at most this size together are encoded in memory, not cached."""

# Fields of a source that say where its rows are, which the content of the files stands for.
_LOCATION_FIELDS = {"paths", "validation_paths", "name", "subset", "split", "dtype", "eod_token"}

# Kind of records -> the part of it that is trained on if only answers are.
_ANSWERS: Mapping[str, Literal["assistant", "completion"]] = {
    "messages": "assistant",
    "completion": "completion",
}

Source = Literal["stdlib", "text", "jsonl", "parquet", "datasets", "memmap", "python"]
_TOKENS, _OFFSETS, _TRAINED = "tokens.bin", "offsets.npy", "trained.bin"


@dataclass(frozen=True)
class _FileSet:
    """The files of a source before they are read.

    name: name for display
    files: files whose contents determine the records
    split: returns the parts of all files, in order
    fingerprints: further text that determines the records
    """

    name: str
    kind: str
    files: Sequence[SourceFile]
    split: Callable[[], Sequence[FilePart]]
    fingerprints: Sequence[str] = ()

    @property
    def total_file_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def is_small_text(self) -> bool:
        """True for uncompressed texts that are few enough to be encoded as bytes at each start."""
        small = self.kind == "text" and self.total_file_bytes <= IN_MEMORY_BYTES
        return small and not any(is_compressed(file.path) for file in self.files)


def check_validation_files_are_apart(sources: Sequence[DataSource | DataSection]) -> None:
    """Raises DataError if a file of `validation_paths` is trained on, too."""
    named = [source.for_validation() for source in sources if source.validation_paths]
    validated, trained = (
        {
            os.path.realpath(file.path)
            for one in part
            if one.source in ("text", "jsonl", "parquet", "memmap")
            for file in list_matching_files(one.paths, kind=one.source)
        }
        for part in (named, sources if named else ())
    )
    if shared := validated & trained:
        raise DataError(
            f"{min(shared)} is in both the training and the validation data.",
            got=f"{len(shared)} files of data.validation_paths are among those of data.paths",
            fix="remove it from data.paths or data.validation_paths; a directory includes all its files",
        )


def open_token_stores(
    source: DataSource | DataSection, section: DataSection, *, root: Path, alive: token_store.Heartbeat
) -> list[token_store.TokenStore]:
    """Returns the token store of `source`, tokenized with the settings of `section`; one for each token file.

    They are cached in `root`, except for small byte text, see IN_MEMORY_BYTES, and the tokens of token files.
    Raises DataError for data that is absent, empty, corrupt, at a URL, or has no token that is trained on;
    MissingExtraError for a package that is not installed.
    """
    kind = source.source or "stdlib"
    fields = DataSourceFields(**{name: getattr(source, name) for name in DataSourceFields.model_fields})
    for path in fields.paths:
        if is_remote_url(path):
            raise DataError(
                f"data.paths does not take the URL {without_secrets(path)}.",
                why="files are read several times: for their digests, and by several processes",
                fix="a copy on a disk, or the bucket mounted as a directory; "
                'data.source = "datasets" and data.name for a dataset of the Hugging Face Hub',
            )
    if kind == "memmap":
        return open_memmap_stores(fields, root=root, alive=alive)
    check_reader_installed(kind)
    files = _list_dataset_files(fields) if kind == "datasets" else _list_source_files(kind, fields)
    # Before anything is read.
    tokenizer = open_tokenizer_safely(section.tokenizer, eos_token=section.eos_token)
    foreign = fields.records == "tokens"
    largest = (TOKEN_LIMIT if foreign and section.tokenizer is None else tokenizer.vocabulary_size) - 1
    settings = TokenizeSettings(
        fields=fields,
        tokenizer=section.tokenizer,
        eos_token=section.eos_token,
        train_on="all" if section.train_on == "all" else _ANSWERS.get(fields.records, "all"),
        on_error=section.on_error,
        dtype="uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "uint32",
        trust_remote_code=section.trust_remote_code,
        chat_template=section.chat_template,
    )
    vocabulary = None if foreign else tokenizer.vocabulary_size
    if section.tokenizer is None and files.is_small_text:
        tasks: list[TokenizedTask] = []
        offsets, facts = _tokenize_and_write(files, settings, processes=0, write=tasks.append)
        tokens = np.concatenate([task.tokens for task in tasks])
        facts |= {"vocabulary": vocabulary}
        store = token_store.make_token_store(files.name, None, tokens=tokens, offsets=offsets, facts=facts)
    else:
        reading = FirstReading(root, alive).reporting(files.files)
        digests = [*reading.digests(files.files), *files.fingerprints]
        key = token_store.cache_key({"files": digests, "kind": files.kind, **_settings_cache_facts(settings)})
        processes = section.processes or count_usable_cores()

        def write_token_files(draft: Path) -> Mapping[str, Any]:
            facts = _tokenize_into_draft(draft, files, settings=settings, processes=processes, alive=alive)
            return {**facts, "vocabulary": vocabulary or facts["largest"] + 1}

        entry = token_store.get_or_build_entry(root, f"tokens-{key}", build=write_token_files, alive=alive)
        store = _open_cached_store(entry, name=files.name)
    _check_has_trained_tokens(store, section)
    return [store]


def _open_cached_store(entry: Path, *, name: str) -> token_store.TokenStore:
    facts, trained = token_store.read_manifest(entry), entry / _TRAINED
    tokens = token_store.memory_map_numbers(entry / _TOKENS, facts["dtype"])
    offsets = np.load(entry / _OFFSETS, mmap_mode="r")
    store = token_store.make_token_store(name, entry.name, tokens=tokens, offsets=offsets, facts=facts)
    if not trained.exists():
        return store
    return replace(store, loss_mask=token_store.memory_map_numbers(trained, "uint8"))


def _check_has_trained_tokens(store: token_store.TokenStore, section: DataSection) -> None:
    """Raises DataError for a store without a document, or without a token that is trained on."""
    if not store.document_count:
        skipped, messages = store.notes.skipped, "; ".join(store.notes.skip_messages)
        raise DataError(
            f"there is no document in {store.name}.",
            got=f"{skipped} records left out: {messages}" if skipped else "files without a record",
            fix="data with documents, or another data.records",
        )
    if not store.trained_token_count:
        raise DataError(
            f"no token of {store.name} is trained on.",
            got=f"{len(store.tokens)} tokens, data.train_on = {section.train_on!r}",
            fix="data with answers to train on, or another data.train_on or data.roles",
        )


def _list_source_files(source: Source, fields: DataSourceFields) -> _FileSet:
    kind = "text" if source == "stdlib" else source
    assert kind in ("text", "jsonl", "parquet"), f"{kind} has no files that are cut into parts"
    files = list_stdlib_files() if source == "stdlib" else list_matching_files(fields.paths, kind=kind)
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return _FileSet(
        name=source if source == "stdlib" else f"{files[0].path.rpartition('/')[2]}{more}",
        kind=kind,
        files=files,
        split=lambda: [part for file in files for part in split_file(kind, file)],
    )


def _list_dataset_files(fields: DataSourceFields) -> _FileSet:
    name = fields.name or ", ".join(Path(path).name for path in fields.paths)
    what, find = f"the dataset {name} cannot be read.", partial(_list_dataset_parts, fields)
    parts, files, fingerprints = call_in_worker(find, what=what) if fields.paths else find()  # a download
    return _FileSet(name=name, kind="datasets", files=files, split=lambda: parts, fingerprints=fingerprints)


def _list_dataset_parts(fields: DataSourceFields) -> tuple[list[FilePart], list[SourceFile], list[str]]:
    """Returns (parts, files and fingerprints of a dataset)."""
    parts, files, fingerprints = list[FilePart](), list[SourceFile](), list[str]()
    for path in fields.paths or ("",):
        place = os.path.abspath(os.path.expanduser(path)) if path else ""
        dataset = open_dataset(place, fields)
        rows = len(dataset)
        paths = [Path(file["filename"]) for file in dataset.cache_files]
        own = [SourceFile(str(path), path.stat().st_size) for path in paths]
        files += own
        # The fingerprint covers operations since the files were written, such as a selection.
        fingerprints += [str(dataset._fingerprint), str(rows)]  # noqa: SLF001
        size = sum(file.size for file in own) or rows
        step = max(1, rows * SHARD_BYTES // max(size, 1))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            parts.append(FilePart("datasets", place, begin, end, size * (end - begin) // rows, end == rows))
    return parts, files, fingerprints


def _tokenize_into_draft(
    draft: Path, files: _FileSet, *, settings: TokenizeSettings, processes: int, alive: token_store.Heartbeat
) -> Mapping[str, Any]:
    """Tokenizes `files` into the directory `draft`, and returns the contents of its manifest."""
    with ExitStack() as stack:
        read_bytes, what = 0, f"tokenizing {files.name}"
        reporting = report_progress(what, files.total_file_bytes, count_bytes=lambda: read_bytes, alive=alive)
        tokens = stack.enter_context(open_new_file(draft / _TOKENS))
        trained = stack.enter_context(open_new_file(draft / _TRAINED)) if settings.needs_loss_mask else None

        def write_task_tokens(one: TokenizedTask) -> None:
            nonlocal read_bytes
            tokens.write(one.tokens.data)
            if trained is not None and one.loss_mask is not None:
                trained.write(one.loss_mask.data)
            reporting()
            read_bytes += one.size

        offsets, facts = _tokenize_and_write(files, settings, processes=processes, write=write_task_tokens)
    token_store.save_array(draft / _OFFSETS, offsets)
    if facts["trained"] == facts["tokens"]:
        (draft / _TRAINED).unlink(missing_ok=True)
    return {"source": files.name, "dtype": settings.dtype, "documents": len(offsets) - 1, **facts}


def _tokenize_and_write(
    files: _FileSet, settings: TokenizeSettings, *, processes: int, write: Callable[[TokenizedTask], None]
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Calls `write` for each task's tokens. Returns (boundaries of the non-empty documents, counts)."""
    ends, tokens, trained, largest = [np.zeros(1, dtype=np.int64)], 0, 0, -1
    notes = token_store.TokenizeNotes()
    for one in tokenize_tasks(_group_parts_into_tasks(files.split()), settings, processes=processes):
        write(one)
        ends.append(one.ends + tokens)
        tokens += one.tokens.size
        trained += one.tokens.size if one.loss_mask is None else int(one.loss_mask.sum())
        largest = max(largest, int(one.tokens.max(initial=0)))
        notes.add(one.notes)
    boundaries = np.concatenate(ends)
    offsets = np.unique(boundaries)
    notes.empty = len(boundaries) - len(offsets)
    notes.skip_messages = notes.skip_messages[:5]
    return offsets, {"tokens": tokens, "trained": trained, "largest": largest, **vars(notes)}


def _group_parts_into_tasks(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """Groups parts into tasks of about SHARD_BYTES, so that many small files make few tasks."""
    tasks, size = list[list[FilePart]](), 0
    for part in parts:
        if not tasks or size + part.size > SHARD_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(part)
        size += part.size
    return tasks


def _settings_cache_facts(settings: TokenizeSettings) -> Mapping[str, Any]:
    """Returns the data that determines the tokens: settings, tokenizer, library versions; not the files."""
    # Without pairs the facts lack the field, so that older caches stay valid.
    no_pairs = {"rejected_field"} if settings.fields.rejected_field is None else set[str]()
    facts: dict[str, Any] = {
        "version": 5,
        "fields": settings.fields.model_dump(mode="json", exclude=_LOCATION_FIELDS | no_pairs),
        "train_on": settings.train_on,
        "on_error": settings.on_error,
        "eos_token": settings.eos_token,
        "tokenizer": None,
    }
    if settings.tokenizer is not None:
        files = list_tokenizer_files(settings.tokenizer)
        if settings.trust_remote_code and settings.fields.records == "messages":
            files += sorted(files[0].parent.glob("*.py"))
        facts["tokenizer"] = [token_store.cache_key({"text": read_tokenizer_text(file)}) for file in files]
        facts["tokenizers"] = version("tokenizers")
    if settings.fields.records == "messages":
        facts["transformers"] = version("transformers")
        if settings.chat_template is not None:
            facts["chat_template"] = read_chat_template(settings.chat_template)
    return facts

"""Opens the sources of a run as token stores, and tokenizes those that are not cached yet.

[Note: entries, chunks and joins]
The tokens of a source are one entry of the cache. On one host, one rank makes it, while the others wait. In a
job on several hosts, the ranks divide the source into chunks. Each chunk is an entry, too, which one rank
makes. Then one rank joins the chunks: it copies them in order into the entry, and all ranks remove them. The
entry has the bytes that one host writes; a document may end in a later chunk, so chunks keep all their ends.

If a rank fails or dies, a rank that waits for its lock does its work. If all die, a start with as many ranks
per host continues with the complete chunks. If each host has a cache of its own, its ranks make all chunks.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullshard.data import token_store
from fullshard.data.chat_template import read_chat_template
from fullshard.data.files import SourceFile, is_compressed, list_matching_files, list_stdlib_files
from fullshard.data.first_reading import FirstReading, report_progress
from fullshard.data.memmaps import open_memmap_stores
from fullshard.data.readers import SHARD_BYTES, FilePart, check_reader_installed, open_dataset, split_file
from fullshard.data.row_fields import TOKEN_LIMIT
from fullshard.data.tokenize import Task, TokenizedTask, TokenizeSettings, tokenize_tasks
from fullshard.data.tokenizer import list_tokenizer_files, open_tokenizer_safely, read_tokenizer_text
from fullshard.data.worker import call_in_worker
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSection, DataSource, DataSourceFields
from fullshard.system.files import open_new_file
from fullshard.system.object_store import is_remote_url, without_secrets
from fullshard.system.process import count_cores_of_rank

T = TypeVar("T")
Facts = dict[str, Any]
Pieces = Iterable[TokenizedTask]
Chunk = tuple[str, Sequence[Task]]
"""(name of the entry of a chunk, its tasks)."""

IN_MEMORY_BYTES = 64 << 20
"""Without a tokenizer, uncompressed texts of at most this size together are encoded in memory, not cached."""

# Size and least tasks of the chunks that the ranks of a host make at once: a compressed file is one task.
_CHUNK_BYTES, _CHUNK_TASKS, _MOST_CHUNKS = 4 << 30, 64, 1024
_TOKENS, _OFFSETS, _TRAINED = "tokens.bin", "offsets.npy", "trained.bin"

# Fields of a source that say where its rows are, which the content of the files stands for.
_LOCATION_FIELDS = {"paths", "validation_paths", "name", "subset", "split", "dtype", "eod_token"}

# Kind of records -> the part of it that is trained on if only answers are.
_ANSWERS: Mapping[str, Literal["assistant", "completion"]] = {
    "messages": "assistant",
    "completion": "completion",
}

Source = Literal["stdlib", "text", "jsonl", "parquet", "datasets", "memmap", "python"]


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

    def list_tasks(self) -> list[list[FilePart]]:
        """Returns the parts in tasks of about SHARD_BYTES, so that many small files make few tasks."""
        return _group(self.split(), lambda part: part.size, most_bytes=SHARD_BYTES)


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
        vocabulary_size=None if foreign else tokenizer.vocabulary_size,
    )
    if section.tokenizer is None and files.is_small_text:
        tasks = [*tokenize_tasks(files.list_tasks(), settings, processes=0)]
        offsets, facts = _consume(tasks, settings)
        tokens = np.concatenate([task.tokens for task in tasks])
        store = token_store.make_token_store(files.name, None, tokens=tokens, offsets=offsets, facts=facts)
    else:
        digests = FirstReading(root, alive).reporting(files.files).digests(files.files)
        facts = {"files": [*digests, *files.fingerprints], "kind": files.kind}
        name = f"tokens-{token_store.cache_key(facts | _settings_cache_facts(settings))}"
        entry = _TokenEntry(name, files, settings, section.processes, root, alive)
        store = _open_cached_store(entry.find_or_make(), files.name)
    _check_has_trained_tokens(store, section)
    return [store]


def _open_cached_store(entry: Path, name: str) -> token_store.TokenStore:
    facts, trained = token_store.read_manifest(entry), entry / _TRAINED
    tokens = token_store.memory_map_numbers(entry / _TOKENS, facts["dtype"])
    offsets = np.load(entry / _OFFSETS, mmap_mode="r")
    store = token_store.make_token_store(name, entry.name, tokens=tokens, offsets=offsets, facts=facts)
    mask = token_store.memory_map_numbers(trained, "uint8") if trained.exists() else None
    return replace(store, loss_mask=mask)


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


@dataclass(frozen=True)
class _TokenEntry:
    """An entry of the cache with the tokens of a source. See [Note: entries, chunks and joins]."""

    name: str
    files: _FileSet
    settings: TokenizeSettings
    processes: int
    root: Path
    alive: token_store.Heartbeat

    def find_or_make(self) -> Path:
        """Returns the entry, after the chunks are removed. Ranks on several hosts make it together."""
        ranks, neighbours = token_store.count_ranks_of_job_and_node()
        find = partial(token_store.find_complete_entry, self.root / self.name)
        make = self._make_on_one_host
        if ranks > neighbours and find() is None and len(chunks := self._list_chunks(neighbours)) > 1:
            get_chunk = partial(self._with_progress_of_chunks(chunks)._get_chunk, unless=find)
            token_store.divide_by_rank(chunks, get_chunk, waits=True)
            make = partial(self._join, chunks)
        entry = token_store.get_or_build_entry(self.root, self.name, build=make, alive=self.alive)
        token_store.remove_entries(self.root, f"chunk-{self.name}-*")
        return entry

    def _make_on_one_host(self, draft: Path) -> Facts:
        return self._write(draft, self._tokenize(self.files.list_tasks(), ranks=1), doing="tokenizing")

    def _list_chunks(self, neighbours: int) -> list[Chunk]:
        """Returns the chunks of the source, which are smaller for more ranks per host."""
        most_bytes = max(_CHUNK_BYTES // neighbours, self.files.total_file_bytes // _MOST_CHUNKS)
        group = partial(_group, most_bytes=most_bytes, least_count=_CHUNK_TASKS // neighbours)
        groups = group(self.files.list_tasks(), lambda task: sum(part.size for part in task))
        return [(f"chunk-{self.name}-{neighbours}-{i}", tasks) for i, tasks in enumerate(groups)]

    def _with_progress_of_chunks(self, chunks: Sequence[Chunk]) -> "_TokenEntry":
        """Returns this entry, whose heartbeat on rank 0 also prints how long `chunks` will take all ranks."""
        what, total = f"tokenizing {self.files.name}", self.files.total_file_bytes

        def count_bytes() -> int:
            return total * sum((self.root / name).exists() for name, _ in chunks) // len(chunks)

        reporting = report_progress(what, total, count_bytes=count_bytes, alive=self.alive)
        return replace(self, alive=reporting) if os.environ.get("RANK") == "0" else self

    def _get_chunk(self, chunk: Chunk, waits: bool, *, unless: Callable[[], Any] = lambda: None) -> Path:
        """Returns the cache entry with the tokens of `chunk`. Tokenizes these if the entry does not exist.

        waits, unless: as for `get_or_build_entry`
        """
        name, tasks = chunk
        pieces = self._tokenize(tasks, ranks=token_store.count_ranks_of_job_and_node()[1])
        make = partial(self._write, pieces=pieces, doing="tokenizing", is_chunk=True)
        return token_store.get_or_build_entry(
            self.root, name, build=make, alive=self.alive, waits=waits, unless=unless
        )

    def _join(self, chunks: Sequence[Chunk], draft: Path) -> Facts:
        size = self.files.total_file_bytes // len(chunks)
        stores = (_open_cached_store(self._get_chunk(chunk, True), "") for chunk in chunks)
        pieces = (TokenizedTask(size, one.tokens, one.ends, one.loss_mask, one.notes) for one in stores)
        return self._write(draft, pieces, doing="joining the tokens of")

    def _tokenize(self, tasks: Sequence[Task], *, ranks: int) -> Pieces:
        """Yields the tokens of `tasks`, made by one rank's share of the host's processes."""
        share = self.processes // ranks if self.processes else int(count_cores_of_rank(ranks))
        return tokenize_tasks(tasks, self.settings, processes=max(share, 1))

    def _write(self, draft: Path, pieces: Pieces, *, doing: str, is_chunk: bool = False) -> Facts:
        """Writes `pieces` into the directory `draft`, and returns the contents of its manifest."""
        done, what, total = 0, f"{doing} {self.files.name}", self.files.total_file_bytes
        printing = report_progress(what, total, count_bytes=lambda: done, alive=self.alive)
        report = self.alive if is_chunk else printing  # see `_with_progress_of_chunks`
        with open_new_file(draft / _TOKENS) as tokens, open_new_file(draft / _TRAINED) as trained:

            def write(piece: TokenizedTask) -> TokenizedTask:
                nonlocal done
                tokens.write(piece.tokens.data)
                trained.write(b"" if piece.loss_mask is None else piece.loss_mask.data)
                report()
                done += piece.size
                return piece

            offsets, facts = _consume(map(write, pieces), self.settings, is_chunk=is_chunk)
        token_store.save_array(draft / _OFFSETS, offsets)
        if facts["trained"] == facts["tokens"] and not (is_chunk and self.settings.needs_loss_mask):
            (draft / _TRAINED).unlink()
        return {"source": self.files.name, "dtype": self.settings.dtype, **facts}


def _consume(
    pieces: Pieces, settings: TokenizeSettings, *, is_chunk: bool = False
) -> tuple[NDArray[np.int64], Facts]:
    """Consumes `pieces`. Returns (boundaries of documents, in a chunk also of empty ones; counts)."""
    ends, tokens, trained, largest = [np.zeros(1, dtype=np.int64)], 0, 0, -1
    notes = token_store.TokenizeNotes()
    for piece in pieces:
        ends.append(piece.ends + tokens)
        tokens += piece.tokens.size
        trained += piece.tokens.size if piece.loss_mask is None else int(piece.loss_mask.sum())
        largest = max(largest, int(piece.tokens.max(initial=0)))
        notes.add(piece.notes)
    boundaries = np.concatenate(ends)
    offsets = boundaries if is_chunk else np.unique(boundaries)
    notes.empty = len(boundaries) - len(offsets)
    notes.skip_messages = notes.skip_messages[:5]
    counts = {"documents": len(offsets) - 1, "tokens": tokens, "trained": trained, "largest": largest}
    return offsets, {**counts, **vars(notes), "vocabulary": settings.vocabulary_size or largest + 1}


def _group(
    items: Sequence[T], size_of: Callable[[T], int], *, most_bytes: int, least_count: int = 1
) -> list[list[T]]:
    """Returns groups of consecutive items: of at most `most_bytes`, or of one or `least_count` items."""
    groups, size = list[list[T]](), 0
    for item in items:
        if not groups or (size + size_of(item) > most_bytes and len(groups[-1]) >= least_count):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += size_of(item)
    return groups


def _settings_cache_facts(settings: TokenizeSettings) -> Facts:
    """Returns the data that determines the tokens: settings, tokenizer, library versions; not the files."""
    # Without pairs the facts lack the field, so that older caches stay valid.
    no_pairs = {"rejected_field"} if settings.fields.rejected_field is None else set[str]()
    facts: Facts = {
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

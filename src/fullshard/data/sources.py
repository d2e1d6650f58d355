"""Opens the sources of a run as token stores, and tokenizes those that are not cached yet."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullshard.data.cache import Heartbeat, digests, get_or_build, key_of
from fullshard.data.files import list_files, list_stdlib
from fullshard.data.memmaps import memmap_stores
from fullshard.data.progress import show_progress
from fullshard.data.readers import SHARD_BYTES, FilePart, open_dataset, require_reader, split_file
from fullshard.data.token_store import OFFSETS, TOKENS, TRAINED, TokenStore, open_entry
from fullshard.data.tokenize import TaskTokens, TokenizeSettings, tokenize_tasks
from fullshard.data.tokenizer import open_tokenizer, tokenizer_file, tokenizer_files, tokenizer_text
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSection, DataSource, SourceFields

IN_MEMORY_BYTES = 64 << 20
"""Text files of at most this size together are encoded as bytes in memory, and not cached."""

Source = Literal["stdlib", "text", "jsonl", "parquet", "datasets", "memmap", "python"]


@dataclass(frozen=True)
class _SourceFiles:
    """The files of a source before they are read.

    name: name for display
    parts: parts of all files, in order
    contents: returns digests of the contents
    """

    name: str
    kind: str
    parts: Sequence[FilePart]
    contents: Callable[[], list[str]]

    @property
    def size_bytes(self) -> int:
        return sum(part.size for part in self.parts)


def stores_of(
    source: DataSource | DataSection, section: DataSection, *, root: Path, alive: Heartbeat
) -> list[TokenStore]:
    """Returns the token stores of `source`, tokenized with the settings of `section`.

    They are cached in `root`, except for small byte text, see IN_MEMORY_BYTES. Raises DataError for data that
    is absent, empty, corrupt or does not hold tokens; MissingExtraError.
    """
    fields = SourceFields(**{name: getattr(source, name) for name in SourceFields.model_fields})
    if source.source == "memmap":
        return memmap_stores(fields, root=root, alive=alive)
    require_reader(source.source)
    find = _find_dataset if source.source == "datasets" else _find_files
    files = find(source.source, fields, root=root, alive=alive)
    tokenizer = open_tokenizer(section.tokenizer, eos_token=section.eos_token)  # before anything is read
    largest = tokenizer.vocabulary - 1
    settings = TokenizeSettings(
        fields=fields,
        tokenizer=section.tokenizer,
        eos_token=section.eos_token,
        train_on=section.train_on,
        on_error=section.on_error,
        dtype="uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "uint32",
        trust_remote_code=section.trust_remote_code,
    )
    if section.tokenizer is None and files.kind == "text" and files.size_bytes <= IN_MEMORY_BYTES:
        store = _store_in_memory(files, settings, vocabulary=tokenizer.vocabulary)
    else:
        facts = {"files": files.contents(), "kind": files.kind, **_settings_facts(settings)}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = section.processes or cores

        def build(draft: Path) -> Mapping[str, Any]:
            facts = _build_entry(draft, files, settings=settings, processes=processes, alive=alive)
            return {**facts, "vocabulary": tokenizer.vocabulary}

        entry = get_or_build(root, f"tokens-{key_of(facts)}", build=build, alive=alive)
        store = open_entry(entry, name=files.name)
    if not store.documents:
        skipped = "; ".join(store.skip_messages)
        raise DataError(
            f"there is no document in {files.name}.",
            got=f"{store.skipped} records left out: {skipped}" if store.skipped else "files without a record",
            fix="data with documents, or another data.records",
        )
    return [store]


def _find_files(source: Source, fields: SourceFields, *, root: Path, alive: Heartbeat) -> _SourceFiles:
    sizes = list_stdlib() if source == "stdlib" else list_files(fields.paths)
    kind = "text" if source == "stdlib" else source
    assert kind in ("text", "jsonl", "parquet"), f"{kind} has no files that are cut into parts"
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return _SourceFiles(
        name=source if source == "stdlib" else f"{next(iter(sizes)).name}{more}",
        kind=kind,
        parts=[part for path, size in sizes.items() for part in split_file(kind, path, size=size)],
        contents=lambda: digests(sizes, root=root, alive=alive),
    )


def _find_dataset(_source: Source, fields: SourceFields, *, root: Path, alive: Heartbeat) -> _SourceFiles:
    parts, files, names = list[FilePart](), list[Path](), list[str]()
    for path in fields.paths or ("",):
        place = os.path.abspath(os.path.expanduser(path)) if path else ""
        dataset = open_dataset(place, fields)
        rows, own = len(dataset), [Path(file["filename"]) for file in dataset.cache_files]
        files += own
        # The fingerprint covers operations since the files were written, such as a selection.
        names += [str(dataset._fingerprint), str(rows)]  # noqa: SLF001
        size = sum(file.stat().st_size for file in own) or rows
        step = max(1, rows * SHARD_BYTES // max(size, 1))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            parts.append(FilePart("datasets", place, begin, end, size * (end - begin) // rows, end == rows))
    return _SourceFiles(
        name=fields.name or ", ".join(Path(path).name for path in fields.paths),
        kind="datasets",
        parts=parts,
        contents=lambda: [*digests(files, root=root, alive=alive), *names],
    )


def _store_in_memory(files: _SourceFiles, settings: TokenizeSettings, *, vocabulary: int) -> TokenStore:
    """Tokenizes `files` in this process, and returns a store with the tokens in memory."""
    tokens: list[NDArray[Any]] = []
    tasks = tokenize_tasks(_tasks(files.parts), settings, processes=1)
    offsets, facts = _write_each(tasks, lambda one: tokens.append(one.tokens))
    return TokenStore(
        name=files.name,
        key=None,
        tokens=np.concatenate(tokens),
        begins=offsets[:-1],
        ends=offsets[1:],
        trained=None,
        vocabulary=vocabulary,
        skipped=facts["skipped"],
        skip_messages=tuple(facts["skip_messages"]),
    )


def _build_entry(
    draft: Path, files: _SourceFiles, *, settings: TokenizeSettings, processes: int, alive: Heartbeat
) -> Mapping[str, Any]:
    """Tokenizes `files` into the directory `draft`, and returns the contents of its manifest."""
    with ExitStack() as stack:
        shown = stack.enter_context(show_progress(files.name, total_bytes=files.size_bytes, file=sys.stderr))
        tokens = stack.enter_context((draft / TOKENS).open("wb"))
        trained = stack.enter_context((draft / TRAINED).open("wb")) if settings.masked else None

        def write(one: TaskTokens) -> None:
            tokens.write(one.tokens.data)
            if trained is not None and one.trained is not None:
                trained.write(one.trained.data)
            shown.add(one.size, tokens=len(one.tokens), skipped=one.skipped)
            alive()

        offsets, facts = _write_each(
            tokenize_tasks(_tasks(files.parts), settings, processes=processes), write
        )
    np.save(draft / OFFSETS, offsets)
    return {"source": files.name, "dtype": settings.dtype, "documents": len(offsets) - 1, **facts}


def _write_each(
    found: Iterable[TaskTokens], write: Callable[[TaskTokens], None]
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Calls `write` for each task's tokens. Returns (boundaries of the non-empty documents, counts)."""
    ends, count, skipped, messages = [np.zeros(1, dtype=np.int64)], 0, 0, list[str]()
    for one in found:
        write(one)
        ends.append(one.ends + count)
        count += len(one.tokens)
        skipped += one.skipped
        messages += one.skip_messages
    facts = {"tokens": count, "skipped": skipped, "skip_messages": messages[:5]}
    return np.unique(np.concatenate(ends)), facts


def _tasks(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """Groups parts into tasks of about SHARD_BYTES, so that many small files make few tasks."""
    tasks, size = list[list[FilePart]](), 0
    for part in parts:
        if not tasks or size + part.size > SHARD_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(part)
        size += part.size
    return tasks


def _settings_facts(settings: TokenizeSettings) -> Mapping[str, Any]:
    """Returns the data that determines the tokens: settings, tokenizer, library versions; not the files."""
    fields = settings.fields.model_dump(mode="json")
    facts: dict[str, Any] = {
        "fields": {name: value for name, value in fields.items() if name.endswith("field")},
        "records": settings.fields.records,
        "train_on": settings.train_on if settings.fields.records != "text" else "all",
        "on_error": settings.on_error,
        "eos_token": settings.eos_token,
        "tokenizer": None,
    }
    if settings.tokenizer is not None:
        files = tokenizer_files(settings.tokenizer)
        facts["tokenizer"] = [key_of({"text": tokenizer_text(file)}) for file in files]
        facts["tokenizers"] = version("tokenizers")
    if settings.fields.records == "messages":
        facts["transformers"] = version("transformers")
        if settings.trust_remote_code and settings.tokenizer is not None:
            beside = sorted(tokenizer_file(settings.tokenizer).parent.glob("*.py"))
            facts["code"] = [key_of({"text": file.read_text(encoding="utf-8")}) for file in beside]
    return facts

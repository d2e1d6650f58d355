"""Opens the sources of a run as token stores, and tokenizes those that are not cached yet."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullshard.data.cache import Heartbeat, digests, get_or_build, key_of
from fullshard.data.documents import Document, stdlib_documents, text_documents
from fullshard.data.memmaps import memmap_stores
from fullshard.data.progress import TokenizationProgress, making
from fullshard.data.readers import (
    SHARD_BYTES,
    FilePart,
    file_shards,
    open_dataset,
    require_reader,
)
from fullshard.data.token_store import OFFSETS, TOKENS, TRAINED, TokenStore, open_entry
from fullshard.data.tokenize import TaskResult, TokenizeSettings, token_dtype, tokenized
from fullshard.data.tokenizer import (
    open_tokenizer,
    tokenizer_file,
    tokenizer_files,
    tokenizer_text,
    tokenizers_version,
)
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSection, DataSource, SourceFields

Source = Literal["stdlib", "text", "jsonl", "parquet", "datasets", "memmap", "python"]
_COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class _SourceFiles:
    """The files of a source before they are read.

    name: name for display
    shards: parts of the files
    facts: data that determines the cache key
    """

    name: str
    shards: Sequence[FilePart]
    facts: Mapping[str, Any]


def stores_of(
    source: DataSource | DataSection, section: DataSection, *, root: Path, alive: Heartbeat
) -> list[TokenStore]:
    """Returns the token stores of `source`, tokenized as `section` says and cached in `root`.

    Raises DataError for data that is absent, empty, corrupt or does not hold tokens; MissingExtraError.
    """
    fields = SourceFields(**{name: getattr(source, name) for name in SourceFields.model_fields})
    if source.source == "memmap":
        return memmap_stores(fields, root=root, alive=alive)
    require_reader(source.source)
    found = _found(source.source, fields, root=root, alive=alive)
    tokenizer = open_tokenizer(section.tokenizer, end_token=section.end_token)  # before anything is read
    recipe = TokenizeSettings(
        fields=fields,
        tokenizer=section.tokenizer,
        end_token=section.end_token,
        train_on=section.train_on,
        on_error=section.on_error,
        dtype=token_dtype(tokenizer),
        trust_remote_code=section.trust_remote_code,
    )
    work = _TokenizeJob(found, recipe, tokenizer.vocabulary, section.processes or _cores(), alive)
    facts = {**found.facts, **_recipe_facts(recipe, source.source)}
    entry = get_or_build(root, f"tokens-{key_of(facts)}", build=work.build, alive=alive)
    store = open_entry(entry, name=found.name)
    if not store.documents:
        skipped = "; ".join(store.skip_messages)
        raise DataError(
            f"there is no document in {found.name}.",
            got=f"{store.skipped} records left out: {skipped}" if store.skipped else "files without a record",
            fix="data with documents, or another data.records",
        )
    return [store]


def _found(source: Source, fields: SourceFields, *, root: Path, alive: Heartbeat) -> _SourceFiles:
    if source == "datasets":
        return _dataset(fields, root=root, alive=alive)
    documents = stdlib_documents() if source == "stdlib" else text_documents(fields.paths)
    kind = "text" if source == "stdlib" else source
    assert kind in ("text", "jsonl", "parquet"), f"{kind} has no files that are cut into shards"
    shards = [shard for one in documents for shard in file_shards(kind, one.path, size=one.size)]
    names = digests([one.path for one in documents], root=root, alive=alive)
    return _SourceFiles(_display_name(source, documents), shards, {"kind": kind, "files": names})


def _display_name(source: Source, documents: Sequence[Document]) -> str:
    if source == "stdlib":
        return source
    more = f" and {len(documents) - 1} more" if len(documents) > 1 else ""
    return f"{documents[0].path.name}{more}"


def _dataset(fields: SourceFields, *, root: Path, alive: Heartbeat) -> _SourceFiles:
    shards, names = list[FilePart](), list[str]()
    for path in fields.paths or ("",):
        place = os.path.abspath(os.path.expanduser(path)) if path else ""
        dataset = open_dataset(place, fields)
        rows, files = len(dataset), [Path(file["filename"]) for file in dataset.cache_files]
        # The fingerprint covers operations since the files were written, such as a selection.
        names += [*digests(files, root=root, alive=alive), str(dataset._fingerprint), str(rows)]  # noqa: SLF001
        size = sum(file.stat().st_size for file in files) or rows
        step = max(1, rows * SHARD_BYTES // max(size, 1))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            shards.append(FilePart("datasets", place, begin, end, size * (end - begin) // rows, end == rows))
    name = fields.name or ", ".join(Path(path).name for path in fields.paths)
    return _SourceFiles(name, shards, {"kind": "datasets", "files": names})


@dataclass(frozen=True)
class _TokenizeJob:
    """Builds a cache entry of tokens."""

    found: _SourceFiles
    recipe: TokenizeSettings
    vocabulary: int
    processes: int
    alive: Heartbeat

    def build(self, draft: Path) -> Mapping[str, Any]:
        """Fills `draft` and returns the contents of its manifest."""
        parts = draft / "parts"
        parts.mkdir()
        tasks = [(task, parts / f"{i}") for i, task in enumerate(_tasks(self.found.shards))]
        total = sum(shard.size for shard in self.found.shards)
        with making(self.found.name, total_bytes=total, file=sys.stderr) as shown:
            made = tokenized(
                tasks, self.recipe, processes=self.processes, tell=lambda one: self._tell(one, shown)
            )
        offsets = _offsets(made)
        _join(made, draft, dtype=self.recipe.dtype)
        np.save(draft / OFFSETS, offsets)
        parts.rmdir()
        return {
            "source": self.found.name,
            "dtype": self.recipe.dtype,
            "vocabulary": self.vocabulary,
            "documents": len(offsets) - 1,
            "tokens": int(offsets[-1]),
            "skipped": sum(one.skipped for one in made),
            "skip_messages": [text for one in made for text in one.skip_messages][:5],
        }

    def _tell(self, made: TaskResult, shown: TokenizationProgress) -> None:
        shown.add(made.size, tokens=made.tokens, skipped=made.skipped)
        self.alive()


def _tasks(shards: Sequence[FilePart]) -> Iterator[list[FilePart]]:
    """Groups shards into tasks of about SHARD_BYTES, so that many small files make few tasks."""
    task, size = list[FilePart](), 0
    for shard in shards:
        if task and size + shard.size > SHARD_BYTES:
            yield task
            task, size = [], 0
        task.append(shard)
        size += shard.size
    if task:
        yield task


def _offsets(made: Sequence[TaskResult]) -> NDArray[np.int64]:
    """Returns the document boundaries, without empty documents.

    A negative length, -n - 1, stands for n tokens of a document that continues in the next piece.
    """
    lengths = [np.load(Path(one.path).with_name(f"{Path(one.path).name}.lengths.npy")) for one in made]
    pieces = np.concatenate([*lengths, np.empty(0, np.int64)])
    ends = np.cumsum(np.where(pieces < 0, -pieces - 1, pieces))
    return np.unique(np.concatenate([[0], ends[pieces >= 0]])).astype(np.int64)


def _join(made: Sequence[TaskResult], draft: Path, *, dtype: str) -> None:
    """Joins the files of the tasks. Each file is removed after it is copied."""
    masked = any(Path(f"{one.path}.trained").exists() for one in made)
    with (draft / TOKENS).open("wb") as tokens:
        for one in made:
            _move(Path(f"{one.path}.tokens"), tokens)
    if masked:
        with (draft / TRAINED).open("wb") as trained:
            for one in made:
                part = Path(f"{one.path}.trained")
                if part.exists():
                    _move(part, trained)
                else:
                    trained.write(b"\1" * one.tokens)
    for one in made:
        Path(f"{one.path}.lengths.npy").unlink()


def _move(part: Path, into: Any) -> None:
    with part.open("rb") as file:
        shutil.copyfileobj(file, into, _COPY_BYTES)
    part.unlink()


def _recipe_facts(recipe: TokenizeSettings, source: Source) -> Mapping[str, Any]:
    """Returns the data except the files that determines the tokens, including library versions."""
    plain = recipe.plain()
    fields = {name: plain["fields"][name] for name in plain["fields"] if name.endswith("field")}
    facts: dict[str, Any] = {
        "fields": fields,
        "records": recipe.fields.records,
        "train_on": recipe.train_on if recipe.fields.records != "text" else "all",
        "on_error": recipe.on_error,
        "end_token": recipe.end_token,
        "tokenizer": None,
        "source": "text" if source == "stdlib" else source,
    }
    if recipe.tokenizer is not None:
        files = tokenizer_files(recipe.tokenizer)
        facts["tokenizer"] = [key_of({"text": tokenizer_text(file)}) for file in files]
        facts["tokenizers"] = tokenizers_version()
    if recipe.fields.records == "messages":
        facts["transformers"] = version("transformers")
        if recipe.trust_remote_code and recipe.tokenizer is not None:
            beside = sorted(tokenizer_file(recipe.tokenizer).parent.glob("*.py"))
            facts["code"] = [key_of({"text": file.read_text(encoding="utf-8")}) for file in beside]
    return facts


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Converts records to tokens, one task at a time, in this process or in worker processes.

A worker is `python -m fullshard.data.tokenize`. It reads one task per line and answers with one line. It is
started as a command because multiprocessing would import the user's script again.
"""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fullshard import errors
from fullshard.data.chat_template import ChatTemplate, NotWrittenOutError
from fullshard.data.readers import CorruptRecord, FilePart, TextRecord, absent_field, records
from fullshard.data.tokenizer import Tokenizer, open_tokenizer
from fullshard.errors import DataError, FullshardError
from fullshard.spec.data_section import SourceFields

_BATCH_CHARACTERS = 1 << 20
_TOLD = 5  # how many of the records left out are reply one by one


@dataclass(frozen=True)
class TokenizeSettings:
    """Settings for converting records to tokens.

    dtype: dtype of the token file
    trust_remote_code: see `DataSection`
    """

    fields: SourceFields
    tokenizer: str | None
    end_token: str | None
    train_on: Literal["all", "assistant", "completion"]
    on_error: Literal["stop", "skip"]
    dtype: str
    trust_remote_code: bool = False

    def plain(self) -> dict[str, Any]:
        """Returns the settings as JSON data."""
        return {**asdict(self), "fields": self.fields.model_dump(mode="json")}


@dataclass
class TaskResult:
    """Result of one task. Its tokens are in files whose names start with `path`.

    path: common start of the file names
    size: bytes of the source that were read
    documents: number of documents
    tokens: number of tokens
    skipped: number of records left out
    skip_messages: messages about the first few skipped records
    """

    path: str
    size: int
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    skip_messages: list[str] = field(default_factory=list[str])


class Tokenizing:
    """Turns tasks into token files according to `recipe`. Opens the tokenizer once."""

    def __init__(self, recipe: TokenizeSettings) -> None:
        self.recipe = recipe
        self._tokenizer = open_tokenizer(recipe.tokenizer, end_token=recipe.end_token)
        self._chat: ChatTemplate | None = None
        if recipe.fields.records == "messages":
            assert recipe.tokenizer is not None, "messages without a tokenizer are refused by the spec"
            self._chat = ChatTemplate(recipe.tokenizer, trust_remote_code=recipe.trust_remote_code)

    def run(self, task: Sequence[FilePart], path: Path) -> TaskResult:
        """Writes the tokens of `task` to `path`.tokens and the length of each piece to .lengths.npy.

        A piece of n tokens whose document continues in the next piece has length -n - 1. If some tokens are
        not trained on, a mask is written to .trained. Raises DataError for a corrupt record, unless corrupt
        records are skipped.
        """
        made = TaskResult(str(path), size=sum(shard.size for shard in task))
        lengths: list[int] = []
        with _Parts(path, self.recipe.dtype) as parts:
            for batch in _batches(self._found(task, made)):
                for record, tokens, trained in self._encoded(batch, made):
                    parts.write(tokens, trained)
                    lengths.append(len(tokens) if record.ends else -len(tokens) - 1)
                    made.documents += record.ends
                    made.tokens += len(tokens)
        np.save(path.with_name(f"{path.name}.lengths.npy"), np.array(lengths, dtype=np.int64))
        return made

    def _found(self, task: Sequence[FilePart], made: TaskResult) -> Iterator[TextRecord]:
        for shard in task:
            for one in records(shard, self.recipe.fields):
                if isinstance(one, CorruptRecord):
                    self._skip(one.where(), one.why, made=made)
                else:
                    yield one

    def _skip(self, where: str, why: str, *, made: TaskResult) -> None:
        if self.recipe.on_error == "stop":
            raise DataError(
                f"a record cannot be read: {where}.",
                got=why,
                fix='mend it, or data.on_error = "skip", which leaves such records out and counts them',
            )
        made.skipped += 1
        if len(made.skip_messages) < _TOLD:
            made.skip_messages.append(f"{where}: {why}")

    def _encoded(
        self, batch: Sequence[TextRecord], made: TaskResult
    ) -> Iterator[tuple[TextRecord, NDArray[np.int64], NDArray[np.bool_] | None]]:
        if self.recipe.fields.records == "text":
            yield from self._texts(batch, made)
            return
        for record in batch:
            try:
                if self.recipe.fields.records == "messages":
                    tokens, trained = self._conversation(record)
                else:
                    tokens, trained = self._completion(record)
            except NotWrittenOutError as error:
                self._skip(record.where(), str(error), made=made)
                continue
            yield record, tokens, trained

    def _texts(
        self, batch: Sequence[TextRecord], made: TaskResult
    ) -> Iterator[tuple[TextRecord, NDArray[np.int64], NDArray[np.bool_] | None]]:
        name = self.recipe.fields.text_field
        good: list[tuple[TextRecord, str]] = []
        for record in batch:
            try:
                text = record.value if isinstance(record.value, str) else self._text_field(record, name)
                good.append((record, text))
            except NotWrittenOutError as error:
                self._skip(record.where(), str(error), made=made)
        texts = [text for _, text in good]
        for (record, _), tokens in zip(good, self._encode(good, texts), strict=True):
            before = self._tokenizer.before if record.begins else ()
            after = self._tokenizer.after if record.ends else ()
            yield record, np.concatenate([_array(before), tokens, _array(after)]), None

    def _encode(
        self, good: Sequence[tuple[TextRecord, str]], texts: Sequence[str]
    ) -> list[NDArray[np.int64]]:
        try:
            return self._tokenizer.encode(texts)
        except DataError:
            for record, text in good:  # which of them was it?
                try:
                    self._tokenizer.encode([text])
                except DataError as error:
                    raise DataError(
                        f"{record.where()}: {error.what}", got=error.got, why=error.why, fix=error.fix
                    ) from error
            raise

    def _conversation(self, record: TextRecord) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        assert self._chat is not None, "opened with the recipe"
        train_on = "assistant" if self.recipe.train_on == "assistant" else "all"
        return self._chat.encode(self._field(record, self.recipe.fields.messages_field), train_on=train_on)

    def _completion(self, record: TextRecord) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        names = (self.recipe.fields.prompt_field, self.recipe.fields.completion_field)
        prompt, completion = (self._text_field(record, name) for name in names)
        asked, said = self._tokenizer.encode([prompt, completion])
        tokens = np.concatenate([_array(self._tokenizer.before), asked, said, _array(self._tokenizer.after)])
        trained = np.ones(len(tokens), dtype=np.bool_)
        if self.recipe.train_on == "completion":
            trained[: len(self._tokenizer.before) + len(asked)] = False
        return tokens, trained

    def _text_field(self, record: TextRecord, name: str) -> str:
        text = self._field(record, name)
        if not isinstance(text, str):
            raise NotWrittenOutError(f"{name!r} is no text, but {type(text).__name__}")
        return text

    def _field(self, record: TextRecord, name: str) -> Any:
        row = cast(dict[str, Any], record.value)
        if name in row:
            return row[name]
        if self.recipe.on_error == "stop":
            raise absent_field(name, [*row], where=record.where())
        raise NotWrittenOutError(f"no field {name!r} among {', '.join(row)}")


class _Parts:
    """Output files of one task. The mask is started at the first token that is not trained on."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype, self._count = path, np.dtype(dtype), 0
        self._tokens = path.with_name(f"{path.name}.tokens").open("wb")
        self._trained: Any = None

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        if self._trained is not None:
            self._trained.close()

    def write(self, tokens: NDArray[np.int64], trained: NDArray[np.bool_] | None) -> None:
        if self._trained is None and trained is not None and not trained.all():
            self._trained = self._path.with_name(f"{self._path.name}.trained").open("wb")
            self._trained.write(b"\1" * self._count)
        if self._trained is not None:
            self._trained.write((np.ones(len(tokens)) if trained is None else trained).astype(np.uint8).data)
        self._tokens.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._count += len(tokens)


def tokenized(
    tasks: Sequence[tuple[Sequence[FilePart], Path]],
    recipe: TokenizeSettings,
    *,
    processes: int,
    tell: Callable[[TaskResult], None],
) -> list[TaskResult]:
    """Runs the tasks and returns their results in order.

    The callback gets each result as it is finished, in any order.

    Raises the error of a task that failed, and DataError for a worker that died.
    """
    if processes <= 1 or len(tasks) <= 1:
        here, found = Tokenizing(recipe), list[TaskResult]()
        for task, path in tasks:
            found.append(here.run(task, path))
            tell(found[-1])
        return found
    return _Workers(recipe, min(processes, len(tasks)), tell=tell).run(tasks)


class _Workers:
    """Worker processes that take tasks from one queue. Each has a thread here that talks to it."""

    def __init__(self, recipe: TokenizeSettings, count: int, *, tell: Callable[[TaskResult], None]) -> None:
        self._recipe, self._count, self._tell = recipe, count, tell
        self._lock = threading.Lock()
        self._left: deque[tuple[int, Sequence[FilePart], Path]] = deque()
        self._made: dict[int, TaskResult] = {}
        self._failed: FullshardError | None = None
        self._started: list[subprocess.Popen[str]] = []

    def run(self, tasks: Sequence[tuple[Sequence[FilePart], Path]]) -> list[TaskResult]:
        self._left.extend((i, task, path) for i, (task, path) in enumerate(tasks))
        # The tokenizers' own threads are as many as the cores, in each process.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
        try:
            for _ in range(self._count):
                self._started.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            threads = [threading.Thread(target=self._serve, args=(one,)) for one in self._started]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for one in self._started:  # those still at work when this process is interrupted
                one.kill()
                one.wait()
                with suppress(OSError), one:  # closes the pipes; what was still to be reply goes nowhere
                    pass
        if self._failed is not None:
            raise self._failed
        return [self._made[i] for i in range(len(tasks))]

    def _serve(self, worker: "subprocess.Popen[str]") -> None:
        assert worker.stdin is not None, "it is a pipe"
        assert worker.stdout is not None, "it is a pipe"
        try:
            print(json.dumps(self._recipe.plain()), file=worker.stdin, flush=True)
            while (task := self._next()) is not None:
                i, shards, path = task
                line = {"task": [asdict(shard) for shard in shards], "path": str(path)}
                print(json.dumps(line), file=worker.stdin, flush=True)
                answer = worker.stdout.readline()
                if not answer:
                    raise _died(worker)
                self._take(i, json.loads(answer))
            worker.stdin.close()
        except FullshardError as error:
            self._failed = self._failed or error
        except (OSError, ValueError):  # the pipe broke
            self._failed = self._failed or _died(worker)
        worker.kill()

    def _next(self) -> tuple[int, Sequence[FilePart], Path] | None:
        with self._lock:
            return self._left.popleft() if self._left and self._failed is None else None

    def _take(self, i: int, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            raise _raised(answer)
        made = TaskResult(**answer["made"])
        with self._lock:
            self._made[i] = made
            self._tell(made)


def main() -> None:
    """Runs a worker: reads the settings from the first line of stdin, then one task per line."""
    given = json.loads(sys.stdin.readline())
    given["fields"] = SourceFields.parse(given["fields"], source="the recipe")
    recipe = TokenizeSettings(**given)
    worker: Tokenizing | None = None
    for line in sys.stdin:
        reply = json.loads(line)
        try:
            worker = worker or Tokenizing(recipe)
            made = worker.run([FilePart(**shard) for shard in reply["task"]], Path(reply["path"]))
            answer: dict[str, Any] = {"made": asdict(made)}
        except FullshardError as error:
            parts = {"what": error.what, "got": error.got, "why": error.why, "fix": error.fix}
            answer = {"error": type(error).__name__, "parts": parts}
        print(json.dumps(answer, default=str), flush=True)


def _raised(answer: Mapping[str, Any]) -> FullshardError:
    """Returns the error that a worker met.

    It skips the class's own `__init__`, which may take other arguments.
    """
    kind = cast(type[FullshardError], getattr(errors, answer["error"]))
    parts = dict(answer["parts"])
    error = DataError.__new__(kind)
    FullshardError.__init__(error, parts["what"], got=parts["got"], why=parts["why"], fix=parts["fix"])
    return error


def _died(worker: "subprocess.Popen[str]") -> DataError:
    code = worker.wait()
    return DataError(
        "a process that made tokens died.",
        got=f"signal {-code}" if code < 0 else f"exit code {code}",
        why="the machine may have no memory left" if code == -9 else None,
        fix="data.processes = 1 shows what it met",
    )


def _batches(found: Iterator[TextRecord]) -> Iterator[list[TextRecord]]:
    """Yields batches of records with about _BATCH_CHARACTERS characters each; the sizes are estimates."""
    batch, size = list[TextRecord](), 0
    for record in found:
        batch.append(record)
        size += len(record.value) if isinstance(record.value, str) else 500
        if isinstance(record.value, dict):
            size += sum(len(v) for v in cast(dict[str, Any], record.value).values() if isinstance(v, str))
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _array(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


def token_dtype(tokenizer: Tokenizer) -> str:
    """Returns the smallest unsigned dtype that holds the vocabulary."""
    largest = tokenizer.vocabulary - 1
    return "uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "uint32"


if __name__ == "__main__":
    main()

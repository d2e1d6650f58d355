"""Converts records to tokens, one task at a time, in this process or in worker processes.

A worker is a Python process that reads pickled tasks from stdin and writes pickled results to stdout. It is
started as a command because multiprocessing would import the user's script again.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data import row_fields
from fullshard.data.chat_template import ChatTemplate
from fullshard.data.conversation import read_conversation
from fullshard.data.readers import CorruptRecord, FilePart, SourceRecord, read_records
from fullshard.data.token_store import TokenizeNotes
from fullshard.data.tokenizer import EncodedText, open_tokenizer
from fullshard.errors import DataError, FullshardError
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.small_files import ForeignErrorTranslator

Worker = subprocess.Popen[bytes]
Task = Sequence[FilePart]
Tokens = NDArray[Any]
Mask = NDArray[np.bool_]

_BATCH_RECORDS = 256
_REPORTED_RECORDS = 5  # of a task's skipped records, the first ones have a message
_TASKS_AHEAD = 8  # per worker: bounds the results that wait for an earlier task
_SERVE = "from fullshard.data.tokenize import serve_tasks_on_stdin; serve_tasks_on_stdin()"


@dataclass(frozen=True)
class TokenizeSettings:
    """Settings for converting records to tokens.

    chat_template: see `DataSection`
    dtype: dtype of the tokens
    trust_remote_code: see `DataSection`
    """

    fields: DataSourceFields
    tokenizer: str | None
    eos_token: str | None
    train_on: Literal["all", "assistant", "completion"]
    on_error: Literal["stop", "skip"]
    dtype: str
    trust_remote_code: bool = False
    chat_template: str | None = None

    @property
    def needs_loss_mask(self) -> bool:
        """True if only a part of each record's tokens may be trained on."""
        return self.fields.records in ("tokens", "messages", self.train_on)


class RowText(NamedTuple):
    """The text of a record.

    first_trained: index of the first character that is trained on
    context: see `SourceRecord`
    """

    text: str
    first_trained: int = 0
    context: tuple[int, int] = (0, 0)


class EncodedRecord(NamedTuple):
    """Tokens of a record.

    trained: mask of the tokens that are trained on
    ends: index behind the last token of each document that ends in this record
    """

    tokens: Tokens
    trained: Mask
    ends: list[int]


@dataclass(frozen=True)
class TokenizedTask:
    """Tokens of one task.

    size: bytes of the source that were read
    tokens: tokens of all documents, joined
    ends: index behind the last token of each document that ends in this task
    loss_mask: mask of the tokens that are trained on; None if all are
    """

    size: int
    tokens: Tokens
    ends: NDArray[np.int64]
    loss_mask: Mask | None
    notes: TokenizeNotes


class TaskTokenizer:
    """Converts tasks to tokens, with a tokenizer that is opened once."""

    def __init__(self, settings: TokenizeSettings) -> None:
        self.settings, self._notes = settings, TokenizeNotes()
        self._read_names = row_fields.required_field_names(settings.fields)
        self._unread_names = row_fields.list_unread_content_fields(settings.fields)
        self._tokenizer = open_tokenizer(settings.tokenizer, eos_token=settings.eos_token)
        self._chat: ChatTemplate | None = None
        if settings.fields.records == "messages":
            assert settings.tokenizer is not None, "messages without a tokenizer are refused by the spec"
            template, trust = settings.chat_template, settings.trust_remote_code
            self._chat = ChatTemplate(settings.tokenizer, template=template, trust_remote_code=trust)

    def tokenize_task(self, task: Task) -> TokenizedTask:
        """Returns the tokens of `task`, a run of file parts.

        A record that is corrupt, or that the tokenizer or the chat template rejects, is skipped and counted;
        if `on_error` is "stop", it raises DataError.
        """
        self._notes = TokenizeNotes()
        tokens, masks = [np.empty(0, self.settings.dtype)], [np.empty(0, np.bool_)]
        ends, count = list[int](), 0
        records = self._read_task_records(task)
        while batch := list(islice(records, _BATCH_RECORDS)):
            for found in self._tokenize_records(batch):
                tokens.append(found.tokens.astype(self.settings.dtype))
                masks.append(found.trained)
                ends += [count + end for end in found.ends]
                count += len(found.tokens)
        return TokenizedTask(
            size=sum(part.size for part in task),
            tokens=np.concatenate(tokens),
            ends=np.array(ends, dtype=np.int64),
            loss_mask=np.concatenate(masks) if self.settings.needs_loss_mask else None,
            notes=self._notes,
        )

    def _read_task_records(self, task: Task) -> Iterator[SourceRecord]:
        for part in task:
            for record in read_records(part, self.settings.fields):
                if isinstance(record, CorruptRecord):
                    self._skip_or_raise(record.where, row_fields.UntokenizableRecordError(record.why))
                else:
                    yield record

    def _skip_or_raise(self, where: Callable[[], str], error: DataError) -> None:
        """Counts a record that cannot be tokenized, or raises DataError with its location."""
        reason = error.what if error.got is None else f"{error.what.rstrip('.')}: {error.got}"
        if self.settings.on_error == "stop":
            fix = 'mend it, or data.on_error = "skip", which leaves such records out and counts them'
            what = f"a record cannot be read: {where()}."
            raise DataError(what, got=reason, why=error.why, fix=error.fix or fix) from error
        self._notes.skipped += 1
        if len(self._notes.skip_messages) < _REPORTED_RECORDS:
            self._notes.skip_messages.append(f"{where()}: {reason}")

    def _tokenize_records(self, batch: Sequence[SourceRecord]) -> Iterator[EncodedRecord]:
        """Yields the tokens of each record, without the records that are skipped."""
        texts: list[tuple[SourceRecord, RowText]] = []
        for record in batch:
            try:
                with ForeignErrorTranslator(row_fields.UntokenizableRecordError):
                    if self.settings.fields.records in ("text", "completion"):
                        texts.append((record, self._read_text(record)))
                        continue
                    found = self._encode_conversation(record) if self._chat else self._read_tokens(record)
            except DataError as error:
                self._skip_or_raise(record.where, error)
            else:
                yield found
        yield from self._encode_texts_or_skip(texts)

    def _encode_conversation(self, record: SourceRecord) -> EncodedRecord:
        assert self._chat is not None, "opened for messages"
        fields = self.settings.fields
        messages = self._record_field(record, fields.messages_field)
        train_on = "assistant" if self.settings.train_on == "assistant" else "all"
        conversation = read_conversation(record.value, messages, fields=fields, train_on=train_on)
        contents = [message.get("content") for message in conversation.messages]
        self._check_and_count_unused_fields(record, contents)
        encoded = self._chat.encode_conversation(conversation, train_on=train_on)
        if (largest := encoded.tokens.max(initial=0)) >= self._tokenizer.vocabulary_size:
            raise row_fields.UntokenizableRecordError(
                f"token {largest} is not in tokenizer.json, and another file adds it; mend the directory by "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        self._notes.unended += not encoded.has_end_of_turn
        self._notes.unwritten.update(encoded.unwritten)
        return EncodedRecord(encoded.tokens, encoded.trained, [len(encoded.tokens)])

    def _read_tokens(self, record: SourceRecord) -> EncodedRecord:
        known, name = self.settings.tokenizer is not None, self.settings.fields.tokens_field
        tokens, size = (
            self._record_field(record, name),
            self._tokenizer.vocabulary_size if known else row_fields.TOKEN_LIMIT,
        )
        return EncodedRecord(
            *row_fields.read_token_row(record.value, tokens, tokens_field=name, vocabulary_size=size)
        )

    def _encode_texts_or_skip(self, rows: Sequence[tuple[SourceRecord, RowText]]) -> Iterator[EncodedRecord]:
        """Yields the tokens of each text. A skipped one is left out, or if a part of a document, empty."""
        encoded: list[EncodedRecord] | None = None
        with suppress(DataError):
            encoded = self._encode_texts(rows)
        for i, (record, row) in enumerate(rows):
            try:
                # After an error, one at a time, to find the record at fault.
                found = encoded[i] if encoded is not None else self._encode_texts([(record, row)])[0]
            except DataError as error:
                self._skip_or_raise(record.where, error)
                if record.begins and record.ends:
                    continue
                # A document may end with this part.
                found = EncodedRecord(np.empty(0, np.int64), np.empty(0, np.bool_), [0] * record.ends)
            yield found

    def _encode_texts(self, rows: Sequence[tuple[SourceRecord, RowText]]) -> list[EncodedRecord]:
        """Returns the tokens of each row. Raises DataError if the tokenizer rejects a text."""
        texts = [row.text for _, row in rows]
        if any(row.first_trained or any(row.context) for _, row in rows):
            encoded = self._tokenizer.encode_texts_with_offsets(texts)
            parts = [_tokens_outside_context(one, row) for one, (_, row) in zip(encoded, rows, strict=True)]
        else:  # offsets take time
            parts = [(one, np.ones(len(one), np.bool_)) for one in self._tokenizer.encode_texts(texts)]
        found: list[EncodedRecord] = []
        for (record, _), (tokens, trained) in zip(rows, parts, strict=True):
            before = self._tokenizer.tokens_before_document if record.begins else ()
            after = self._tokenizer.tokens_after_document if record.ends else ()
            begins_alike = bool(before) and tuple(tokens[: len(before)]) == before
            ends_alike = bool(after) and tuple(tokens[len(tokens) - len(after) :]) == after
            self._notes.doubled += begins_alike or ends_alike
            around = [np.full(len(before), not self.settings.needs_loss_mask), trained, np.ones(len(after))]
            tokens = np.concatenate([np.asarray(part, np.int64) for part in (before, tokens, after)])
            trained = np.concatenate(around).astype(np.bool_)
            found.append(EncodedRecord(tokens, trained, [len(tokens)] * record.ends))
        return found

    def _read_text(self, record: SourceRecord) -> RowText:
        """Returns the text of a record: of a text, or of a prompt and its completion."""
        if isinstance(record.value, str):
            if self.settings.tokenizer is not None:
                return RowText(record.value, context=record.context)
            before, after = record.context  # bytes are the same in any context
            return RowText(record.value[before : len(record.value) - after])
        texts: list[str] = []
        for name in self._read_names:
            text = self._record_field(record, name)
            if not isinstance(text, str):
                kind = "null" if text is None else type(text).__name__
                lines = row_fields.suggest_settings(record.value) if isinstance(text, list) else ()
                raise row_fields.UntokenizableRecordError(f"{name!r} is not text but {kind}", lines=lines)
            texts.append(text)
        self._check_and_count_unused_fields(record, texts)
        *prompt, _ = texts
        return RowText("".join(texts), len("".join(prompt)) if self.settings.needs_loss_mask else 0)

    def _check_and_count_unused_fields(self, record: SourceRecord, contents: Sequence[Any]) -> None:
        """Raises UntokenizableRecordError for unused marks; counts unused content not in `contents`."""
        row, fields = cast(dict[str, Any], record.value), self.settings.fields
        row_fields.check_exclusions_are_used(row, self._read_names[0])
        for name in self._unread_names:
            value = row_fields.look_up_field(row, name)
            parts = cast(list[Any], value) if isinstance(value, list) else [value]
            texts = [part.get(fields.content_field) if isinstance(part, dict) else part for part in parts]
            if value and value is not row_fields.ABSENT and not all(text in contents for text in texts):
                self._notes.unwritten[name] += 1

    def _record_field(self, record: SourceRecord, name: str) -> Any:
        row = cast(dict[str, Any], record.value)
        if (found := row_fields.look_up_field(row, name)) is not row_fields.ABSENT:
            return found
        if self.settings.on_error == "stop":
            raise row_fields.absent_field_error(name, row, where=record.where())
        raise row_fields.UntokenizableRecordError(f"no field {name!r} among {', '.join(row)}")


def _tokens_outside_context(encoded: EncodedText, row: RowText) -> tuple[Tokens, Mask]:
    """Returns (tokens that begin in the row's own part of its text, mask of the trained ones)."""
    before, after = row.context
    own = encoded.begins >= before
    if after:
        own &= encoded.begins < len(row.text) - after
    trained = encoded.mask_of_tokens_for_characters(row.first_trained, len(row.text) + 1)
    return encoded.tokens[own], trained[own]


def tokenize_tasks(
    tasks: Sequence[Task], settings: TokenizeSettings, *, processes: int
) -> Generator[TokenizedTask]:
    """Yields the tokens of each task, in order. Uses up to `processes` workers, or for one task this process.

    Raises the error of a task that failed, and DataError for a worker that died.
    """
    if processes <= 1 or len(tasks) <= 1:
        yield from map(TaskTokenizer(settings).tokenize_task, tasks)
        return
    count = min(processes, len(tasks))
    workers = [_start_worker(settings) for _ in range(count)]
    idle_workers = SimpleQueue[Worker]()
    for worker in workers:
        idle_workers.put(worker)
    threads = ThreadPoolExecutor(count)
    waiting = deque[Future[TokenizedTask]]()
    try:
        for task in tasks:
            waiting.append(threads.submit(_tokenize_in_worker, task, idle_workers))
            if len(waiting) >= _TASKS_AHEAD * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for worker in workers:  # some still work if a task failed or this process is interrupted
            worker.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            with suppress(OSError), worker:  # closes the pipes; an unread answer is dropped
                pass


def _start_worker(settings: TokenizeSettings) -> Worker:
    # The tokenizers' own threads are as many as the cores, in each process.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-P", "-c", _SERVE], env=environment, stdin=pipe, stdout=pipe)
    with suppress(OSError):  # the first task reports a worker that died
        pickle.dump(settings, cast(Any, worker.stdin))
    return worker


def _tokenize_in_worker(task: Task, idle_workers: SimpleQueue[Worker]) -> TokenizedTask:
    worker = idle_workers.get()
    assert worker.stdin is not None, "it is a pipe"
    assert worker.stdout is not None, "it is a pipe"
    try:
        pickle.dump(task, worker.stdin)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        code = worker.wait()
        raise DataError(
            "a process that made tokens died.",
            got=f"signal {-code}" if code < 0 else f"exit code {code}",
            why="the machine may have no memory left" if code == -9 else None,
            fix="data.processes = 1 shows its error",
        ) from error
    finally:
        idle_workers.put(worker)
    if isinstance(answer, FullshardError):
        raise answer
    return answer


def serve_tasks_on_stdin() -> None:
    """Runs a worker: reads settings and tasks from stdin, writes each task's tokens or error to stdout."""
    settings = pickle.load(sys.stdin.buffer)
    tokenizer: TaskTokenizer | None = None
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tokenizer = tokenizer or TaskTokenizer(settings)
            answer: TokenizedTask | FullshardError = tokenizer.tokenize_task(task)
        except FullshardError as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()

"""Converts records to tokens, one task at a time, in this process or in worker processes."""

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data import row_fields
from fullshard.data.chat_template import ChatTemplate
from fullshard.data.conversation import read_conversation
from fullshard.data.readers import TEXT_CHARACTERS, FilePart, SourceRecord, cut_text, read_records
from fullshard.data.token_store import TokenizeNotes
from fullshard.data.tokenizer import EncodedText, open_tokenizer
from fullshard.data.worker import LIMITS, NO_LIMITS, Limits, Worker, borrow_worker
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.small_files import ForeignErrorTranslator

Task = Sequence[FilePart]
Tokens = NDArray[Any]
Mask = NDArray[np.bool_]
_Item = TypeVar("_Item")

_BATCH_RECORDS = 256
_FEW_TOKENS, _TOKENS_PER_BYTE = 1 << 24, 64  # of a file as stored; texts are compressed to a tenth
_REPORTED_RECORDS = 5  # of a task's skipped records, the first ones have a message
_TASKS_AHEAD = 8  # per worker: bounds the results that wait for an earlier task


@dataclass(frozen=True)
class TokenizeSettings:
    """Settings for converting records to tokens.

    chat_template: see `DataSection`
    dtype: dtype of the tokens
    trust_remote_code: see `DataSection`
    limits: limits of each worker; not used with `trust_remote_code`
    vocabulary_size: the tokenizer's; None for tokens that another program made
    """

    fields: DataSourceFields
    tokenizer: str | None
    eos_token: str | None
    train_on: Literal["all", "assistant", "completion"]
    on_error: Literal["stop", "skip"]
    dtype: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    limits: Limits = LIMITS
    vocabulary_size: int | None = None

    @property
    def needs_loss_mask(self) -> bool:
        """True if only a part of each record's tokens may be trained on."""
        return self.fields.records in ("tokens", "messages", self.train_on)


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
    """Tokens of one task, or of a part of a large one.

    size: bytes of the source that were read
    tokens: tokens of all documents, joined
    ends: index behind the last token of each document that ends in these tokens
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

    def tokenize_task(self, task: Task) -> Iterator[TokenizedTask]:
        """Yields the tokens of `task`, a run of file parts, in pieces.

        A record that is corrupt, or that the tokenizer or the chat template rejects, is skipped and counted;
        if `on_error` is "stop", it raises DataError. So do far more tokens than bytes.
        """
        size = sum(part.size for part in task)
        most = max(_FEW_TOKENS, _TOKENS_PER_BYTE * size)
        self._notes = TokenizeNotes()
        for found in _batches(self._encode_records(task), size_of=lambda one: len(one.tokens)):
            begins = np.cumsum([0, *(len(one.tokens) for one in found)]).tolist()
            ends = [begin + end for begin, one in zip(begins, found, strict=False) for end in one.ends]
            tokens = [one.tokens.astype(self.settings.dtype) for one in found]
            masks = [np.empty(0, np.bool_), *(one.trained for one in found)]
            if (most := most - begins[-1]) < 0:
                raise DataError(f"{task[0].path} has over {_TOKENS_PER_BYTE} tokens for each of its bytes.")
            yield TokenizedTask(
                size=size,
                tokens=np.concatenate([np.empty(0, self.settings.dtype), *tokens]),
                ends=np.array(ends, dtype=np.int64),
                loss_mask=np.concatenate(masks) if self.settings.needs_loss_mask else None,
                notes=self._notes,
            )
            size, self._notes = 0, TokenizeNotes()

    def _encode_records(self, task: Task) -> Iterator[EncodedRecord]:
        """Yields the tokens of each record, or part of a long text, without those that are skipped."""
        if self.settings.fields.rejected_field is not None:
            return self._read_records(task, self._encode_pair)
        if self.settings.fields.records not in ("text", "completion"):
            return self._read_records(task, self._encode_conversation if self._chat else self._read_tokens)
        in_context = self.settings.tokenizer is not None  # bytes are the same in any context
        texts = (cut_text(one, in_context=in_context) for one in self._read_records(task, self._read_text))
        batches = _batches(chain.from_iterable(texts), size_of=lambda part: len(part.value))
        return chain.from_iterable(map(self._encode_texts_or_skip, batches))

    def _read_records(self, task: Task, read: Callable[[SourceRecord], _Item]) -> Iterator[_Item]:
        """Yields what `read` returns for each record, without the records that are skipped."""
        for record in chain.from_iterable(read_records(part, self.settings.fields) for part in task):
            self._restart_clock()
            try:
                with ForeignErrorTranslator(row_fields.UntokenizableRecordError):
                    if isinstance(record.value, DataError):
                        raise record.value
                    found = read(record)
            except DataError as error:
                self._skip_or_raise(record.where, error)
            else:
                yield found

    def _restart_clock(self) -> None:
        if signal.getitimer(signal.ITIMER_PROF)[0]:  # in a worker
            signal.setitimer(signal.ITIMER_PROF, self.settings.limits.seconds)

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

    def _encode_pair(self, record: SourceRecord) -> EncodedRecord:
        """Returns the tokens of two documents: the prompt with the chosen and with the rejected answer."""
        rows = row_fields.split_pair(record.value, self.settings.fields)
        both = [record._replace(value=row) for row in rows]
        if self._chat:
            chosen, rejected = map(self._encode_conversation, both)
        else:
            chosen, rejected = self._encode_texts([*map(self._read_text, both)])
        tokens = np.concatenate([chosen.tokens, rejected.tokens])
        trained = np.concatenate([chosen.trained, rejected.trained])
        return EncodedRecord(tokens, trained, [len(chosen.tokens), len(tokens)])

    def _read_tokens(self, record: SourceRecord) -> EncodedRecord:
        name, known = self.settings.fields.tokens_field, self.settings.tokenizer is not None
        size = self._tokenizer.vocabulary_size if known else row_fields.TOKEN_LIMIT
        tokens = self._record_field(record, name)
        row = row_fields.read_token_row(record.value, tokens, tokens_field=name, vocabulary_size=size)
        return EncodedRecord(*row)

    def _encode_texts_or_skip(self, rows: Sequence[SourceRecord]) -> list[EncodedRecord]:
        """Returns the tokens of each text. A skipped one is left out, or if a part of a document, empty."""
        self._restart_clock()
        try:
            return self._encode_texts(rows)
        except DataError as error:
            if len(rows) > 1:  # one at a time, to find the record at fault
                return [found for row in rows for found in self._encode_texts_or_skip([row])]
            self._skip_or_raise(rows[0].where, error)
            is_document = rows[0].begins and rows[0].ends
            empty = EncodedRecord(np.empty(0, np.int64), np.empty(0, np.bool_), [0] * rows[0].ends)
            return [] if is_document else [empty]  # a document may end with this part

    def _encode_texts(self, rows: Sequence[SourceRecord]) -> list[EncodedRecord]:
        """Returns the tokens of each row. Raises DataError if the tokenizer rejects a text."""
        texts = [row.value for row in rows]
        if any(row.first_trained or any(row.context) for row in rows):
            encoded = self._tokenizer.encode_texts_with_offsets(texts)
            parts = [_tokens_outside_context(one, row) for one, row in zip(encoded, rows, strict=True)]
        else:  # offsets take time
            parts = [(one, np.ones(len(one), np.bool_)) for one in self._tokenizer.encode_texts(texts)]
        found: list[EncodedRecord] = []
        for record, (tokens, trained) in zip(rows, parts, strict=True):
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

    def _read_text(self, record: SourceRecord) -> SourceRecord:
        """Returns `record` with its text as the value: that of a text, or of a prompt and its completion."""
        if isinstance(record.value, str):
            return record
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
        first_trained = len("".join(prompt)) if self.settings.needs_loss_mask else 0
        return record._replace(value="".join(texts), first_trained=first_trained)

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


def _tokens_outside_context(encoded: EncodedText, row: SourceRecord) -> tuple[Tokens, Mask]:
    """Returns (tokens that begin in the row's own part of its text, mask of the trained ones)."""
    before, after = row.context
    own = encoded.begins >= before
    if after:
        own &= encoded.begins < len(row.value) - after
    trained = encoded.mask_of_tokens_for_characters(row.first_trained, len(row.value) + 1)
    return encoded.tokens[own], trained[own]


def _batches(items: Iterable[_Item], *, size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yields lists of `items`, which end with the item that brings their sizes to TEXT_CHARACTERS."""
    batch, size = list[_Item](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) >= _BATCH_RECORDS or size >= TEXT_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch  # perhaps of none, for the notes about records that were skipped


def tokenize_tasks(
    tasks: Sequence[Task], settings: TokenizeSettings, *, processes: int
) -> Generator[TokenizedTask]:
    """Yields the tokens of each task, in order, by up to `processes` workers; by this process for 0.

    Raises the error of a task that failed, and DataError for one that goes beyond the limits.
    """
    if not processes:
        for one in map(TaskTokenizer(settings).tokenize_task, tasks):
            yield from one
        return
    limits = NO_LIMITS if settings.trust_remote_code else settings.limits
    maker = f"the tokenizer or chat template {settings.chat_template or settings.tokenizer or 'of bytes'}"
    count, free = min(processes, len(tasks) or 1), list[Worker]()
    waiting = deque[Future[list[TokenizedTask]]]()

    def open_in(worker: Worker) -> None:
        if settings.fields.records == "messages":
            worker.call(_import_transformers, what="transformers cannot be loaded.", limits=NO_LIMITS)
        worker.call(partial(_open_task_tokenizer, settings), what=f"{maker} cannot be opened.", limits=limits)
        free.append(worker)

    def run(task: Task) -> list[TokenizedTask]:
        worker = free.pop()  # there is one for each thread, until a task fails
        what = (
            f"{task[0].path} from {task[0].begin} to {task[-1].end} is unreadable, or too much for {maker}."
        )
        fix = "conversations, and texts without blanks, of at most 3 MiB; other texts are tokenized in parts"
        found = worker.call(partial(_tokenize_task, task), what=what, limits=limits, fix=fix)
        free.append(worker)
        return found

    with ThreadPoolExecutor(count) as threads, ExitStack() as stack:
        workers = [stack.enter_context(borrow_worker()) for _ in range(count)]
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # first, if a task fails
        list(threads.map(open_in, workers))
        for task in tasks:
            waiting.append(threads.submit(run, task))
            if len(waiting) >= _TASKS_AHEAD * count:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


_OPENED: list[TaskTokenizer] = []  # in a worker, one for the tasks that follow


def _import_transformers() -> None:
    with suppress(ImportError):  # a ChatTemplate reports it
        resolve_name("transformers:AutoTokenizer")


def _open_task_tokenizer(settings: TokenizeSettings) -> None:
    _OPENED[:] = [TaskTokenizer(settings)]


def _tokenize_task(task: Task) -> Iterator[TokenizedTask]:
    return _OPENED[0].tokenize_task(task)

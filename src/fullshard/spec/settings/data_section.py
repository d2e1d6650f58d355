"""[data]: settings of the training data of a run."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fullshard.spec import value

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""
TokenDtype = Literal["uint8", "uint16", "uint32", "int16", "int32", "int64"]


class DataSourceFields(value.FrozenModel):
    """Settings of one data source: its files or dataset, and the fields of its records.

    `paths`: files, globs (`**` and `~` are expanded), or directories, which stand for the files below them;
        for `datasets`, directories that `save_to_disk` wrote
    `name`, `subset`, `split`: a dataset by name, from this machine's cache; `split` also applies to a dataset
        on disk
    `validation_paths`: held-out files, as `paths`: the validation set is exactly these, and nothing of the
        training data is held out
    `records`: content of a row of jsonl, parquet or datasets. `text`: the text in `text_field`. `messages`: a
        list of {role, content} in `messages_field`, formatted by the tokenizer's chat template. Messages in
        `completion_field` follow them, and only theirs are then answers to train on. `completion`:
        `prompt_field` and `completion_field`. `tokens`: a list of tokens in `tokens_field`; beside it,
        `labels` (-100) and `loss_mask` (0) exclude tokens from training, the 0 of an `attention_mask` is
        padding, and `position_ids` say where documents begin. Dots in the name of a field lead to a nested
        one.
    `rejected_field`: makes pairs, for a preference loss: `completion_field` has the chosen answer, and this
        field the rejected one, as text or messages. In a row without `completion_field`, the prompt's field
        has the whole chosen text or conversation, and this field the whole rejected one; the prompt is
        their common beginning.
    `chat_template_kwargs`: further variables of the chat template, such as { enable_thinking = false }. A row
        may have its own in the field `chat_template_kwargs`, which take precedence.
    `role_field`, `content_field`: names of these fields in a message. ShareGPT: `from` and `value`
    `roles`: the template's names of roles that the data names otherwise. ShareGPT: { human = "user", gpt =
        "assistant" }
    `dtype`: dtype of the tokens of a `memmap` .bin without an .idx. `memmap` reads .npy, .bin with an .idx
        beside it (Megatron-LM), and .bin of `dtype`.
    `eod_token`: token that ends a document in a `memmap` source; unset, each file is one document (each
        row of a two-dimensional .npy; an .idx marks its own documents)
    """

    paths: tuple[value.PathText, ...] = ()
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    validation_paths: tuple[value.PathText, ...] = ()
    records: Literal["text", "messages", "completion", "tokens"] = "text"
    text_field: str = "text"
    messages_field: str = "messages"
    chat_template_kwargs: value.Options = Field(default_factory=dict[str, Any])
    role_field: str = "role"
    content_field: str = "content"
    roles: Mapping[str, str] = Field(default_factory=dict[str, str])
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    rejected_field: str | None = None
    tokens_field: str = "input_ids"
    dtype: TokenDtype | None = None
    eod_token: value.NonNegativeInt | None = None

    def for_validation(self) -> Self:
        """Returns these settings with the validation files in place of the training files."""
        return self.model_copy(update={"paths": self.validation_paths})


class DataSource(DataSourceFields):
    """One of several data sources of a run.

    `weight`: exact share of the run's sequences, relative to the other weights. Either all sources have a
        weight or none. Without weights, all sources are one, whose epoch contains each token once.
    """

    source: Literal["text", "jsonl", "parquet", "datasets", "memmap"]
    weight: value.PositiveScalar | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        _check_source_fields(self.source, self)
        return self


class DataSection(DataSourceFields):
    """Settings of the training data, its tokenizer and the packing of documents into sequences.

    `source`: `stdlib`: the standard library of the running interpreter. `text`: one document per file.
        `python`: any data from `factory`. The others: docs/data.md. Unset, `stdlib`, which only the
        reference decoder trains on without being asked to.
    `sources`: several sources instead of one. The keys from `paths` to `eod_token` are explained in
        docs/data.md.
    `factory`: `package.module:make`, called with the run; `options` are its options
    `tokenizer`: a directory, a name in the Hugging Face cache or a tokenizer.json; unset, the tokens are
        bytes. Only `messages` load more of a tokenizer than its tokenizer.json.
    `chat_template`: a Jinja file that formats `messages` in place of the tokenizer's own chat template
    `eos_token`: appended to each document; unset, the tokenizer's own
    `trust_remote_code`: true runs the Python code that comes with the tokenizer, which has your permissions
        on this machine; false refuses a tokenizer that cannot be loaded without it
    `packing`: `concat` joins the documents and cuts them into full sequences. `best_fit` fills sequences with
        whole documents, cuts only longer ones, and pads. `none` has one document per sequence.
    `validation_fraction`: fraction of the tokens that is held out; 0 beside `validation_paths`
    `document_mask`: attention and positions restart with each document, and no label crosses a boundary
    `train_on`: `assistant` and `completion` both train only on answers: on the assistant's part of
        `messages`, and not on the prompt of `completion` records
    `on_error`: a corrupt record ends the run (`stop`), or is left out and counted (`skip`)
    `cache`: directory of the token cache
    `processes`: number of processes that tokenize; 0 is one per core
    `prefetch_steps`: number of steps whose microbatches are prepared in the background
    """

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "memmap", "python"] | None = None
    sources: tuple[DataSource, ...] = ()
    factory: str | None = None
    options: value.Options = Field(default_factory=dict[str, Any])
    tokenizer: value.PathText | None = None
    chat_template: value.PathText | None = None
    eos_token: str | None = None
    trust_remote_code: bool = False
    sequence_length: value.PositiveCount = 64
    packing: Literal["concat", "best_fit", "none"] = "concat"
    document_mask: bool = False
    train_on: Literal["all", "assistant", "completion"] = "all"
    on_error: Literal["stop", "skip"] = "stop"
    validation_fraction: value.Fraction = 0.05
    cache: value.PathText = "~/.cache/fullshard/data"
    processes: value.Processes = 0
    prefetch_steps: value.Count = 1

    @property
    def has_pairs(self) -> bool:
        """True if each sequence is a pair: a prompt with the chosen answer, and with the rejected one."""
        return any(source.rejected_field for source in self.sources or (self,))

    @property
    def row_length(self) -> int:
        """Tokens in a row of the model's input: a sequence, or one of the two halves of a pair."""
        return self.sequence_length // 2 if self.has_pairs else self.sequence_length

    @property
    def has_validation_files(self) -> bool:
        """True if the user names files to validate on, for any source."""
        return any(source.validation_paths for source in self.sources or (self,))

    def check_prepares_other_paths(self) -> None:
        """Raises ValueError unless [data] says how the `paths` of an evaluation are to be read."""
        sources = self.sources or (self,)
        if any(one.source in (None, "stdlib", "python") for one in sources):
            raise ValueError(
                "evaluate: paths are read as [data] says, and its source has no files: "
                'set data.source = "jsonl", for example; or call, in place of paths'
            )
        left_out = {"paths", "validation_paths", "name", "subset", "weight", "dtype", "eod_token"}
        fields = {*DataSourceFields.model_fields, "source"} - left_out
        if len({one.model_dump_json(include=fields) for one in sources}) > 1:
            raise ValueError("evaluate: paths are read as [data] says, and data.sources differ: use call")

    def source_of(self, paths: tuple[str, ...]) -> "DataSource | DataSection":
        """Returns the source of `paths` for an evaluation, with the fields of the first source."""
        first: DataSource | DataSection = self.sources[0] if self.sources else self
        update = {"paths": paths, "validation_paths": (), "name": None, "subset": None}
        return first.model_copy(update=update)

    @property
    def token_makers(self) -> set[Literal["tokenizer", "other program"]]:
        """Makers of the tokens: the tokenizer, bytes if there is none, or another program beforehand."""
        made = [s.source in ("memmap", "python") or s.records == "tokens" for s in self.sources or (self,)]
        return {"other program" if one else "tokenizer" for one in made}

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for name in ("factory", "options"):
            if self.source != "python" and getattr(self, name):
                raise ValueError(f'{name} is given; set source = "python"')
        if self.sources:
            given = [name for name in DataSourceFields.model_fields if _differs_from_default(self, name)]
            if self.source is not None or given:
                raise ValueError(f"either {given[0] if given else 'source'}, or sources, each with its own")
            weighted = sum(source.weight is not None for source in self.sources)
            if weighted not in (0, len(self.sources)):
                raise ValueError("give a weight to all sources, or to none")
            return self
        if self.source == "python" and not self.factory:
            raise ValueError('source = "python" needs factory = "package.module:make"')
        if self.source == "python" and self.validation_paths:
            raise ValueError('source = "python" validates on its own `validation`: remove validation_paths')
        if self.source in (None, "stdlib") and (self.paths or self.validation_paths):
            raise ValueError('paths are given, but source is "stdlib"; set source = "text"')
        _check_source_fields(self.source or "stdlib", self)
        return self

    @model_validator(mode="after")
    def _check_validation_train_on_and_tokenizer(self) -> Self:
        if self.has_validation_files and self.validation_fraction:
            if "validation_fraction" in self.model_fields_set:
                raise ValueError("validation_paths are the whole validation set: set validation_fraction = 0")
            object.__setattr__(self, "validation_fraction", 0.0)
        kinds = {source.records for source in self.sources} or {self.records}
        if self.train_on != "all" and kinds.isdisjoint(("messages", "completion")):
            raise ValueError(f'train_on = "{self.train_on}" needs records = "messages" or "completion"')
        if "messages" in kinds and self.tokenizer is None:
            raise ValueError('records = "messages" needs a tokenizer, whose chat template writes them out')
        if self.chat_template is not None and "messages" not in kinds:
            raise ValueError('chat_template needs records = "messages"')
        if self.eos_token is not None and self.tokenizer is None:
            raise ValueError("eos_token needs a tokenizer")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if not self.has_pairs:
            return self
        if any(source.rejected_field is None for source in self.sources):
            raise ValueError("give a rejected_field to all sources, or to none")
        if self.train_on == "all":
            raise ValueError(
                'rejected_field needs train_on = "completion" or "assistant": losses compare answers'
            )
        if "packing" in self.model_fields_set and self.packing != "none" or self.document_mask:
            raise ValueError('a pair is a sequence: leave out document_mask, and packing or set it to "none"')
        if self.sequence_length % 2:
            raise ValueError("a pair has two halves: sequence_length must be even")
        object.__setattr__(self, "packing", "none")
        return self


# Setting -> the records that it is for. A factory of Python may read any of them.
_RECORDS_OF_SETTING = {
    "text_field": "text",
    **dict.fromkeys(
        ("messages_field", "chat_template_kwargs", "role_field", "content_field", "roles"), "messages"
    ),
    "prompt_field": "completion",
    "completion_field": 'completion" or "messages',
    "rejected_field": 'completion" or "messages',
    "tokens_field": "tokens",
}


def _differs_from_default(fields: DataSourceFields, name: str) -> bool:
    return getattr(fields, name) != DataSourceFields.model_fields[name].get_default(call_default_factory=True)


def _check_paths_differ(fields: DataSourceFields) -> None:
    for key, paths in (("paths", fields.paths), ("validation_paths", fields.validation_paths)):
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"{key} has {twice[0]!r} twice; sources with weights set how often data is read")
    if both := [path for path in fields.paths if path in fields.validation_paths]:
        raise ValueError(f"{both[0]!r} is in paths and in validation_paths: remove it from one")


def _check_source_fields(source: str, fields: DataSourceFields) -> None:
    has_rows = source in ("jsonl", "parquet", "datasets")
    _check_paths_differ(fields)
    for name, records in _RECORDS_OF_SETTING.items():
        if (
            _differs_from_default(fields, name)
            and source != "python"
            and not (has_rows and fields.records in records)
        ):
            needed = f'records = "{records}"' if has_rows else "jsonl, parquet or datasets"
            raise ValueError(f"{name} is given, but it is for {needed}")
    if source == "datasets":
        if bool(fields.paths) == bool(fields.name) or (fields.paths and fields.subset is not None):
            raise ValueError(
                'source = "datasets" needs paths = ["directory"], or name = "owner/name" and maybe a subset'
            )
        return
    if source != "python" and any(
        _differs_from_default(fields, name) for name in ("name", "subset", "split")
    ):
        raise ValueError('name, subset and split are for source = "datasets"')
    if source in ("text", "jsonl", "parquet", "memmap") and not fields.paths:
        endings = {"text": "txt", "memmap": "bin"}
        raise ValueError(f'source = "{source}" needs paths = ["data/*.{endings.get(source, source)}"]')
    if source != "memmap" and (fields.dtype is not None or fields.eod_token is not None):
        raise ValueError('dtype and eod_token are for source = "memmap"')
    if source in ("text", "memmap", "stdlib") and fields.records != "text":
        raise ValueError(f'records = "{fields.records}" is for jsonl, parquet and datasets, not for {source}')

"""Conversion of the data that axolotl and TRL name (`datasets`, `test_datasets`, `dataset_name`) to [data].

Sources: axolotl's utils/schemas/datasets.py and prompt_strategies/chat_template.py, trl/scripts/utils.py.
Keys that are not converted here, such as another `type`, have rules in trainer.toml: they are lost.
"""

from pathlib import PurePosixPath
from typing import Any, NamedTuple

from fullshard.convert.rules import ConversionState, is_true_yes_on

# Readers of the package datasets, and endings of files, by data.source.
_KINDS = {
    **dict.fromkeys(("json", ".jsonl", ".json"), "jsonl"),
    **dict.fromkeys(("parquet", ".parquet"), "parquet"),
    **dict.fromkeys(("text", ".txt"), "text"),
}
_RECORDS = {"chat_template": "messages", "completion": "text", "pretrain": "text"}
# Names of fields in a dataset, and the keys of [data] that have the same value, by records.
_FIELDS = {
    "text": {"field": "text_field", "text_column": "text_field"},
    "messages": {
        "field_messages": "messages_field",
        "message_property_mappings.role": "role_field",
        "message_property_mappings.content": "content_field",
        "message_field_role": "role_field",
        "message_field_content": "content_field",
    },
}
_USUAL_ROLES = {"human": "user", "gpt": "assistant"}  # which axolotl renames by default
# Values that say what data.train_on = "assistant" does.
_TRAINS_ON_ANSWERS = {"roles_to_train": ["assistant"], "train_on_eos": "turn"}
_TRL = {"dataset_name": "path", "dataset_config": "name", "dataset_train_split": "split"}


class _Source(NamedTuple):
    """A source of [data]: its settings, and the setting that each key of the config becomes."""

    settings: dict[str, Any]
    targets: dict[str, str]

    @property
    def rows(self) -> dict[str, Any]:
        """The settings without those that say which rows of the dataset, or which files."""
        return {key: value for key, value in self.settings.items() if key not in ("paths", "split")}


def convert_datasets(state: ConversionState) -> None:
    """Sets [data] from the datasets of a config, with the tokenizer of its model."""
    sources, tests = (_read_list(state, name) for name in ("datasets", "test_datasets"))
    sources = sources or _read_list(state, "pretraining_dataset")
    single = _read_source(state, {name: key for key, name in _TRL.items() if key in state.leaves})
    sources = sources or ([single] if single else [])
    tokenizer = "tokenizer_config" if state.get("tokenizer_config") else "model_name_or_path"
    if not sources or not isinstance(state.get(tokenizer), str):
        return
    for test in tests:
        _add_validation_data(test, sources)
    joined = [source.settings for source in sources]
    if len(joined) == 1:
        state.infer_setting("data.source", joined[0]["source"], origin="the dataset")
    for settings, targets in sources:
        for key, name in targets.items():
            target, value = ("data.sources", joined) if len(joined) > 1 else (f"data.{name}", settings[name])
            state.record_setting(key, target, value=value)
        for name, value in settings.items() if len(joined) == 1 else ():
            state.infer_setting(f"data.{name}", value, origin="the dataset")
    state.record_setting(tokenizer, "data.tokenizer", value=state.get(tokenizer))
    if any(settings.get("records") == "messages" for settings in joined):
        _convert_mask_and_template(state)


def _convert_mask_and_template(state: ConversionState) -> None:
    """Sets what is trained on in conversations, and their template: a file, or the tokenizer's own."""
    state.infer_setting("data.train_on", "assistant", origin="axolotl trains on answers")
    if is_true_yes_on(state.get("train_on_inputs")):
        why = 'trains on the words of all roles: data.train_on = "all" trains on the template, too'
        state.record_unsupported("train_on_inputs", why, misses="data.train_on")
    state.record_not_needed("train_on_inputs", 'data.train_on = "assistant"')
    template, file = str(state.get("chat_template")), state.get("chat_template_jinja")
    if template in ("jinja", "None") and str(file).endswith(".jinja"):
        for key in ("chat_template_jinja", "chat_template"):
            state.record_setting(key, "data.chat_template", value=file)
    elif template.startswith("tokenizer_default"):
        state.record_not_needed("chat_template", "the tokenizer's own, which must have one")


def _add_validation_data(test: _Source, sources: list[_Source]) -> None:
    """Adds a test dataset to a source with the same kind of rows; without one, its keys are lost."""
    part, name = ("paths", "validation_paths") if "paths" in test.settings else ("split", "validation_split")
    source = next((one for one in sources if one.rows == test.rows and name not in one.settings), None)
    if source is not None:
        source.settings[name] = test.settings.get(part, "train")
        source.targets.update(dict.fromkeys(test.targets, name))


def _read_list(state: ConversionState, name: str) -> list[_Source]:
    numbers = dict.fromkeys(key.split(".")[1] for key in state.leaves if key.startswith(f"{name}."))
    items = (
        {key.removeprefix(head): key for key in state.leaves if key.startswith(head)}
        for head in (f"{name}.{number}." for number in numbers)
    )
    return [source for item in items if (source := _read_source(state, item)) is not None]


def _read_source(state: ConversionState, keys: dict[str, str]) -> _Source | None:
    """Returns the source that a dataset stands for; None if that is not known.

    keys: the keys of the config, by the dataset's own
    """
    own = {name: state.get(key) for name, key in keys.items() if state.get(key) not in (None, "")}
    path, files = own.get("path"), own.get("data_files") or own.get("path")
    paths = [str(one) for one in (files if isinstance(files, list) else [files])]
    kind = _KINDS.get(str(own.get("ds_type", path))) or _KINDS.get(PurePosixPath(paths[0]).suffix)
    is_elsewhere = "data_files" in own and path not in _KINDS  # files within a dataset
    if not isinstance(path, str) or is_elsewhere or any("://" in one for one in paths):
        return None
    is_named = kind is None and not path.startswith((".", "/", "~"))
    place = "name" if is_named else "paths"
    source = _Source({"source": kind or "datasets", place: path if is_named else paths}, {})
    named = {"path": place, "data_files": "paths", "ds_type": "source"}
    for name, target in {"name": "subset", "split": "split"}.items() if kind is None else ():
        if str(own.get(name)).isidentifier() and name in own:  # not a slice, such as train[:1%]
            source.settings[target], named[name] = own[name], target
    records = _RECORDS.get(str(own.get("type")))
    if records is None:  # for the user to decide
        why = "data.records says what a row is: text, messages, completion or tokens"
        state.record_unsupported(keys["path"], why, misses="data.records")
    else:
        source.settings["records"], named["type"] = records, "records"
        for name, target in _FIELDS[records].items():
            if name in own:
                source.settings[target], named[name] = own[name], target
    if records == "messages":
        roles = {name: others for name, others in own.items() if name.startswith("roles.")}
        renamed = {one: name[6:] for name, others in roles.items() for one in others if one != name[6:]}
        source.settings["roles"] = renamed if roles else _USUAL_ROLES
        named |= dict.fromkeys(roles, "roles")
        for name in (name for name, value in _TRAINS_ON_ANSWERS.items() if own.get(name) == value):
            state.record_not_needed(keys[name], 'data.train_on = "assistant"')
    source.targets.update({keys[name]: target for name, target in named.items() if name in own})
    return source

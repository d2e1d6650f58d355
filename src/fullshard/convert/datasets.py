"""Conversion of `datasets` and `test_datasets`, which name the data of axolotl and TRL, to [data].

Sources: axolotl's utils/schemas/datasets.py and prompt_strategies/chat_template.py, trl/scripts/utils.py.
Keys that are not converted here, such as another `type`, have rules in trainer.toml: they are lost.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, cast

from fullshard.convert.rules import ConversionState, default_run_setting, is_true_yes_on

# Readers of the package datasets, and endings of files -> data.source.
_KINDS = {"json": "jsonl", ".jsonl": "jsonl", ".json": "jsonl", "text": "text", ".txt": "text"} | {
    name: "parquet" for name in ("parquet", ".parquet")
}
_RECORDS = {"chat_template": "messages", "completion": "text", "pretrain": "text"}
# Keys of a dataset -> keys of [data] with the same value, by records.
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
# Settings of a source of [data], and the setting that each key of the config becomes.
_Source = tuple[dict[str, Any], dict[str, str]]


def convert_datasets(state: ConversionState) -> None:
    """Sets [data] from the datasets of a config, with the tokenizer of its model."""
    tokenizer = "tokenizer_config" if state.get("tokenizer_config") else "model_name_or_path"
    sources = _read_sources(state, "datasets") or _read_sources(state, "pretraining_dataset")
    if not sources or not isinstance(state.get(tokenizer), str):
        return
    for test in _read_sources(state, "test_datasets"):
        _add_validation_data(test, sources)
    joined = [settings for settings, _ in sources]
    for settings, targets in sources:
        origins = dict.fromkeys(settings, "the dataset") | {name: key for key, name in targets.items()}
        for name, origin in origins.items() if len(joined) == 1 else ():
            state.infer_setting(f"data.{name}", settings[name], origin=origin)
        for key, name in targets.items():
            target, value = (f"data.{name}", settings[name]) if len(joined) == 1 else ("data.sources", joined)
            state.record_setting(key, target, value=value)
    state.record_setting(tokenizer, "data.tokenizer", value=state.get(tokenizer))
    records = {settings.get("records") for settings in joined}
    if records == {"text"} or not is_true_yes_on(state.get("train_on_inputs")):
        state.record_not_needed("train_on_inputs", "texts as a whole, and answers alone: data.train_on")
    if "messages" in records:
        state.infer_setting("data.train_on", "assistant", origin="axolotl trains on answers")


def _add_validation_data(test: _Source, sources: list[_Source]) -> None:
    """Adds the files of a test dataset to a source with the same kind of rows, else its keys are lost."""
    paths = test[0].get("paths")
    for settings, targets in sources:
        if paths and _settings_of_rows(settings) == _settings_of_rows(test[0]):
            settings["validation_paths"] = settings.get("validation_paths", []) + paths
            targets.update(dict.fromkeys(test[1], "validation_paths"))
            break


def _settings_of_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that say what a row is, without those that have their default."""
    rows = {name: value for name, value in settings.items() if name not in ("paths", "validation_paths")}
    return {name: value for name, value in rows.items() if value != default_run_setting(f"data.{name}")}


def _read_sources(state: ConversionState, name: str) -> list[_Source]:
    numbers = dict.fromkeys(key.split(".")[1] for key in state.leaves if key.startswith(f"{name}."))
    found = (_read_source(state, f"{name}.{number}.") for number in numbers)
    return [source for source in found if source is not None]


def _read_source(state: ConversionState, head: str) -> _Source | None:
    """Returns the source that the dataset of the keys `head`… stands for; None if that is not known."""
    leaves = ((key.removeprefix(head), value) for key, value in state.leaves.items() if key.startswith(head))
    own = {name: value for name, value in leaves if value not in (None, "")}
    path, files = own.get("path"), own.get("data_files") or own.get("path")
    paths = _as_list(files)
    suffix = PurePosixPath(paths[0]).suffix if paths else ""
    kind = _KINDS.get(str(own.get("ds_type", path))) or _KINDS.get(suffix)
    is_elsewhere = "data_files" in own and path not in _KINDS  # files within a dataset
    if not isinstance(path, str) or is_elsewhere or any("://" in one for one in paths):
        return None
    place = "name" if kind is None and not path.startswith((".", "/", "~")) else "paths"
    settings: dict[str, Any] = {"source": kind or "datasets", place: path if place == "name" else paths}
    named = {"path": place, "data_files": "paths", "ds_type": "source"}
    for name, target in {"name": "subset", "split": "split"}.items() if kind is None else ():
        if str(own.get(name, "-")).isidentifier():  # not a slice, such as train[:1%]
            settings[target], named[name] = own[name], target
    records = _RECORDS.get(str(own.get("type")))
    if records is None:  # for the user to decide
        why = "data.records says what a row is: text, messages, completion or tokens"
        state.record_unsupported(f"{head}path", why, misses="data.records")
    else:
        settings["records"], named["type"] = records, "records"
    for name, target in _FIELDS.get(str(records), {}).items():
        if name in own:
            settings[target], named[name] = own[name], target
    if records == "messages":
        roles = {name.removeprefix("roles."): own[name] for name in own if name.startswith("roles.")}
        listed = [(role, one) for role, others in roles.items() for one in _as_list(others)]
        settings["roles"] = {one: role for role, one in listed if one != role} if roles else _USUAL_ROLES
        named |= dict.fromkeys((f"roles.{role}" for role in roles), "roles")
    return settings, {f"{head}{name}": target for name, target in named.items() if name in own}


def _as_list(value: Any) -> list[str]:
    return [str(one) for one in (cast(list[Any], value) if isinstance(value, list) else [value])]

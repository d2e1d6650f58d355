"""Whose config a text is, by what stands in it, and its tree of keys."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.convert.account import Format
from fullshard.spec.convert.python_source import (
    FSDP_CALLS,
    LIGHTNING_HOSTS,
    LIGHTNING_STRATEGIES,
    PythonSource,
)
from fullshard.spec.run import Run

_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "num_machines"}
_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
    "optimizer",
}
_TORCHTITAN = {"job", "training", "parallelism", "activation_checkpoint", "lr_scheduler", "metrics"}
_FORMS = (
    "an Accelerate YAML, a DeepSpeed JSON, a torchtitan TOML, or Python that calls FSDP(…), fully_shard(…), "
    "FSDP2Config(…), Fabric(…) or FSDPStrategy(…)"
)

Source = tuple[Format, dict[str, Any], list[str]]


def read_source(text: str, *, name: str, format: Format | None) -> Source:
    """(format, tree, notes). Raises SpecError for text that is of no known format, or not of `format`."""
    # The order matters: TOML's `[training]` and JSON are Python too, and JSON is YAML.
    for read in (_json, _toml, _python, _yaml):
        found = read(text, format)
        if found is not None:
            return found
    wanted = f"no config of {format}" if format else "of no format that is known here"
    raise SpecError(
        f"{name} is {wanted}.",
        got=_first_line(text),
        why=_problem(text, name),
        fix=f"{_FORMS}; --from says which it is meant to be",
    )


def _json(text: str, format: Format | None) -> Source | None:
    if format not in (None, Format.DEEPSPEED, Format.ACCELERATE):
        return None
    try:
        tree = json.loads(text)
    except ValueError:
        return None
    return _mapping(tree, format)


def _yaml(text: str, format: Format | None) -> Source | None:
    if format not in (None, Format.ACCELERATE, Format.DEEPSPEED):
        return None
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return _mapping(tree, format)


def _mapping(tree: Any, format: Format | None) -> Source | None:
    """Accelerate's or DeepSpeed's, by its keys."""
    if not isinstance(tree, Mapping) or not tree:
        return None
    keyed = _with_text_keys(cast(Mapping[Any, Any], tree))
    if format is not None:
        return format, keyed, []
    if _ACCELERATE & keyed.keys():
        return Format.ACCELERATE, keyed, []
    if _DEEPSPEED & keyed.keys():
        return Format.DEEPSPEED, keyed, []
    return None


def _with_text_keys(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """YAML's keys may be of any type."""
    return {
        str(key): _with_text_keys(cast(Mapping[Any, Any], value)) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }


def _toml(text: str, format: Format | None) -> Source | None:
    if format not in (None, Format.TORCHTITAN):
        return None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    sections = {key for key, value in tree.items() if isinstance(value, dict)}
    if format is None and sections and sections <= Run.model_fields.keys() and not sections & {"training"}:
        raise SpecError(
            "this is a run.toml already.", got=f"[{'], ['.join(sections)}]", fix="fullshard train"
        )
    if format is not None or _TORCHTITAN & sections:
        return Format.TORCHTITAN, tree, []
    return None


def _python(text: str, format: Format | None) -> Source | None:
    if format not in (None, Format.FSDP, Format.LIGHTNING):
        return None
    try:
        source = PythonSource(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if format in (None, Format.LIGHTNING):
        strategy, host = source.call(LIGHTNING_STRATEGIES), source.call(LIGHTNING_HOSTS)
        if strategy or (host and {"strategy", "devices", "precision"} & host[1].keys()):
            tree = dict(host[1]) if host else {}
            if strategy and not isinstance(tree.get("strategy"), dict):
                tree["strategy"] = strategy[1] or strategy[0]
            return Format.LIGHTNING, tree, []
    call = source.call(FSDP_CALLS) if format in (None, Format.FSDP) else None
    if call is not None:
        name, arguments, others = call
        more = f"{others} other calls were not read: the one with the most arguments was, {name}(…)"
        return Format.FSDP, arguments, [more] if others else []
    options = source.options()
    return (Format.FSDP, options, []) if options and format is not Format.LIGHTNING else None


def _problem(text: str, name: str) -> str | None:
    """Why a file whose ending says what it is could not be read as that."""
    try:
        if name.endswith(".json"):
            json.loads(text)
        elif name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith(".py"):
            PythonSource(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        return str(error).splitlines()[0]
    return None


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 80 else f"{line[:80]}…"

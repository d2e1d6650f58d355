"""Rules for keys of a config that can be converted one by one. Each format has a table, `<format>.toml`.

An entry of a table is a rule for one or several keys, or shell patterns, of its section: `["optimizer.*"]`,
or no section for keys without a dot. Keys that act together are converted by the module of their format.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal, cast

from fullshard.convert.reader import (
    AUTO,
    ConversionState,
    is_one_of_same_type,
    is_open,
    is_true_yes_on,
    is_variable,
    last_dotted_part_lower,
    parse_nonnegative_integer,
    parse_number,
    parse_positive_integer,
)
from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel
from fullshard.system.small_files import read_toml

STAGES = {0: "no_shard", 1: "zero1", 2: "shard_grad_op", 3: "full_shard"}  # of ZeRO
DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
}
# Explanations that several tables share, as `$name`.
_TEXTS = {
    "export": "checkpoints are sharded; fullshard ckpt export writes whole tensors",
    "timeout": "collectives wait for longer than the watchdog: fault_tolerance.watchdog_timeout_seconds",
    "context_method": "sharding.context_method: ranks gather keys and values, or exchange tokens for heads",
    "blocks": "the repeated blocks are found by themselves; where not, sharding.units.names takes the "
    'paths of all units, such as ["model.layers.*", "lm_head"]',
    "sync_states": "parameters are initialised shard by shard from one seed, or read straight into "
    "the shards",
}


class KeyRule(FrozenModel):
    """A rule for one key. It has exactly one of `not_needed`, `unsupported` and `sets`.

    not_needed: why the result is the same without the key, for any value
    unsupported: why the result differs, and the alternative
    misses: the key of run.toml that would express the unsupported feature, if it is one that must not be lost
    unless: values that do not request the unsupported feature, or set nothing; null never does
    switch: name of the key in the same top-level section that turns the unsupported feature on, if any
    sets: the key of run.toml to set; the next fields convert the value, which is otherwise taken as it is
    choices: converted values by the value's last dotted part in lower case; `dtypes`: use `DTYPES`
    on, off: converted values for a true value and for any other; without `off`, others request nothing
    read: name of a conversion in `_CONVERSIONS`
    why: remark on a difference between the two keys
    instead: explanation if the value cannot be converted
    """

    not_needed: str = ""
    unsupported: str = ""
    misses: str = ""
    unless: tuple[Any, ...] = (False, "none", "None", 0)
    switch: str = ""
    sets: str = ""
    choices: Mapping[str, Any] | Literal["dtypes"] | None = None
    on: Any = None
    off: Any = None
    read: str = ""
    why: str = ""
    instead: str = ""

    def convert_value(self, value: Any) -> Any:
        """Returns `value` converted for run.toml; None if it cannot be expressed there."""
        if self.choices is not None:
            choices = DTYPES if self.choices == "dtypes" else self.choices
            return choices.get(last_dotted_part_lower(value))
        if value is None or self.on is None:
            return _CONVERSIONS[self.read](value)
        return self.on if is_true_yes_on(value) else self.off


Rules = Mapping[str, KeyRule]


@cache
def load_rules(name: str) -> Rules:
    """Reads the table `<name>.toml`. Returns its rules by key or pattern, in the order of the file."""
    path = Path(__file__).with_name(f"{name}.toml")
    tables = read_toml(path)
    found: dict[str, KeyRule] = {}
    for section, entries in [("", tables), *tables.items()]:
        for keys, entry in cast(dict[str, Any], entries).items():
            if isinstance(entry, dict) and entry.keys() & {"not_needed", "unsupported", "sets"}:
                own = ((name, Template(text)) for name, text in entry.items() if isinstance(text, str))
                texts = {name: template.safe_substitute(_TEXTS) for name, template in own}
                rule = KeyRule.parse({**entry, **texts}, source=f"{path.name}, {keys}")
                found |= {section.removesuffix("*") + key: rule for key in keys.split()}
    return found


@cache
def load_other_names(name: str) -> Mapping[str, str]:
    """Reads the table [other_names] of `<name>.toml`: names in `rules` by older or shorter names."""
    return read_toml(Path(__file__).with_name(f"{name}.toml"))["other_names"]


def convert_betas(state: ConversionState, keys: tuple[str, str], *, default: tuple[float, float]) -> None:
    """Sets `optimizer.betas` from two keys, of which one may be absent: it is `default` then."""
    read = [parse_number(state.get(key)) for key in keys]
    if read != [None, None]:
        pair = [usual if one is None else one for one, usual in zip(read, default, strict=True)]
        for key in keys:
            state.record_setting(key, "optimizer.betas", value=pair)


def apply_rules(state: ConversionState, rules: Rules) -> None:
    """Records a verdict on every key that has none yet and matches a key or pattern of `rules`."""
    for key in state.keys_without_verdict():
        patterns = (rule for pattern, rule in rules.items() if fnmatchcase(key, pattern))
        rule = rules.get(key) or next(patterns, None)
        if rule is not None:
            _apply_rule(state, key, rule=rule)


def convert_trackers(state: ConversionState, key: str) -> None:
    """Sets `log.trackers` from the switches of tensorboard and wandb, whose keys are `key.format(name)`."""
    switches = {name: key.format(name) for name in ("tensorboard", "wandb")}
    wanted = [name for name, switch in switches.items() if is_true_yes_on(state.get(switch))]
    for name in wanted:
        state.record_setting(switches[name], "log.trackers", value=wanted)


def keys_without_wildcards(rules: Iterable[str]) -> list[str]:
    """Returns the keys of `rules` that are not patterns, which are suggested for misspelled keys."""
    return [key for key in rules if "*" not in key]


def _apply_rule(state: ConversionState, key: str, *, rule: KeyRule) -> None:
    if rule.not_needed:
        state.record_not_needed(key, rule.not_needed)
    elif rule.unsupported:
        _apply_rule_without_setting(state, key, rule=rule)
    else:
        _apply_rule_with_setting(state, key, rule=rule)


def _apply_rule_without_setting(state: ConversionState, key: str, *, rule: KeyRule) -> None:
    value = state.get(key)
    switch = state.get(f"{key.partition('.')[0]}.{rule.switch}")
    is_off = is_one_of_same_type(value, (None, *rule.unless))
    if not (is_true_yes_on(switch) if rule.switch else not is_off):
        state.record_not_needed(key, "as it is here")
    elif rule.misses and is_open(value):
        state.record_open(key, rule.misses)
    else:
        state.record_unsupported(key, rule.unsupported, misses=rule.misses)


def _apply_rule_with_setting(state: ConversionState, key: str, *, rule: KeyRule) -> None:
    value = state.get(key)
    # "auto" and variables can be a choice: `ShardingStrategy.FULL_SHARD` is an expression.
    converted = None if rule.choices is None and is_open(value) else rule.convert_value(value)
    is_unset = "unless" in rule.model_fields_set and is_one_of_same_type(value, rule.unless)
    if value is None or is_unset:
        state.record_not_needed(key, f"unset: {rule.sets} has its default")
    elif converted is not None:
        state.record_setting(key, rule.sets, value=converted, why=rule.why)
    elif is_open(value) or (rule.read in _NUMBERS and is_variable(value)):
        state.record_open(key, rule.sets)
    elif rule.on is not None and rule.off is None:
        state.record_not_needed(key, "off, as it is here")
    else:
        why = rule.instead or f"{rule.sets} cannot be {value!r}"
        state.record_unsupported(key, why, misses=rule.sets)


def convert_offload(state: ConversionState, *, optimizer: str, params: str) -> None:
    """Sets `offload.tier` from DeepSpeed's devices, cpu or nvme, for optimizer state and for parameters.

    optimizer, params: the keys of the devices. The strategy, and the optimizer if the config names one, must
        be set before.
    """
    places = {
        key: "cpu" if is_true_yes_on(state.get(key)) else str(state.get(key)).lower()
        for key in (optimizer, params)
    }
    if state.settings.get("sharding.strategy", "full_shard") not in ("full_shard", "hybrid_shard"):
        state.record_not_needed(params, "DeepSpeed ignores it without stage 3")
        places.pop(params)
    used = {key: place for key, place in places.items() if place in ("cpu", "nvme")}
    if not used:
        return
    drive = "nvme" if "nvme" in used.values() else "cpu"
    tier = f"{'params+' if params in used else ''}optimizer:{drive}"
    whys = {
        optimizer: "" if used.get(optimizer, drive) == drive else "both on the drive",
        params: "with the optimizer state" if optimizer not in used else "",
    }
    for key in used:
        if state.settings.get("optimizer.name", "adamw") == "adamw":
            state.record_setting(key, "offload.tier", value=tier, why=whys[key])
        else:
            state.record_unsupported(key, "only AdamW's state can be offloaded")


def parse_number_pair(value: Any) -> list[float] | None:
    """Returns a list of two numbers as floats; None for any other value."""
    read = [parse_number(one) for one in value] if isinstance(value, list) else []
    return [one for one in read if one is not None] if len(read) == 2 and None not in read else None


def strategy_for_zero_stage(stage: Any) -> str | None:
    """Returns the strategy of ZeRO stage 0 to 3; None for any other value."""
    read = parse_nonnegative_integer(stage)
    return None if read is None else STAGES.get(read)


def require_valid_zero_stage(state: ConversionState, key: str) -> None:
    """Raises SpecError for a stage that ZeRO does not have."""
    value = state.get(key)
    open_value = value in (None, AUTO) or is_variable(value)
    if not open_value and strategy_for_zero_stage(value) is None:
        raise SpecError(f"{key} is not valid.", got=repr(value), fix="0, 1, 2 or 3")


def _adapter_targets(value: Any) -> Any:
    """Returns names of modules from a list, or a text with commas; "all-linear" from any text with `all`."""
    if isinstance(value, str):
        return "all-linear" if value.startswith("all") else [one.strip() for one in value.split(",")]
    return value if isinstance(value, list) and value else None


def _trackers(value: Any) -> list[str] | None:
    """Returns the names of trackers; None if one of them is not supported."""
    named = [value] if isinstance(value, str) else value
    known = ["tensorboard", "wandb", "mlflow"]
    if named in (["none"], []):
        return []
    return named if isinstance(named, list) and named and all(one in known for one in named) else None


_NUMBERS = ("number", "whole", "positive", "pair", "zero_stage")
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "number": parse_number,
    "whole": parse_nonnegative_integer,
    "positive": parse_positive_integer,
    "pair": parse_number_pair,
    "switch": lambda value: None if value is None else is_true_yes_on(value),
    "text": lambda value: value if isinstance(value, str) else None,
    "zero_stage": strategy_for_zero_stage,
    "fraction": lambda value: read if (read := parse_number(value)) is not None and 0 <= read < 1 else None,
    "list": lambda value: value if isinstance(value, list) else None,
    "targets": _adapter_targets,
    "trackers": _trackers,
    "recompute": lambda value: None if value is None else "none" if value is False else "full",
}

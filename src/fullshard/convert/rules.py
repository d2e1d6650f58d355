"""The verdict on each key of a config, and rules for the keys that can be converted one by one.

Each format has a table of rules, `<format>.toml`. An entry is a rule for one or several keys, or shell
patterns, of its section: `["optimizer.*"]`, or no section for keys without a dot. Keys that act together are
converted by the module of their format.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import setting_value
from fullshard.spec.value import FrozenModel
from fullshard.system.small_files import read_toml

AUTO = "auto"
# Settings that must not be lost: how it is sharded and computed, and what is trained on what, and how.
_NOT_TO_BE_LOST = ("sharding.strategy", "sharding.tensor_parallel", "precision.mode")
_SECTIONS_NOT_TO_BE_LOST = ("model", "data", "train", "optimizer", "schedule", "adapter")
_CAN_BE_LOST = ("train.microbatch", "train.validate_every")
_LIST_ITEM = re.compile(r"\.\d+\.")


class ConfigFormat(StrEnum):
    """The tool that a config belongs to. `trainer` is transformers' Trainer, TRL or LLaMA-Factory."""

    ACCELERATE = "accelerate"
    AXOLOTL = "axolotl"
    DEEPSPEED = "deepspeed"
    TORCHTITAN = "torchtitan"
    TRAINER = "trainer"


class KeyVerdict(StrEnum):
    """The verdict on a key.

    taken: the key exists here under its own name
    renamed: the key exists here under another name
    open: the file has no value, but "auto", which a trainer fills in
    not needed: the result is the same without it
    not supported: the result differs
    unknown: the format has no such key, as far as is known here
    """

    TAKEN = "taken"
    RENAMED = "renamed"
    OPEN = "open"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


class KeyResult(FrozenModel):
    """The verdict on one key.

    key, value: the key and its value in the config
    verdict: see `KeyVerdict`
    sets: the key of run.toml that `key` sets; empty if it sets none
    misses: the key of run.toml that expresses what `key` requests, and which `key` does not set; or empty
    why: a short explanation
    """

    key: str
    value: Any
    verdict: KeyVerdict
    sets: str = ""
    misses: str = ""
    why: str = ""

    @property
    def is_lost(self) -> bool:
        """True if `key` requests what the run lacks, and must not be lost, or if it is unknown.

        "auto", null and an empty section request nothing.
        """
        if self.value in (None, AUTO, {}):
            return False
        is_of_training = self.misses.partition(".")[0] in _SECTIONS_NOT_TO_BE_LOST
        is_missed = self.misses in _NOT_TO_BE_LOST or (is_of_training and self.misses not in _CAN_BE_LOST)
        return is_missed or self.verdict is KeyVerdict.UNKNOWN

    @property
    def verdict_text(self) -> str:
        """The verdict, the key that is set and the explanation, on one line."""
        target = f" -> {self.sets}" if self.sets else ""
        return f"{self.verdict}{target}{f': {self.why}' if self.why else ''}"


class ConversionState:
    """A config, with the verdicts and settings recorded so far.

    Only the first verdict on a key counts. For a key that the config lacks, only settings are recorded.

    leaves: values of the config by dotted key (see `iterate_leaves`)
    key_results: verdicts by key
    settings: values by dotted key of run.toml
    origins: for each of `settings`, the key of the config or the reason that it comes from
    notes: remarks that do not belong to a single key
    decisions: what the file leaves to the user, and what run.toml has until then; the ranks first
    ranks: number of ranks, if known
    original_names: names in the config of the keys that `rename_keys` renamed
    """

    def __init__(self, tree: Mapping[str, Any], *, ranks: int | None = None) -> None:
        self.leaves = dict(iterate_leaves(tree))
        self.key_results: dict[str, KeyResult] = {}
        self.settings: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.decisions: list[str] = []
        self.ranks = ranks
        self.original_names: dict[str, str] = {}

    def get(self, key: str) -> Any:
        return self.leaves.get(key)

    def rename_keys(self, names: Mapping[str, str]) -> None:
        """Renames keys by `names` (older -> present name). Of a key that has both, the present one counts."""
        for key, name in names.items():
            if name in self.leaves:
                self.record_not_needed(key, f"{name} says it")
            elif key in self.leaves:
                self.leaves = {name if one == key else one: value for one, value in self.leaves.items()}
                self.original_names[name] = key

    def keys_without_verdict(self) -> list[str]:
        return [key for key in self.leaves if key not in self.key_results]

    def checked_positive_integer(self, key: str, *, unset: tuple[Any, ...] = ()) -> int | None:
        """Returns the whole number over 0 that `key` has; None if it is absent, "auto", or one of `unset`.

        Raises SpecError for any other value.
        """
        value = self.get(key)
        if is_one_of_same_type(value, (None, AUTO, *unset)):
            return None
        if (count := parse_positive_integer(value)) is None:
            name = self.original_names.get(key, key)
            raise SpecError(f"{name} is not valid.", got=repr(value), fix="a whole number over 0")
        return count

    def record_setting(self, key: str, target: str, *, value: Any, why: str = "") -> None:
        """Sets `target` of run.toml to `value`, or adds a table's other keys to it.

        If another value is set already, `key` is not supported.
        """
        before = self.settings.setdefault(target, value)
        if (
            isinstance(before, dict)
            and isinstance(value, dict)
            and before.keys().isdisjoint(cast(Any, value))
        ):
            self.settings[target] = {**cast(Any, before), **value}
        elif before != value:
            first = self.origins.get(target, "something else")
            self.record_unsupported(key, f"{first} has set {target} = {before!r} already", misses=target)
            return
        self.origins.setdefault(target, key)
        same = key.rpartition(".")[2] == target.rpartition(".")[2]
        self._record_first_verdict(
            key, KeyVerdict.TAKEN if same else KeyVerdict.RENAMED, why=why, sets=target
        )

    def infer_setting(self, target: str, value: Any, *, origin: str) -> None:
        """Sets `target`, unless it is set, to a value that follows from `origin`, a key or a reason."""
        if target not in self.settings:
            self.settings[target], self.origins[target] = value, origin

    def infer_global_batch(self, sequences_per_rank: int, *, origin: str, model_parallel: int = 1) -> None:
        """Sets `train.global_batch`, unless it is set, to `sequences_per_rank` × ranks.

        If their number is not known, sets one rank's, and adds a decision.
        model_parallel: number of ranks that share each sequence, and count as one
        """
        if "train.global_batch" in self.settings:
            return
        origin = f"{sequences_per_rank} of each rank ({origin})"
        ranks = max(1, (self.ranks or 1) // model_parallel)
        self.infer_setting("train.global_batch", sequences_per_rank * ranks, origin=origin)
        if self.ranks is None:
            self.decisions.insert(
                0,
                "the number of ranks, which the file does not have: --ranks N multiplies "
                f"train.global_batch = {sequences_per_rank}, which is one rank's",
            )

    def set_default_of_other_tool(self, target: str, value: Any, *, why: str) -> None:
        """Sets `target`, unless it is set, to the other tool's default if fullshard's differs (with note)."""
        if target not in self.settings and default_run_setting(target) != value:
            self.infer_setting(target, value, origin=why)
            self.notes.append(f"{target} = {value!r}: {why}")

    def record_not_needed(self, key: str, why: str) -> None:
        """Records that the result is the same without `key`."""
        self._record_first_verdict(key, KeyVerdict.NOT_NEEDED, why=why)

    def record_unsupported(self, key: str, why: str, *, misses: str = "") -> None:
        """Records that the result differs from what `key` requests; `misses`: see `KeyResult`."""
        self._record_first_verdict(key, KeyVerdict.NOT_SUPPORTED, why=why, misses=misses)

    def record_auto_value(self, key: str, target: str) -> None:
        """Records that the value of `key`, which `target` expresses, is "auto"."""
        self._record_first_verdict(key, KeyVerdict.OPEN, why="", misses=target)

    def record_unknown_keys(self, known: list[str]) -> None:
        """Records keys without a verdict as unknown, with a similar `known` one; empty tables as unneeded."""
        for key in self.keys_without_verdict():
            if self.get(key) == {} and any(one.startswith(f"{key}.") for one in known):
                self.record_not_needed(key, "empty")
                continue
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            why = f"no such key here; is {near[0]} meant?" if near else "no key of this format is called so"
            self._record_first_verdict(key, KeyVerdict.UNKNOWN, why=why)

    def _record_first_verdict(
        self, key: str, verdict: KeyVerdict, *, why: str, sets: str = "", misses: str = ""
    ) -> None:
        if key in self.leaves and key not in self.key_results:
            self.key_results[key] = KeyResult(
                key=key, value=self.get(key), verdict=verdict, sets=sets, misses=misses, why=why
            )


def iterate_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each value in nested mappings that is not a mapping, or an empty one.

    A list of mappings is like a mapping of numbers: `datasets.0.path`.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        items = cast(list[Any], value) if isinstance(value, list) else []
        if items and all(isinstance(one, Mapping) for one in items):
            value = {str(number): one for number, one in enumerate(items)}
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield key, value


def default_run_setting(target: str) -> Any:
    """Returns the default of a dotted key of run.toml; a list instead of a tuple."""
    value = setting_value(Run(), target)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def parse_number(value: Any) -> float | None:
    """Returns `value` as a float, also if it is text (YAML reads `1e-4` as text); None for others."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def parse_nonnegative_integer(value: Any) -> int | None:
    """Returns `value` as an int if it is a whole number of at least 0, also as text; otherwise None."""
    read = parse_number(value)
    return int(read) if read is not None and read >= 0 and read.is_integer() else None


def parse_positive_integer(value: Any) -> int | None:
    """Returns `value` as an int if it is a whole number over 0, also as text; otherwise None."""
    return parse_nonnegative_integer(value) or None


def is_true_yes_on(value: Any) -> bool:
    """Returns True for True, 1, and the texts `true`, `yes`, `on` and `1`, in any case."""
    return str(value).lower() in ("true", "yes", "on", "1", "1.0")


def is_one_of_same_type(value: Any, values: Iterable[Any]) -> bool:
    """Returns True if `value` equals one of `values` and has its type: 0 is not False."""
    return any(type(value) is type(one) and value == one for one in values)


def last_dotted_part_lower(value: Any) -> str:
    """Returns the text after the last dot, in lower case: `full_shard` for `ShardingStrategy.FULL_SHARD`."""
    return str(value).rpartition(".")[2].lower()


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
    "gathered_keys": "sharding.context_parallel: ranks gather keys and values",
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
    unless: values that request nothing (the default is for `unsupported` alone); null never requests anything
    switch: name of the key in the same top-level section that turns the feature on, if any
    sets: the key of run.toml to set; the next fields convert the value, which is otherwise taken as it is
    choices: converted values by the value's last dotted part in lower case
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
    choices: Mapping[str, Any] | None = None
    on: Any = None
    off: Any = None
    read: str = ""
    why: str = ""
    instead: str = ""

    def convert_value(self, value: Any) -> Any:
        """Returns `value` converted for run.toml; None if it cannot be expressed there."""
        if self.choices is not None:
            return self.choices.get(last_dotted_part_lower(value))
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
def load_table(name: str, table: str) -> dict[str, Any]:
    """Reads a table of `<name>.toml` that has no rules, such as the tool's defaults.

    [other_names] has the names in the rules by older or shorter names, for `ConversionState.rename_keys`.
    """
    return read_toml(Path(__file__).with_name(f"{name}.toml"))[table]


def convert_betas(state: ConversionState, keys: tuple[str, str], *, default: tuple[float, float]) -> None:
    """Sets `optimizer.betas` from two keys, of which one may be absent: it is `default` then."""
    read = [parse_number(state.get(key)) for key in keys]
    if read != [None, None]:
        pair = [usual if one is None else one for one, usual in zip(read, default, strict=True)]
        for key in keys:
            state.record_setting(key, "optimizer.betas", value=pair)


def apply_rules(state: ConversionState, rules: Rules) -> None:
    """Records a verdict on every key that has none yet and matches a key or pattern of `rules`.

    A key within a list of mappings without a rule of its own has that of the list.
    """
    for key in state.keys_without_verdict():
        patterns = (rule for pattern, rule in rules.items() if fnmatchcase(key, pattern))
        rule = rules.get(key) or next(patterns, None) or rules.get(_LIST_ITEM.split(key)[0])
        if rule is not None:
            if rule.not_needed:
                state.record_not_needed(key, rule.not_needed)
            elif rule.unsupported:
                _apply_unsupported_rule(state, key, rule=rule)
            else:
                _apply_rule_with_setting(state, key, rule=rule)


def convert_tracker_switches(state: ConversionState, switch_pattern: str) -> None:
    """Sets `log.trackers` from tensorboard's and wandb's switches: the keys `switch_pattern.format(name)`."""
    switches = {name: switch_pattern.format(name) for name in ("tensorboard", "wandb")}
    wanted = [name for name, switch in switches.items() if is_true_yes_on(state.get(switch))]
    for name in wanted:
        state.record_setting(switches[name], "log.trackers", value=wanted)


def list_exact_keys(rules: Iterable[str]) -> list[str]:
    """Returns the keys of `rules` that are not patterns, which are suggested for misspelled keys."""
    return [key for key in rules if not {*"*?"} & {*key}]


def _apply_unsupported_rule(state: ConversionState, key: str, *, rule: KeyRule) -> None:
    value = state.get(key)
    switch = state.get(_key_of_switch(key, rule))
    is_off = is_one_of_same_type(value, (None, *rule.unless))
    if not (is_true_yes_on(switch) if rule.switch else not is_off):
        state.record_not_needed(key, "as it is here")
    elif rule.misses and value == AUTO:
        state.record_auto_value(key, rule.misses)
    else:
        state.record_unsupported(key, rule.unsupported, misses=rule.misses)


def _key_of_switch(key: str, rule: KeyRule) -> str:
    return f"{key.partition('.')[0]}.{rule.switch}"


def _apply_rule_with_setting(state: ConversionState, key: str, *, rule: KeyRule) -> None:
    value = state.get(key)
    # "auto" can be a choice.
    converted = None if rule.choices is None and value == AUTO else rule.convert_value(value)
    is_unset = "unless" in rule.model_fields_set and is_one_of_same_type(value, rule.unless)
    is_off = rule.switch and not is_true_yes_on(state.get(_key_of_switch(key, rule)))
    if value is None or is_unset or is_off:
        state.record_not_needed(key, "requests nothing")
    elif converted is not None:
        state.record_setting(key, rule.sets, value=converted, why=rule.why)
    elif value == AUTO:
        state.record_auto_value(key, rule.sets)
    elif rule.on is not None and rule.off is None:
        state.record_not_needed(key, "off, as it is here")
    else:
        why = rule.instead or f"{rule.sets} cannot be {value!r}"
        state.record_unsupported(key, why, misses=rule.sets)


def parse_number_pair(value: Any) -> list[float] | None:
    """Returns a list of two numbers as floats; None for any other value."""
    read = [parse_number(one) for one in value] if isinstance(value, list) else []
    return [one for one in read if one is not None] if len(read) == 2 and None not in read else None


def strategy_for_zero_stage(stage: Any) -> str | None:
    """Returns the strategy of ZeRO stage 0 to 3; None for any other value."""
    read = parse_nonnegative_integer(stage)
    return None if read is None else STAGES.get(read)


def _parse_adapter_targets(value: Any) -> Any:
    if isinstance(value, str):
        return "all-linear" if value.startswith("all") else [one.strip() for one in value.split(",")]
    return value if isinstance(value, list) and value else None


def _parse_tracker_names(value: Any) -> list[str] | None:
    """Returns the names of trackers; None if one of them is not supported."""
    named = [value] if isinstance(value, str) else value
    known = ["tensorboard", "wandb"]
    if named in (["none"], []):
        return []
    return named if isinstance(named, list) and named and all(one in known for one in named) else None


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "number": parse_number,
    "whole": parse_nonnegative_integer,
    "steps": lambda value: _CONVERSIONS["fraction"](value) or parse_nonnegative_integer(value),
    "positive": parse_positive_integer,
    "pair": parse_number_pair,
    "switch": lambda value: None if value is None else is_true_yes_on(value),
    "text": lambda value: value if isinstance(value, str) else None,
    "zero_stage": strategy_for_zero_stage,
    "fraction": lambda value: read if (read := parse_number(value)) is not None and 0 <= read < 1 else None,
    "list": lambda value: value if isinstance(value, list) else None,
    "targets": _parse_adapter_targets,
    "trackers": _parse_tracker_names,
}

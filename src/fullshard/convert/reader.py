"""State of a conversion: the verdict on each key of a config, and the settings of the resulting run.toml."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel

AUTO = "auto"
# Settings that must not be lost: how it is sharded and computed, and what is trained on what, and how.
_NOT_TO_BE_LOST = ("sharding.strategy", "sharding.tensor_parallel", "precision.mode")
_SECTIONS_NOT_TO_BE_LOST = ("model", "data", "train", "optimizer", "schedule", "adapter")
_CAN_BE_LOST = ("train.microbatch", "train.validate_every")


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
    open: the file has no value, but "auto", which a trainer fills in, or a variable, such as `${STAGE}`
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


class UnevaluatedExpression(str):
    """Text of a variable (`${STAGE}`), whose value the file leaves open."""

    __slots__ = ()


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

    Only the first verdict on a key counts. A verdict on a key that the config lacks is ignored.

    leaves: values of the config by dotted key (see `iterate_leaves`)
    key_results: verdicts by key
    settings: values by dotted key of run.toml
    origins: for each of `settings`, the key of the config or the reason that it comes from
    notes: remarks that do not belong to a single key
    ranks: number of ranks, if known
    original_names: names in the config of the keys that `rename_keys` renamed
    """

    def __init__(self, tree: Mapping[str, Any], *, ranks: int | None = None) -> None:
        self.leaves = dict(iterate_leaves(tree))
        self.key_results: dict[str, KeyResult] = {}
        self.settings: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.ranks = ranks
        self.original_names: dict[str, str] = {}

    def get(self, key: str) -> Any:
        """Returns the value of `key`, or None if it is absent."""
        return self.leaves.get(key)

    def rename_keys(self, names: Mapping[str, str]) -> None:
        """Renames older or shorter names of keys: `names` has the present name of each, which counts."""
        for key, name in names.items():
            if name in self.leaves:
                self.record_not_needed(key, f"{name} says it")
            elif key in self.leaves:
                self.leaves = {name if one == key else one: value for one, value in self.leaves.items()}
                self.original_names[name] = key

    def keys_without_verdict(self) -> list[str]:
        """Returns the keys without a verdict."""
        return [key for key in self.leaves if key not in self.key_results]

    def checked_positive_integer(self, key: str, *, unset: tuple[Any, ...] = ()) -> int | None:
        """Returns the whole number over 0 that `key` has; None if it is absent, "auto", or one of `unset`.

        Also returns None if the value is known only at run time. Raises SpecError for any other value.
        """
        value = self.get(key)
        if is_variable(value) or is_one_of_same_type(value, (None, AUTO, *unset)):
            return None
        if (count := parse_positive_integer(value)) is None:
            name = self.original_names.get(key, key)
            raise SpecError(f"{name} is not valid.", got=repr(value), fix="a whole number over 0")
        return count

    def record_setting(self, key: str, target: str, *, value: Any, why: str = "") -> None:
        """Sets `target` of run.toml to the `value` of `key`, unless another key has set another value."""
        if isinstance(value, UnevaluatedExpression):
            self.record_open(key, target)
            return
        before = self.settings.setdefault(target, value)
        if before != value:
            first = self.origins.get(target, "something else")
            self.record_unsupported(key, f"{first} has set {target} = {before!r} already", misses=target)
            return
        self.origins.setdefault(target, key)
        same = key.rpartition(".")[2] == target.rpartition(".")[2]
        self._record_verdict(key, KeyVerdict.TAKEN if same else KeyVerdict.RENAMED, why=why, sets=target)

    def infer_setting(self, target: str, value: Any, *, origin: str) -> None:
        """Sets `target`, unless it is set, to a value that follows from `origin`, a key or a reason."""
        if target not in self.settings:
            self.settings[target], self.origins[target] = value, origin

    def infer_global_batch(self, sequences: int, *, origin: str, model_parallel: int = 1) -> None:
        """Sets `train.global_batch`, unless it is set, to `sequences` × ranks (1 with a note, if unknown).

        model_parallel: number of ranks that share each sequence
        """
        if "train.global_batch" in self.settings:
            return
        origin = f"{sequences} of each rank ({origin})"
        ranks = max(1, (self.ranks or 1) // model_parallel)
        self.infer_setting("train.global_batch", sequences * ranks, origin=origin)
        if self.ranks is None:
            self.notes.append(
                f"train.global_batch = {sequences} is one rank's, for the file does not say how many there "
                "are: --ranks N multiplies it"
            )

    def set_default_of_other_tool(self, target: str, value: Any, *, why: str) -> None:
        """Sets `target`, unless it is set, to the other tool's default if fullshard's differs (with note)."""
        if target not in self.settings and default_run_setting(target) != value:
            self.infer_setting(target, value, origin=why)
            self.notes.append(f"{target} = {value!r}: {why}")

    def record_not_needed(self, key: str, why: str) -> None:
        """Records that the result is the same without `key`."""
        self._record_verdict(key, KeyVerdict.NOT_NEEDED, why=why)

    def record_unsupported(self, key: str, why: str, *, misses: str = "") -> None:
        """Records that the result differs from what `key` requests; `misses`: see `KeyResult`."""
        self._record_verdict(key, KeyVerdict.NOT_SUPPORTED, why=why, misses=misses)

    def record_open(self, key: str, target: str) -> None:
        """Records that the value of `key`, which `target` expresses, is "auto" or a variable."""
        self._record_verdict(key, KeyVerdict.OPEN, why="", misses=target)

    def record_unknown_keys(self, known: list[str]) -> None:
        """Records all keys without a verdict as unknown, each with the most similar of the `known` keys."""
        for key in self.keys_without_verdict():
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            why = f"no such key here; is {near[0]} meant?" if near else "no key of this format is called so"
            self._record_verdict(key, KeyVerdict.UNKNOWN, why=why)

    def _record_verdict(
        self, key: str, verdict: KeyVerdict, *, why: str, sets: str = "", misses: str = ""
    ) -> None:
        if key in self.leaves and key not in self.key_results:
            self.key_results[key] = KeyResult(
                key=key, value=self.get(key), verdict=verdict, sets=sets, misses=misses, why=why
            )


def iterate_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each value in nested mappings that is not a mapping, or an empty one."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield key, value


def default_run_setting(target: str) -> Any:
    """Returns the default of a dotted key of run.toml; a list instead of a tuple."""
    value: Any = Run()
    for part in target.split("."):
        value = getattr(value, part, None)  # a model of another kind has other keys
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def is_open(value: Any) -> bool:
    """Returns True for "auto" and for variables, whose value the file leaves open."""
    return value == AUTO or isinstance(value, UnevaluatedExpression)


def is_variable(value: Any) -> bool:
    """Returns True for an expression, and for a name (`BATCH_SIZE`) where a number is expected."""
    return isinstance(value, UnevaluatedExpression) or (
        isinstance(value, str) and value.isidentifier() and parse_number(value) is None
    )


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
    """Returns True for True and the texts `true`, `yes` and `on`, in any case."""
    return value is True or str(value).lower() in ("true", "yes", "on")


def is_one_of_same_type(value: Any, values: Iterable[Any]) -> bool:
    """Returns True if `value` equals one of `values` and has its type: 0 is not False."""
    return any(type(value) is type(one) and value == one for one in values)


def last_dotted_part_lower(value: Any) -> str:
    """Returns the text after the last dot, in lower case: `full_shard` for `ShardingStrategy.FULL_SHARD`."""
    return str(value).rpartition(".")[2].lower()

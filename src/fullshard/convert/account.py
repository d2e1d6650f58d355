"""The verdict on each key of a config, and the settings of a run.toml that the config sets."""

import difflib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, cast

from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel


class Format(StrEnum):
    """The tool that a config belongs to."""

    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    LIGHTNING = "lightning"
    TORCHTITAN = "torchtitan"


class KeyVerdict(StrEnum):
    """The verdict on a key.

    taken: the key exists here under its own name
    renamed: the key exists here under another name
    not needed: the result is the same without it
    not supported: the result differs
    unknown: the format has no such key, as far as is known here
    """

    TAKEN = "taken"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


class SourceText(str):
    """Source text of a value that the converted program would only know when it runs."""

    __slots__ = ()


class KeyResult(FrozenModel):
    """The verdict on one key.

    key, value: the key and its value in the config
    verdict: see `KeyVerdict`
    sets: the key of run.toml that it sets, if any
    why: a short explanation
    """

    key: str
    value: Any
    verdict: KeyVerdict
    sets: str = ""
    why: str = ""


class ConfigReader:
    """A config while it is read. Each leaf gets one verdict: by `set`, by `say`, or, in `close`, as unknown.

    leaves: values by dotted key: everything in the nested mappings that is not a mapping, and empty mappings
    said: verdicts by key
    settings: values by key of run.toml
    origins: for each of `settings`, the key of the config that it comes from
    ranks: number of ranks, if known
    """

    def __init__(self, tree: Mapping[str, Any], *, ranks: int | None = None) -> None:
        self.leaves = dict(leaves(tree))
        self.said: dict[str, KeyResult] = {}
        self.settings: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.ranks = ranks

    def get(self, key: str) -> Any:
        """Returns the value of `key`, or None if it is absent."""
        return self.leaves.get(key)

    def unread(self) -> list[str]:
        """Returns the keys without a verdict."""
        return [key for key in self.leaves if key not in self.said]

    def set(self, key: str, target: str, *, value: Any, why: str = "") -> None:
        """Records that `key` sets `target` to `value`. A target that another key has set differently keeps
        its value.
        """
        if isinstance(self.leaves.get(key), SourceText) and isinstance(value, SourceText):
            self.say(key, KeyVerdict.NOT_SUPPORTED, why=f"known only when the program runs: set {target}")
            return
        before = self.settings.setdefault(target, value)
        if before != value:
            first = self.origins.get(target, "something else")
            self.say(key, KeyVerdict.NOT_SUPPORTED, why=f"{first} has set {target} = {before!r} already")
            return
        self.origins.setdefault(target, key)
        same = key.rpartition(".")[2] == target.rpartition(".")[2]
        verdict = KeyVerdict.TAKEN if same else KeyVerdict.RENAMED
        self._note(key, KeyResult(key=key, value=self.leaves.get(key), verdict=verdict, sets=target, why=why))

    def say(self, key: str, verdict: KeyVerdict, *, why: str) -> None:
        """Records the verdict on `key`, which sets nothing. Absent keys are ignored."""
        self._note(key, KeyResult(key=key, value=self.leaves.get(key), verdict=verdict, why=why))

    def set_default(self, target: str, value: Any, *, why: str) -> None:
        """Sets `target`, which no key sets, to the other tool's default. It is noted if the default here
        differs.
        """
        if target not in self.settings and default(target) != value:
            self.settings[target] = value
            self.origins[target] = why
            self.notes.append(f"{target} = {value!r}: {why}")

    def close(self, known: list[str]) -> None:
        """Records the remaining keys as unknown, each with the nearest of the `known` keys."""
        for key in self.unread():
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            why = f"no such key here; is {near[0]} meant?" if near else "no key of this format is called so"
            self.say(key, KeyVerdict.UNKNOWN, why=why)

    def _note(self, key: str, said: KeyResult) -> None:
        if key in self.leaves:
            self.said.setdefault(key, said)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for everything that is not a mapping, and for empty mappings."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield key, value


def default(target: str) -> Any:
    """Returns the default of a key of run.toml."""
    value: Any = Run()
    for part in target.split("."):
        value = getattr(value, part)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value

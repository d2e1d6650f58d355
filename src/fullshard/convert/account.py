"""What is said of each key of a config, and what it sets in a run.toml."""

import difflib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, cast

from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel


class Format(StrEnum):
    """Whose config it is."""

    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    LIGHTNING = "lightning"
    TORCHTITAN = "torchtitan"


class KeyVerdict(StrEnum):
    """What became of a key.

    `taken` under its own name, `renamed`, `not needed` (the result is the same without), `not supported`
    (the result is another), `unknown`: no key of that format, as far as is known here.
    """

    TAKEN = "taken"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


class SourceText(str):
    """A value that only the program that is converted would know when it runs: its text."""

    __slots__ = ()


class KeyResult(FrozenModel):
    """What became of `key`, whose value was `value`: `sets` is the key of run.toml, `why` a word on it."""

    key: str
    value: Any
    verdict: KeyVerdict
    sets: str = ""
    why: str = ""


class ConfigReader:
    """A config while it is read. Every leaf is spoken of once: `set`, `say`, or, at the end, as unknown.

    `tree`: nested mappings; what is no mapping, or is empty, is a leaf, and its key is the path to it, with
    dots. `settings`: keys of run.toml. `origins`: the keys of the config that they come from. `ranks`: how
    many there will be, where that is known.
    """

    def __init__(self, tree: Mapping[str, Any], *, ranks: int | None = None) -> None:
        self.leaves = dict(leaves(tree))
        self.said: dict[str, KeyResult] = {}
        self.settings: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.ranks = ranks

    def get(self, key: str) -> Any:
        """The value of `key`; None where it is absent."""
        return self.leaves.get(key)

    def unread(self) -> list[str]:
        """The keys that nothing has been said of."""
        return [key for key in self.leaves if key not in self.said]

    def set(self, key: str, target: str, *, value: Any, why: str = "") -> None:
        """`key` sets `target` to `value`. A target that another key has set otherwise keeps its value."""
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
        """What becomes of `key`, which sets nothing. Absent keys are passed over."""
        self._note(key, KeyResult(key=key, value=self.leaves.get(key), verdict=verdict, why=why))

    def set_default(self, target: str, value: Any, *, why: str) -> None:
        """`target`, which no key says, is `value` by default there; noted where the default here differs."""
        if target not in self.settings and default(target) != value:
            self.settings[target] = value
            self.origins[target] = why
            self.notes.append(f"{target} = {value!r}: {why}")

    def close(self, known: list[str]) -> None:
        """What is left is unknown; the nearest of the `known` keys is named."""
        for key in self.unread():
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            why = f"no such key here; is {near[0]} meant?" if near else "no key of this format is called so"
            self.say(key, KeyVerdict.UNKNOWN, why=why)

    def _note(self, key: str, said: KeyResult) -> None:
        if key in self.leaves:
            self.said.setdefault(key, said)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no mapping, or an empty one."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield key, value


def default(target: str) -> Any:
    """The default of a key of run.toml."""
    value: Any = Run()
    for part in target.split("."):
        value = getattr(value, part)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value

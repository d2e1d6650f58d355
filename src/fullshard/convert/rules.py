"""Rules: the meaning of a config key as a value, so that a format is a table of rules."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fullshard.convert.account import ConfigReader, KeyVerdict, SourceText
from fullshard.errors import SpecError

AUTO = "auto"


@dataclass(frozen=True)
class Sets:
    """The key sets `target` to `turned(value)`.

    turned: conversion of the value; None means that it cannot be expressed here
    why: remark on a difference
    instead: explanation if the value cannot be expressed
    """

    target: str
    turned: Callable[[Any], Any] = lambda value: value
    why: str = ""
    instead: str = ""


@dataclass(frozen=True)
class Maps:
    """The key sets `target` to the entry of `choices` for its value in lower case.

    why: remark on a difference
    instead: explanation for values that are not in `choices`
    without: values that request nothing
    """

    target: str
    choices: Mapping[str, Any]
    why: str = ""
    instead: str = ""
    without: tuple[Any, ...] = ()


@dataclass(frozen=True)
class NotNeeded:
    """The key is not needed, whatever its value."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """The feature of the key does not exist here. A value in `without` does not request it."""

    instead: str
    without: tuple[Any, ...] = (False, None, "none", "None", 0)


@dataclass(frozen=True)
class Section:
    """A section that `<section>.<switch>` turns on. Its feature does not exist here; off, it requests
    nothing.
    """

    instead: str
    switch: str = "enabled"


Rule = Sets | Maps | NotNeeded | Unsupported | Section
Rules = Mapping[str, Rule]

OFF = "as it is here"


def follow(reading: ConfigReader, rules: Rules, *, named: Callable[[str], str] = lambda key: key) -> None:
    """Gives a verdict on every key that has none yet and matches a rule.

    rules: by key or shell pattern; the first match counts
    named: maps a key of the config to its name in `rules`
    """
    for key in reading.unread():
        rule = _rule_for(named(key), rules)
        if rule is not None:
            _follow(reading, key, rule=rule)


def each(section: str, names: str, *, rule: Rule) -> dict[str, Rule]:
    """Returns `rule` for every key of `section` in `names`, which are separated by blanks."""
    return {f"{section}.{name}": rule for name in names.split()}


def plain_keys(rules: Rules) -> list[str]:
    """Returns the keys without wildcards, which are suggested for misspelled keys."""
    return [key for key in rules if "*" not in key]


def _rule_for(key: str, rules: Rules) -> Rule | None:
    if key in rules:
        return rules[key]
    return next((rule for pattern, rule in rules.items() if fnmatchcase(key, pattern)), None)


def _follow(reading: ConfigReader, key: str, *, rule: Rule) -> None:
    value = reading.get(key)
    if value == AUTO and isinstance(rule, Sets | Maps):
        left = f"left open there, to be filled in by the trainer: set {rule.target}, or keep its default"
        reading.say(key, KeyVerdict.NOT_NEEDED, why=left)
    elif isinstance(rule, Sets):
        _set(reading, key, rule=rule)
    elif isinstance(rule, Maps):
        chosen = rule.choices.get(_plain(value))
        if _in(value, rule.without):
            reading.say(key, KeyVerdict.NOT_NEEDED, why=f"unset: {rule.target} has its default")
        elif chosen is None:
            known = rule.instead or f"{rule.target} has no {_plain(value)!r}"
            reading.say(key, KeyVerdict.NOT_SUPPORTED, why=known)
        else:
            reading.set(key, rule.target, value=chosen, why=rule.why)
    elif isinstance(rule, NotNeeded):
        reading.say(key, KeyVerdict.NOT_NEEDED, why=rule.why)
    elif isinstance(rule, Unsupported):
        asks = not _in(value, rule.without)
        reading.say(
            key,
            KeyVerdict.NOT_SUPPORTED if asks else KeyVerdict.NOT_NEEDED,
            why=rule.instead if asks else OFF,
        )
    else:
        on = is_on(reading.get(f"{key.partition('.')[0]}.{rule.switch}"))
        reading.say(
            key, KeyVerdict.NOT_SUPPORTED if on else KeyVerdict.NOT_NEEDED, why=rule.instead if on else OFF
        )


def _set(reading: ConfigReader, key: str, *, rule: Sets) -> None:
    value = reading.get(key)
    if value is None:
        reading.say(key, KeyVerdict.NOT_NEEDED, why=f"unset: {rule.target} has its default")
        return
    if isinstance(value, SourceText):
        reading.set(key, rule.target, value=value)
        return
    turned = rule.turned(value)
    if turned is None:
        reading.say(
            key, KeyVerdict.NOT_SUPPORTED, why=rule.instead or f"{value!r} is nothing for {rule.target}"
        )
    else:
        reading.set(key, rule.target, value=turned, why=rule.why)


def _plain(value: Any) -> str:
    """`ShardingStrategy.FULL_SHARD`, `"FULL_SHARD"`, True -> `full_shard`, `full_shard`, `true`."""
    return str(value).rpartition(".")[2].lower()


def _in(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


# Conversions of values for the tables #
def number(value: Any) -> float | None:
    """Returns a number, also of text (`1e-4`, which YAML reads as text), or None."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def whole(value: Any) -> int | None:
    """Returns a non-negative whole number; None for any other value."""
    read = number(value)
    return int(read) if read is not None and read >= 0 and read.is_integer() else None


def positive(value: Any) -> int | None:
    """Returns a whole number over 0; None for any other value."""
    return whole(value) or None


def required_count(reading: ConfigReader, key: str, *, unset: tuple[Any, ...] = ()) -> int | None:
    """Returns the whole number over 0 of `key`; None if it is absent, left open, or one of `unset`.

    Raises SpecError for any other value, because no run can express it.
    """
    value = reading.get(key)
    if _in(value, (None, AUTO, *unset)) or isinstance(value, SourceText):
        return None
    count = positive(value)
    if count is None:
        raise SpecError(f"{key} is not valid.", got=repr(value), fix="a whole number over 0")
    return count


def is_on(value: Any) -> bool:
    """Returns True for True, `true`, `yes` and `on`."""
    return value is True or str(value).lower() in ("true", "yes", "on")


def pair(value: Any) -> list[float] | None:
    """Returns two numbers; None for any other value."""
    read = [number(one) for one in value] if isinstance(value, list) else []
    return [one for one in read if one is not None] if len(read) == 2 and None not in read else None

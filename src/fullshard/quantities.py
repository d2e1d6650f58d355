"""Parsing and formatting of bytes, counts, seconds and lists of names as text for people."""

import re
from collections.abc import Mapping, Sequence

from fullshard.errors import SpecError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_BYTE_FACTORS = {unit: 1024**i for i, unit in enumerate(_BINARY)} | {
    unit: 1000**i for i, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))
}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def format_bytes(count: float) -> str:
    """Returns a readable size: `3221225472` -> `3.00 GiB`."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    power = 0
    while count >= (1023.995 if power else 1023.5) and power < len(_BINARY) - 1:
        count, power = count / 1024, power + 1
    return f"{sign}{count:.0f} B" if power == 0 else f"{sign}{count:.2f} {_BINARY[power]}"


def parse_bytes(text: str, *, source: str) -> int:
    """Returns the bytes of `"1.5 GiB"`, `"80GB"` or `"4096"`. Raises SpecError for other text of `source`."""
    what, fix = f"{source} is not a number of bytes.", f"a number and one of {', '.join(_BYTE_FACTORS)}"
    return int(_parse_number(text, {"": 1} | _BYTE_FACTORS, what=what, fix=fix))


def format_count(count: float) -> str:
    """Returns a readable count of parameters or tokens: `12_345_678` -> `12.3M`, and billions as `8.03B`."""
    return format_decimal(count).replace("G", "B")


def format_decimal(count: float) -> str:
    """Returns a readable number of FLOP or bytes, without the unit: `8_030_000_000` -> `8.03G`."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    power = 0
    while count >= 999.5 and power < len(_DECIMAL) - 1:
        count, power = count / 1000, power + 1
    if power == 0 and count == int(count):
        return f"{sign}{int(count)}"
    digits = 2 if count < 10 else 1 if count < 100 else 0
    return f"{sign}{count:.{digits}f}{_DECIMAL[power]}"


def count_text(count: float, noun: str) -> str:
    """Returns `1 rank`, `1,024 ranks`, `2.5 days`."""
    number = f"{int(count):,}" if count == int(count) else f"{count:,g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def parse_count(text: str, *, source: str) -> int:
    """Returns the count of `"15T"`, `"1.5B"` or `"65_536"`. Raises SpecError for other text of `source`."""
    factors = {unit: 1000**i for i, unit in enumerate(_DECIMAL)} | {"B": 1000**3}
    plain, fix = text.replace("_", "").replace(",", ""), "a number, optionally followed by k, M, B, T or P"
    return round(_parse_number(plain, factors, what=f"{source} is not a count.", fix=fix))


def format_trained_token_share(share: float | None) -> str:
    """Returns `loss on 20.0 % of the tokens` for 0.2; an empty text if it is all, or not known."""
    return "" if share is None or not share < 0.9995 else f"loss on {100 * share:.1f} % of the tokens"


def _parse_number(text: str, factors: Mapping[str, int], *, what: str, fix: str) -> float:
    """Returns a number times the factor of its unit, whose case does not count. Raises SpecError."""
    match, by_unit = _NUMBER.fullmatch(text), {unit.lower(): factor for unit, factor in factors.items()}
    if match is None or match[2].lower() not in by_unit:
        raise SpecError(what, got=repr(text), fix=fix)
    number = float(match[1]) * by_unit[match[2].lower()]
    if number >= 2**63:
        raise SpecError(what, got=repr(text[:60]), why="it is too large for 64 bits")
    return number


def format_seconds(seconds: float) -> str:
    """Returns a readable time: `0.0123` -> `12.3 ms`, `93` -> `1 min 33 s`, `7200` -> `2 h 00 min`."""
    if round(seconds, 4) < 1:
        return f"{seconds * 1000:.1f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def join_names(names: Sequence[str], *, most: int = 4) -> str:
    """Returns the first `most` names, and how many more there are, as a text."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Of many texts, those at each end that are shown.
SHOWN_AT_ENDS = 16


def rank_list_text(ranks: Sequence[int]) -> str:
    """Returns a text that names the ranks: [0, 1, 2, 5] -> `ranks 0-2, 5`. Leaves out some of many."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(leave_out_middle(parts))}"


def leave_out_middle(texts: Sequence[str]) -> Sequence[str]:
    """Returns `texts`, or of more than 32 the first and last 16, with the number of the rest between."""
    if len(texts) <= 2 * SHOWN_AT_ENDS:
        return texts
    left_out = f"… ({len(texts) - 2 * SHOWN_AT_ENDS} left out)"
    return [*texts[:SHOWN_AT_ENDS], left_out, *texts[-SHOWN_AT_ENDS:]]

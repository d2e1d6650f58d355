"""The page of results: predicted | measured, one table for each group of items, rendered from JSON lines."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fullshard.quantities import format_bytes, format_count, format_seconds

Result = Mapping[str, Any]

# Label and format of each figure that has a prediction, in the order of the columns.
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "allocated_bytes": ("allocated", format_bytes),
    "reserved_bytes": ("reserved", format_bytes),
    "step_seconds": ("step", format_seconds),
    "tokens_per_second": ("tokens/s", format_count),
    "mfu": ("MFU", lambda value: f"{100 * value:.1f} %"),
    "flops_per_second": ("TFLOP/s", lambda value: f"{value / 1e12:,.4g}"),
    "last_loss": ("last loss", lambda value: f"{value:.4f}"),
    "difference": ("difference", lambda value: f"{value:.2g}"),
    "seconds": ("seconds", format_seconds),
    "waits": ("waits", format_count),
    "group_bytes": ("device memory", format_bytes),
}
_PEER = "peer:"


def render_page(results: Sequence[Result]) -> str:
    """Returns the page as Markdown."""
    lines = ["# GPU programme: predicted and measured", "", *_summary_lines(results)]
    for group in dict.fromkeys(result["item"].partition("/")[0] for result in results):
        own = [result for result in results if result["item"].partition("/")[0] == group]
        lines += ["", f"## {group}", ""]
        lines += [*_table_lines(own), *_peer_lines(own), *_detail_lines(own)]
    return "\n".join(lines) + "\n"


def _summary_lines(results: Sequence[Result]) -> Iterator[str]:
    if not results:
        yield "No item has been measured yet."
        return
    counts: dict[str, int] = {}
    for result in results:
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    seconds = sum(result["seconds"] for result in results)
    counted = ", ".join(f"{count} {status}" for status, count in counts.items())
    first, last = results[0]["started"], results[-1]["started"]
    yield f"{first} to {last}; {format_seconds(seconds)} of items: {counted}."
    yield from _error_lines(results)
    machine = next((result["details"] for result in results if result["kind"] == "kernels"), {})
    known = {key: value for key, value in machine.items() if isinstance(value, str | int) and value != ""}
    if known:
        yield ""
        yield "; ".join(f"{key} {value}" for key, value in known.items())


def _error_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields the median and the worst error of the predictions of fullshard's own runs."""
    rows = [row for result in results if result["kind"] == "train" for row in result["rows"]]
    for name in ("allocated_bytes", "reserved_bytes", "step_seconds"):
        pairs = [(row["predicted"].get(name), row["measured"].get(name)) for row in rows]
        errors = [100 * abs(predicted / seen - 1) for predicted, seen in pairs if predicted and seen]
        if errors:
            middle, worst = statistics.median(errors), max(errors)
            yield ""
            label = f"predicted {FIGURES[name][0]} of {len(errors)} rows"
            yield f"{label}: off by {middle:.1f} % in the median, {worst:.1f} % at worst."


def _table_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields a table with a predicted and a measured column for each figure that any row has."""
    rows = [(result, row) for result in results for row in result["rows"]]
    names = [name for name in FIGURES if any(name in _figures(row) for _, row in rows)]
    if not names:
        return
    columns = [f"{FIGURES[name][0]}: predicted | measured" for name in names]
    yield f"| item | | {' | '.join(columns)} |"
    yield f"|---|---|{'---:|' * (2 * len(names))}"
    for result, row in rows:
        cells = [
            _cell(row[side].get(name), FIGURES[name][1])
            for name in names
            for side in ("predicted", "measured")
        ]
        name = result["item"].partition("/")[2] or result["item"]
        yield f"| {name} | {row['name']} | {' | '.join(cells)} |"


def _figures(row: Mapping[str, Any]) -> set[str]:
    return {*row["predicted"], *row["measured"]}


def _cell(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _peer_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields the speed of the group's fastest item of fullshard over each peer's, row by row."""
    ours = [result for result in results if not result["answers"].startswith(_PEER)]
    lines = list[str]()
    for peer in (result for result in results if result["answers"].startswith(_PEER)):
        for row in peer["rows"]:
            rate, best = row["measured"].get("tokens_per_second"), _fastest(ours, row["name"])
            if rate and best is not None:
                name, fastest = best
                lines.append(f"- {row['name']}: {name} runs at **{fastest / rate:.2f} ×** {peer['item']}")
    if lines:
        yield from ("", *lines)


def _fastest(results: Sequence[Result], row_name: str) -> tuple[str, float] | None:
    rates = [
        (result["item"], row["measured"]["tokens_per_second"])
        for result in results
        for row in result["rows"]
        if row["name"] == row_name and "tokens_per_second" in row["measured"]
    ]
    return max(rates, key=lambda one: one[1]) if rates else None


def _detail_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields a paragraph for each item: its settings, where the time goes, and why it has no figures."""
    for result in results:
        details = result["details"]
        yield ""
        yield f"**{result['item']}**: {result['answers']} ({result['status']}, {result['seconds']:.0f} s)"
        if result["reason"]:
            yield from ("", "```text", result["reason"], "```")
        lines = [
            f"{key}: {_detail_text(value)}" for key, value in details.items() if value not in ("", {}, [])
        ]
        if lines:
            yield from ("", *(f"- {line}" for line in lines))


def _detail_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_detail_text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_detail_text, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"

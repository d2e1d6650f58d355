"""Text in HTML. Everything in a run's records may come from a stranger, and is escaped."""

import html
from collections.abc import Iterable, Sequence

from fullshard.system.terminal import escape_control_characters


def escape(text: str) -> str:
    """Returns `text` for an HTML element or a quoted attribute, with control characters shown as escapes."""
    return html.escape(escape_control_characters(text))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Returns an HTML table.

    header: texts, which are escaped; empty for a table without
    rows: cells of HTML, which are not escaped: use `escape`, or `cell` for a cell with a class
    kind: CSS class of the table
    """
    heads = "".join(f"<th>{escape(one)}" for one in header)
    head = f"<thead><tr>{heads}" if header else ""
    body = "".join(f"<tr>{''.join(map(_wrap_cell, row))}" for row in rows)
    return f'<table class="{kind}">{head}<tbody>{body}</table>'


def cell(content: str, kind: str) -> str:
    """Returns a table cell with the HTML `content` and the CSS class `kind`, for a row of `table`."""
    return f'<td class="{kind}">{content}'


def _wrap_cell(content: str) -> str:
    return content if content.startswith("<td") else f"<td>{content}"


def percent_text(part: float, whole: float) -> str:
    """Returns the share of `part` in `whole` as `37 %`, with a decimal below 10 %."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{0 if share >= 9.95 else 1}f} %"

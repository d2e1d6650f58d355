"""Prints (label, text) lines and tables, fitted to a terminal, or else plain and 100 columns wide.

Also makes tables of HTML. Everything in a run's records may come from a stranger, so all texts are escaped.
"""

import html
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from fullshard.system.terminal import escape_control_characters, escape_to_single_line

PLAIN_COLUMNS = 100


def show_labelled_lines(rows: Iterable[tuple[str, str]], *, file: TextIO | None = None) -> None:
    """Prints (label, text) lines in two columns. Long texts continue on the lines below."""
    out: TextIO = file or sys.stdout
    rows = [(escape_control_characters(label), escape_control_characters(text)) for label, text in rows]
    console = Console(file=out, highlight=False, soft_wrap=True)
    columns = console.width if out.isatty() else PLAIN_COLUMNS
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        style = "dim" if label.startswith(" ") else "bold"
        for index, line in enumerate(_wrap_text(text, columns - width - 2)):
            shown = f"{label if index == 0 else '':<{width}}"
            if out.isatty():
                console.print(Text.assemble((shown, style), f"  {line}"))
            else:
                print(f"{shown}  {line}".rstrip(), file=out)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, file: TextIO | None = None) -> None:
    """Prints a table with the first column left-aligned and the others right-aligned."""
    out: TextIO = file or sys.stdout
    lines = list(format_table_lines(header, rows))
    if out.isatty():
        console = Console(file=out, highlight=False, soft_wrap=True)
        console.print(Text(lines[0], style="bold"))
        lines = lines[1:]
    print("\n".join(lines), file=out)


def format_table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a table, with the first column left-aligned and the others right-aligned."""
    rows = [[escape_to_single_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        padded = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"{row[0]:<{widths[0]}}", *padded]).rstrip()


class Cell(NamedTuple):
    """A cell of an HTML table with a CSS class."""

    text: str
    kind: str


def html_table(header: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, kind: str = "") -> str:
    """Returns an HTML table, which scrolls if it is too wide.

    header: empty for a table without
    kind: CSS class of the table
    """
    heads = "".join(f"<th>{escape_html(one)}" for one in header)
    head = f"<thead><tr>{heads}" if header else ""
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{head}<tbody>{body}</table></div>'


def escape_html(text: str) -> str:
    """Returns `text` for an HTML element or a quoted attribute, with control characters shown as escapes."""
    return html.escape(escape_control_characters(text))


def percent_text(part: float, whole: float) -> str:
    """Returns the share of `part` in `whole` as `37 %`, with a decimal below 10 %."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{0 if share >= 9.95 else 1}f} %"


def _html_cell(cell: str | Cell) -> str:
    if isinstance(cell, Cell):
        return f'<td class="{cell.kind}">{escape_html(cell.text)}'
    return f"<td>{escape_html(cell)}"


def _wrap_text(text: str, columns: int) -> list[str]:
    if len(text) <= columns:
        return [text]
    width = max(columns, 20)
    return wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)

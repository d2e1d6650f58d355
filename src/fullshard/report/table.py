"""Prints (label, text) lines and tables: fitted to a terminal or to $COLUMNS, or else 100 columns wide.

Also makes tables of HTML. Everything in a run's records may come from a stranger, so all texts are escaped.
"""

import html
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from fullshard.system.terminal import escape_control_characters, escape_to_single_line

PLAIN_COLUMNS = 100
LEAST_COLUMNS = 12  # of a text that is wrapped
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[kMGTP]i?B|B|h|min|m?s|days)(?!\w))")


def show_labelled_lines(rows: Iterable[tuple[str, str]], *, file: TextIO | None = None) -> None:
    """Prints (label, text) lines in two columns. Long texts continue on the lines below."""
    out: TextIO = file or sys.stdout
    rows = [(escape_control_characters(label), text) for label, text in rows]
    width = max((len(label) for label, _ in rows), default=0)
    lines = labelled_lines(rows, columns=_output_columns(out))
    if not out.isatty():
        return print("\n".join(lines), file=out)
    console = Console(file=out, highlight=False, soft_wrap=True)
    for line in lines:
        style = "dim" if line.startswith(" ") else "bold"
        console.print(Text.assemble((line[:width], style), line[width:]))
    return None


def _output_columns(out: TextIO) -> int:
    """Returns the columns of $COLUMNS if it is set, else of the terminal, or PLAIN_COLUMNS without one."""
    return Console(file=out).width if out.isatty() or os.environ.get("COLUMNS") else PLAIN_COLUMNS


def labelled_lines(rows: Iterable[tuple[str, str]], *, columns: int | None = None) -> Iterator[str]:
    """Yields lines of (label, text) in two columns. Long texts continue on the lines below.

    columns: width of the lines; None is that of the terminal, at most PLAIN_COLUMNS
    """
    columns = columns or min(PLAIN_COLUMNS, get_terminal_size((PLAIN_COLUMNS, 0)).columns)
    rows = [(escape_control_characters(label), escape_control_characters(text)) for label, text in rows]
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        for index, line in enumerate(_wrap_text(text, columns - width - 2)):
            yield f"{label if index == 0 else '':<{width}}  {line}".rstrip()


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, file: TextIO | None = None) -> None:
    """Prints a table with the first column left-aligned and the others right-aligned, as wide as fits."""
    out: TextIO = file or sys.stdout
    lines = list(format_table_lines(header, rows, columns=_output_columns(out)))
    if out.isatty():
        console = Console(file=out, highlight=False, soft_wrap=True)
        console.print(Text(lines[0], style="bold"))
        lines = lines[1:]
    print("\n".join(lines), file=out)


def format_table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int | None = None
) -> Iterable[str]:
    """Yields the lines of a table, with the first column left-aligned and the others right-aligned.

    columns: width of the lines, to which the widest cells are wrapped; None: any
    """
    rows = [[escape_to_single_line(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    while columns is not None and sum(widths) + 2 * len(widths) - 2 > columns and max(widths) > LEAST_COLUMNS:
        widths[widths.index(max(widths))] -= 1
    for row in rows:
        cells = [_wrap_text(cell, width, indent="") for cell, width in zip(row, widths, strict=True)]
        for first, *others in zip_longest(*cells, fillvalue=""):
            padded = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
            yield "  ".join([f"{first:<{widths[0]}}", *padded]).rstrip()


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


def _wrap_text(text: str, columns: int, *, indent: str = "  ") -> list[str]:
    if len(text) <= columns:
        return [text]
    width = max(columns, LEAST_COLUMNS)
    long = not indent  # a cell never leaves its column
    joined = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)  # a number and its unit stay together
    lines = wrap(joined, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=long)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]

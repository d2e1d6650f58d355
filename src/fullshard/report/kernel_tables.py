"""The times of kernels by kind, as rows of a table for the terminal and for the page."""

from collections.abc import Iterable

from fullshard.quantities import format_count, format_seconds
from fullshard.report.kernels import KernelSummary
from fullshard.report.markup import escape, percent_text, table
from fullshard.report.table import show_table

_WARNING = "Warning: "
_HEADER = ("kernels", "time", "share", "count", "FLOP/s", "of calibrated")


def kernel_table(summary: KernelSummary) -> list[tuple[str, ...]]:
    """Returns the header and a row for each kind. The last column is left out without calibrated rates."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for one in summary.kinds:
        rate, share = one.flops_per_second, one.share_of_calibrated
        rows.append(
            (
                str(one.kind),
                format_seconds(one.seconds),
                percent_text(one.seconds, summary.seconds),
                f"{one.count:,}",
                "" if rate is None else format_count(rate),
                "" if share is None else f"{100 * share:.0f} %",
            )
        )
    has_rates = any(one.share_of_calibrated is not None for one in summary.kinds)
    return rows if has_rates else [row[:-1] for row in rows]


def kernel_sentences(summary: KernelSummary) -> Iterable[str]:
    """Yields sentences about the step, the kernel of attention and idle time, and warnings."""
    what = "of the device" if summary.on_device else "of the thread that trains, by operation"
    yield f"Times {what} in {format_seconds(summary.seconds)} of {summary.name}, which profiling slowed down."
    if summary.attention:
        yield f"Attention ran with: {', '.join(summary.attention)}."
    if summary.on_device:
        idle = summary.host_late_seconds + summary.waiting_seconds
        yield (
            f"The device was idle for {format_seconds(idle)}: {format_seconds(summary.host_late_seconds)} "
            f"because the host was late, and {format_seconds(summary.waiting_seconds)} waiting. For "
            f"{format_seconds(summary.exposed_collective_seconds)} only collectives ran."
        )
    for warning in summary.warnings:
        yield f"{_WARNING}{warning}."


def show_kernels(summary: KernelSummary) -> None:
    """Prints the table and the sentences."""
    header, *rows = kernel_table(summary)
    show_table(header, rows)
    for sentence in kernel_sentences(summary):
        print(sentence)


def kernel_section(summary: KernelSummary | None) -> str:
    """Returns the table and the sentences as HTML; "" without a profile."""
    if summary is None:
        return ""
    header, *rows = kernel_table(summary)
    cells = [[escape(text) for text in row] for row in rows]
    said = "".join(
        f'<p class="{"bad" if one.startswith(_WARNING) else "dim"}">{escape(one)}'
        for one in kernel_sentences(summary)
    )
    return f'<div class="scroll">{table(header, cells)}</div>{said}'

"""One measured step rank by rank above the planned step, as SVG; and the ranks that held others up."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fullshard.quantities import format_seconds
from fullshard.report.curves import axis_ticks
from fullshard.report.markup import escape, percent_text, table
from fullshard.report.run_record import RunRecord
from fullshard.spec.event import RunEvent
from fullshard.spec.step_spans import COMPUTE, TERM_OF_SPAN, ProfiledStep, StepSpan

MOST_ROWS = 8
_WIDTH, _LABELS, _ROW, _BAR = 900, 76, 26, 17
_MOST_TITLES = 30  # spans of a row that show their name under the pointer
_COLUMN = 3  # pixels; narrower spans share a column, which shows the work that fills most of it
_PLANNED = "planned"
# Term -> CSS class and name in the legend. Computing is pale, and waiting has the colour.
_INKS = {
    "compute": ("s0", "computing (two shades: units in turn)"),
    "exposed_all_gather": ("s2", "waiting for all-gather"),
    "exposed_reduce_scatter": ("s3", "waiting for reduce-scatter"),
    "exposed_all_reduce": ("s4", "waiting for all-reduce"),
    "model_parallel": ("s5", "waiting for sequences, matmuls or experts of other ranks"),
    "engine": ("s6", "FSDP2's own work, copies"),
    "optimizer": ("s7", "optimizer"),
    "data": ("s8", "data"),
    "other": ("s9", "other"),
}
_SECOND_SHADE = "s1"
# Names of the planned step's spans that a measured step does not have -> term.
_PLANNED_TERMS = {
    "start": "compute",
    "after forward": "compute",
    "loss": "compute",
    "after backward": "compute",
    "end of backward": "compute",
    "wait for launches": "other",
    "wait for copies of gradients": "engine",
    "sum of loss and norm": "exposed_all_reduce",
}


@dataclass(frozen=True)
class _Row:
    """A row of the timeline: its label, and spans in seconds from the left edge."""

    label: str
    spans: Sequence[StepSpan]


def step_timeline(run: RunRecord) -> str:
    """Returns the timeline of the run's last profiled step; an empty text if no step was recorded."""
    steps, planned = run.measured_steps, run.predicted_step
    if not steps:
        return ""
    start = min(one.begin_ns for one in steps)
    rows = [_measured_row(one, start=start) for one in _most_different(steps)]
    if planned:
        rows.append(_Row(_PLANNED, [one for one in planned if one.track == COMPUTE]))
    end = max(span.end for row in rows for span in row.spans)
    drawn = "".join(_draw_row(row, top=index * _ROW, seconds=end) for index, row in enumerate(rows))
    height = len(rows) * _ROW + 18
    svg = (
        f'<svg class="step" viewBox="0 0 {_WIDTH + _LABELS} {height}" role="img">'
        f"<title>One step, rank by rank</title>{drawn}{_axis(end, top=len(rows) * _ROW)}</svg>"
    )
    sentence = _sentence(steps, shown=len(rows) - bool(planned))
    return f'<p class="dim">{escape(sentence)}</p><div class="scroll">{svg}</div>{_legend(rows)}'


def straggler_table(run: RunRecord) -> str:
    """Returns the ranks that held the others up, and why; an empty text if none did."""
    rows: list[list[str]] = []
    for begin, end in _straggler_pairs(run.events):
        details = begin.details
        first, last = details.get("from_step", begin.step), "now" if end is None else f"{end.step or 0:,}"
        last = f"{run.last_step:,}" if end is None and run.state != "running" else last
        seconds, share = _positive(details.get("seconds")), _positive(details.get("share"))
        rows.append(
            [
                f"{first if isinstance(first, int) else 0:,} … {last}",
                escape(str(details.get("rank"))),
                escape(str(details.get("cause"))),
                format_seconds(seconds) if seconds else "",
                percent_text(share, 1.0) if share else "",
            ]
        )
    made = table(["steps", "rank", "cause", "per step", "of a step"], rows[-_MOST_TITLES:])
    return f'<div class="scroll">{made}</div>' if rows else ""


def _straggler_pairs(events: Iterable[RunEvent]) -> Iterator[tuple[RunEvent, RunEvent | None]]:
    """Yields each straggler's event, and the one that ended it, if it ended."""
    begun: dict[tuple[str, str], RunEvent] = {}
    for event in events:
        key = (str(event.details.get("rank")), str(event.details.get("cause")))
        if event.event == "straggler":
            begun[key] = event
        elif event.event == "straggler_over" and key in begun:
            yield begun.pop(key), event
        elif event.event == "start":  # what an attempt named ends with it
            yield from ((one, None) for one in begun.values())
            begun.clear()
    yield from ((one, None) for one in begun.values())


def _most_different(steps: Sequence[ProfiledStep]) -> list[ProfiledStep]:
    """Returns at most MOST_ROWS ranks: those that waited least, for which others wait, and those most."""
    if len(steps) <= MOST_ROWS:
        return list(steps)
    by_waiting = sorted(steps, key=lambda one: one.terms().exposed_collective_seconds)
    chosen = by_waiting[: MOST_ROWS // 2] + by_waiting[-MOST_ROWS // 2 :]
    return sorted(chosen, key=lambda one: one.rank)


def _measured_row(step: ProfiledStep, *, start: int) -> _Row:
    late = (step.begin_ns - start) * 1e-9
    spans = [
        span._replace(begin=span.begin + late, end=span.end + late)
        for span in step.spans
        if span.track == COMPUTE
    ]
    return _Row(f"rank {step.rank}", spans)


def _draw_row(row: _Row, *, top: int, seconds: float) -> str:
    scale = _WIDTH / seconds if seconds > 0 else 0.0
    widest = sorted(row.spans, key=lambda span: span.begin - span.end)[:_MOST_TITLES]
    named = {id(span) for span in widest}
    shades = _shades(row.spans)
    paths: dict[str, list[str]] = {}
    rects: list[str] = []
    columns: dict[int, dict[str, float]] = {}  # column -> width of each ink
    for span in row.spans:
        ink = shades.get(span.unit, "s0") if _term(span) == "compute" else _INKS[_term(span)][0]
        x, width = _LABELS + span.begin * scale, (span.end - span.begin) * scale
        if id(span) in named:
            unit = "" if span.unit is None else f", {span.unit}"
            text = escape(f"{span.name}{unit}: {format_seconds(span.end - span.begin)}")
            rects.append(
                f'<rect class="{ink}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"><title>{text}'
                "</title></rect>"
            )
        elif width < _COLUMN:
            column = columns.setdefault(int(x + width / 2) // _COLUMN, {})
            column[ink] = column.get(ink, 0.0) + width
        else:
            paths.setdefault(ink, []).append(_block(x, width, top=top))
    for at, widths in columns.items():
        ink = max(widths, key=lambda one: widths[one])
        paths.setdefault(ink, []).insert(0, _block(at * _COLUMN, _COLUMN, top=top))
    drawn = [f'<path class="{ink}" d="{"".join(each)}"/>' for ink, each in paths.items()]
    label = f'<text x="0" y="{top + 12}">{escape(row.label)}</text>'
    return label + "".join(drawn) + "".join(rects)


def _block(x: float, width: float, *, top: int) -> str:
    return f"M{x:.1f} {top}h{width:.1f}v{_BAR}h-{width:.1f}z"


def _shades(spans: Sequence[StepSpan]) -> Mapping[str | None, str]:
    """Returns unit -> one of two shades, alternating in the order in which the units compute."""
    units = dict.fromkeys(span.unit for span in spans if _term(span) == "compute")
    return {unit: (_INKS["compute"][0], _SECOND_SHADE)[index % 2] for index, unit in enumerate(units)}


def _term(span: StepSpan) -> str:
    return TERM_OF_SPAN.get(span.name) or _PLANNED_TERMS.get(span.name, "other")


def _axis(seconds: float, *, top: int) -> str:
    scale = _WIDTH / seconds if seconds > 0 else 0.0
    return "".join(
        f'<text class="tick" x="{_LABELS + at * scale:.0f}" y="{top + 12}">{_tick_text(at)}</text>'
        for at in axis_ticks(0.0, seconds, log=False)
    )


def _tick_text(seconds: float) -> str:
    return "0" if not seconds else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _legend(rows: Sequence[_Row]) -> str:
    used = {_term(span) for row in rows for span in row.spans}
    parts = [
        f'<span><i class="{ink}"></i>{name}</span>' for term, (ink, name) in _INKS.items() if term in used
    ]
    return f'<p class="legend">{"".join(parts)}'


def _sentence(steps: Sequence[ProfiledStep], *, shown: int) -> str:
    least = min(steps, key=lambda one: one.terms().exposed_collective_seconds)
    text = f"Step {steps[0].step:,} of {len(steps):,} rank{'' if len(steps) == 1 else 's'}"
    text += f", {shown} of them shown. " if shown < len(steps) else ". "
    if len(steps) > 1:
        waited = least.terms().exposed_collective_seconds
        text += f"Rank {least.rank} waited least for others: {format_seconds(waited)}. "
    return f"{text}fullshard trace opens any profiled step with all of its streams."


def _positive(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e9 else 0.0

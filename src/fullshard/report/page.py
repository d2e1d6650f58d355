"""The page of `fullshard report --html`: one HTML file that makes no request to a network.

Its charts are SVG that Python draws. Its one script moves a line through all charts at once. Its
Content-Security-Policy allows no other script, and no request.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from statistics import median

from fullshard.quantities import format_bytes, format_seconds
from fullshard.report.charts import draw_charts
from fullshard.report.comparison import HEADER, compare_prediction, compare_unfinished, comparison_rows
from fullshard.report.kernels import WARNING, KernelSummary, kernel_sentences, kernel_table
from fullshard.report.markup import cell, escape, percent_text, table
from fullshard.report.plan import settings_rows, term_label
from fullshard.report.run_comparison import (
    changed_settings,
    figures_table,
    settings_table,
)
from fullshard.report.run_record import RunRecord
from fullshard.report.verdict import circumstances, describe_event, verdict
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.live_status import RankStatus
from fullshard.spec.records.step_spans import ProfiledStep
from fullshard.spec.run import Run

_MOST_MEMORY_ROWS, _MOST_STEP_ROWS, _MOST_EVENT_ROWS = 16, 8, 120
_HIDDEN_EVENTS = ("plan",)  # has a section of its own
_FAULTS = ("fault", "save_failed", "out_of_memory")
_MEMORY_NAMES = {
    "allocated_bytes": "live",
    "peak_allocated_bytes": "peak of a step",
    "peak_reserved_bytes": "reserved",
    "host_bytes": "live, host",
    "resident_bytes": "resident, host",
}
_GENERATOR = '<meta name="generator" content="fullshard report">'


def render_page(runs: Sequence[RunRecord]) -> str:
    """Returns the HTML of the page about one run, or about several runs side by side."""
    names = ", ".join(run.name for run in runs)
    head = f"<h1>{escape(names)}</h1>"
    if len(runs) == 1:
        run = runs[0]
        head += f'<p class="verdict">{escape(verdict(run))}<p>{escape(circumstances(run))}'
        found = [
            ("Predicted and measured", _comparison_table(run)),
            ("Memory of the ranks", _rank_memory_table(run)),
            ("Kernels of a profiled step", _kernel_section(run.kernels)),
            ("One step, rank by rank", _step_section(run.measured_steps)),
            ("Events", _event_table(run)),
            ("The plan", "" if run.plan is None else _plan_section(run.plan)),
        ]
    else:
        found = [("Figures", figures_table(runs)), ("Settings that differ", settings_table(runs))]
    sections = [f"<section><h2>{heading}</h2>{content}</section>" for heading, content in found if content]
    return _document(names, head + draw_charts(runs) + "".join(sections))


def is_page(path: Path) -> bool:
    """Returns whether the file at `path` is a page that `render_page` made, and which may be replaced."""
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(1000)


def _comparison_table(run: RunRecord) -> str:
    """Returns bytes at the peak and seconds of a step, predicted and measured; "" if nothing is known."""
    peaks, seconds = run.metrics.values("peak_bytes"), run.metrics.values("seconds")
    if run.measurement is not None:
        comparison = compare_prediction(run.prediction, run.measurement)
    else:
        comparison = compare_unfinished(
            run.prediction,
            peak_bytes=max(peaks, default=None),
            step_seconds=median(seconds) if seconds else None,
        )
    rows = [map(escape, row) for row in comparison_rows(comparison)]
    return f'<div class="scroll">{table(HEADER, [[*row] for row in rows])}</div>' if rows else ""


def _rank_memory_table(run: RunRecord) -> str:
    """Returns a table of the ranks' memory as live.json has it; "" if it has none.

    If there are many ranks, those with the most memory are shown.
    """
    ranks = [] if run.live is None else [one for one in run.live.ranks if one.memory]
    names = [name for name in _MEMORY_NAMES if any(name in one.memory for one in ranks)]
    if not names:
        return ""
    shown = sorted(ranks, key=lambda one: -one.memory.get(names[0], 0.0))[:_MOST_MEMORY_ROWS]
    has_device = "peak_allocated_bytes" in names
    header = [
        "rank",
        "host",
        *(_MEMORY_NAMES[name] for name in names),
        *(["fragmented", "retries"] * has_device),
    ]
    rows = [_memory_row(one, names, has_device=has_device) for one in sorted(shown, key=lambda one: one.rank)]
    note = "" if len(rows) == len(ranks) else f"<p class=dim>{len(rows)} of {len(ranks)} ranks."
    return f'<div class="scroll">{table(header, rows)}</div>{note}'


def _memory_row(one: RankStatus, names: list[str], *, has_device: bool) -> list[str]:
    values = [one.memory.get(name) for name in names]
    row = [str(one.rank), escape(one.host), *("–" if v is None else format_bytes(v) for v in values)]
    if has_device:
        row += [f"{100 * one.memory.get('fragmentation', 0.0):.0f} %"]
        row += [f"{one.memory.get('allocator_retries', 0.0):,.0f}"]
    return row


def _kernel_section(summary: KernelSummary | None) -> str:
    if summary is None:
        return ""
    header, *rows = kernel_table(summary)
    said = "".join(
        f'<p class="{"bad" if one.startswith(WARNING) else "dim"}">{escape(one)}'
        for one in kernel_sentences(summary)
    )
    return f'<div class="scroll">{table(header, [[*map(escape, row)] for row in rows])}</div>{said}'


def _step_section(steps: Sequence[ProfiledStep]) -> str:
    """Returns the seconds of a profiled step, a row for each rank and a column for each term; "" without one.

    Of many ranks, those are shown that waited least, for which others wait, and those that waited most.
    """
    if not steps:
        return ""
    measured = sorted(
        ((one.terms(), one.rank) for one in steps), key=lambda one: one[0].exposed_collective_seconds
    )
    half = _MOST_STEP_ROWS // 2
    shown = measured if len(steps) <= _MOST_STEP_ROWS else measured[:half] + measured[-half:]
    names = [name for name in shown[0][0].terms() if any(terms.terms()[name] for terms, _ in shown)]
    rows = [
        [str(rank), *(format_seconds(terms.terms()[name]) for name in names), format_seconds(terms.total)]
        for terms, rank in sorted(shown, key=lambda one: one[1])
    ]
    text = f"Step {steps[0].step:,} of {len(steps):,} rank{'' if len(steps) == 1 else 's'}"
    text += f", {len(shown)} of them shown. " if len(shown) < len(steps) else ". "
    if len(steps) > 1:
        least, rank = measured[0]
        text += f"Rank {rank} waited least for others: {format_seconds(least.exposed_collective_seconds)}. "
    text += "fullshard trace shows the work of each unit beside the planned step."
    made = table(["rank", *map(term_label, names), "in all"], rows)
    return f'<p class="dim">{text}</p><div class="scroll">{made}</div>'


def _event_table(run: RunRecord) -> str:
    """Returns the table of events; an empty text if there are none. Events of a kind in a row share a row."""
    # A rollback has the figures of the step that it follows.
    events = [
        event
        for event, after in zip_longest(run.events, run.events[1:])
        if event.event not in _HIDDEN_EVENTS
        and not (event.event in ("skip", "spike") and after is not None and after.event == "rollback")
    ]
    if not events:
        return ""
    groups = [list(group) for _, group in groupby(events, key=_row_key)]
    left_out = max(0, len(groups) - _MOST_EVENT_ROWS)
    rows = [_event_row(group) for group in groups[left_out:]]
    note = "" if not left_out else f"<p class=dim>{left_out:,} earlier rows are in events.jsonl."
    made = table(["time, UTC", "attempt", "step", "event"], rows, kind="text")
    return f'<div class="scroll">{made}</div>{note}'


def _row_key(event: RunEvent) -> tuple[object, ...]:
    """Returns a key that events of one row have in common: their kind, and the rank that a straggler is."""
    own = (event.details.get("rank"), event.details.get("cause")) if event.event == "straggler" else ()
    return (event.event, event.attempt, str(own))


def _event_row(group: Sequence[RunEvent]) -> list[str]:
    first, last = group[0], group[-1]
    steps = [event.step for event in group if event.step is not None]
    span = f"{steps[0]:,}" if steps else ""
    if len(set(steps)) > 1:
        span += f" … {steps[-1]:,}"
    text = (
        describe_event(last) if len(group) == 1 else f"{len(group)} times; the last: {describe_event(last)}"
    )
    shown = cell(escape(text), "bad" if first.event in _FAULTS else "")
    return [f"{first.at:%Y-%m-%d %H:%M:%S}", str(first.attempt), cell(span, "nowrap"), shown]


def _plan_section(plan: Plan) -> str:
    """Returns the plan's settings, what its prediction says about it, and the settings of its run."""
    rows = [(escape(label), escape(text)) for label, text in settings_rows(plan, Run())]
    parts = [f"<p>{escape(_plan_reason(plan))}", table([], rows, kind="text")]
    changed = [[escape(text) for text in row] for row in changed_settings(plan.run)]
    if changed:
        made = table(["setting", "value", "default"], changed, kind="text")
        parts.append(f'<h2>Settings that are not at their defaults</h2><div class="scroll">{made}</div>')
    return "".join(parts)


def _plan_reason(plan: Plan) -> str:
    prediction = plan.prediction
    if prediction is None:
        return "It has the plain defaults: the planner was not asked, or could not decide."
    needed, capacity, time = prediction.required_device_bytes, prediction.capacity_bytes, prediction.time
    memory = (
        f"It needs {format_bytes(needed)} of {format_bytes(capacity)} ({percent_text(needed, capacity)}) on "
        f"{prediction.hardware}; its peak is at {prediction.memory.moment}."
    )
    if not time.total:
        return memory
    waiting = time.exposed_all_gather + time.exposed_reduce_scatter + time.exposed_all_reduce
    return (
        f"{memory} A step is predicted to take {format_seconds(time.total)}, of which "
        f"{percent_text(time.compute + time.recompute, time.total)} is computing and "
        f"{percent_text(waiting, time.total)} waiting for collectives."
    )


def _document(title: str, body: str) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"{_GENERATOR}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}"
        f"<script>{script}</script></body></html>\n"
    )


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

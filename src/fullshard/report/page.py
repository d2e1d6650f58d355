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

from fullshard.quantities import format_bytes
from fullshard.report.charts import draw_charts
from fullshard.report.comparison import HEADER, compare_run, comparison_rows, side_by_side_table
from fullshard.report.event_texts import describe_event
from fullshard.report.plan import differing_settings, settings_rows
from fullshard.report.run_record import RunRecord
from fullshard.report.table import Cell, escape_html, html_table, percent_text
from fullshard.report.verdict import setup_and_incidents_text, verdict
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import RunEvent
from fullshard.spec.run import Run

_MOST_EVENT_ROWS = 120
_HIDDEN_EVENTS = ("plan",)  # has a section of its own
_FAULTS = ("fault", "save_failed", "out_of_memory")
_GENERATOR = '<meta name="generator" content="fullshard report">'


def render_page(run: RunRecord, *others: RunRecord) -> str:
    """Returns the HTML of the page about a run; of several, a table of all of them comes first."""
    runs = (run, *others)
    table = html_table(*side_by_side_table(runs)) if others else ""
    title = ", ".join(str(one.directory) for one in runs)
    return _html_document(title, table + "".join(map(_run_sections, runs)))


def _run_sections(run: RunRecord) -> str:
    rows = comparison_rows(compare_run(run))
    head = f"<h1>{escape_html(str(run.directory))}</h1>"
    head += f'<p class="verdict">{escape_html(verdict(run))}<p>{escape_html(setup_and_incidents_text(run))}'
    found = [
        ("Predicted and measured", html_table(HEADER, rows) if rows else ""),
        ("Events", _event_table(run)),
        ("The plan", "" if run.plan is None else _plan_section(run.plan)),
    ]
    sections = [f"<section><h2>{heading}</h2>{content}</section>" for heading, content in found if content]
    return f'<div class="run">{head}{draw_charts(run)}{"".join(sections)}</div>'


def is_report_page(path: Path) -> bool:
    """Returns whether the file at `path` is a page that `render_page` made, and which may be replaced."""
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(1000)


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
    groups = [list(group) for _, group in groupby(events, key=_key_of_shared_event_row)]
    left_out = max(0, len(groups) - _MOST_EVENT_ROWS)
    rows = [_event_row(group) for group in groups[left_out:]]
    note = "" if not left_out else f"<p class=dim>{left_out:,} earlier rows are in events.jsonl."
    return html_table(["time, UTC", "attempt", "step", "event"], rows, kind="text") + note


def _key_of_shared_event_row(event: RunEvent) -> tuple[object, ...]:
    """Returns a key that events of one row have in common: their kind, and the rank that a straggler is."""
    own = (event.details.get("rank"), event.details.get("cause")) if event.event == "straggler" else ()
    return (event.event, event.attempt, str(own))


def _event_row(group: Sequence[RunEvent]) -> list[str | Cell]:
    first, last = group[0], group[-1]
    steps = [event.step for event in group if event.step is not None]
    span = f"{steps[0]:,}" if steps else ""
    if len(set(steps)) > 1:
        span += f" … {steps[-1]:,}"
    text = describe_event(last)
    text = text if len(group) == 1 else f"{len(group)} times; the last: {text}"
    shown = Cell(text, "bad" if first.event in _FAULTS else "")
    return [f"{first.at:%Y-%m-%d %H:%M:%S}", str(first.attempt), Cell(span, "nowrap"), shown]


def _plan_section(plan: Plan) -> str:
    """Returns the plan's settings, the memory it needs, and its run's settings that are not the defaults."""
    rows = [*settings_rows(plan, Run())]
    if (prediction := plan.prediction) is not None:
        needed, capacity = prediction.required_device_bytes, prediction.capacity_bytes
        share = f"{format_bytes(needed)} of {format_bytes(capacity)} ({percent_text(needed, capacity)})"
        rows.append(("memory", f"{share} on {prediction.hardware}"))
    parts = [html_table([], rows, kind="text")]
    if changed := [(key, *values) for key, values in differing_settings([plan.run, Run()])]:
        parts.append("<h2>Settings that are not at their defaults</h2>")
        parts.append(html_table(["setting", "value", "default"], changed, kind="text"))
    return "".join(parts)


def _html_document(title: str, body: str) -> str:
    style, script = _read_asset("page.css"), _read_asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"{_GENERATOR}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape_html(title)}</title><style>{style}</style></head><body>{body}"
        f"<script>{script}</script></body></html>\n"
    )


@cache
def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

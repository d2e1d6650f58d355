"""The charts of the page of `fullshard report --html`, as SVG, and the values that its pointer reads."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fullshard.quantities import format_count
from fullshard.report.event_texts import describe_event
from fullshard.report.run_record import Points, RunRecord
from fullshard.report.table import escape_html

_LEFT, _RIGHT, _TOP, _BELOW = 52, 118, 26, 18  # margins for labels, in pixels of the viewBox
_LANE, _LABEL = 13, 12  # heights of a row of marks, and of a label
_MARK_COLUMN = 9.0  # marks nearer than this share one sign
_DRAWN, _READ = 200, 240  # points of a curve that are drawn, and that the pointer reads
# Steps from which a curve is smoothed; and the fraction of a curve on either side of a smoothed point.
_SMOOTH_FROM, _REACH = 40, 1 / 80
_LOG_FROM = 3.0  # a logarithmic axis is chosen if the values span at least this factor
_MOST_TICKS = 5
_MOST_RESULTS = 12  # that have a chart
_LANES = {
    "save": "saved",
    "resume": "resumed",
    "skip": "not finite",
    "spike": "stood out",
    "rollback": "rolled back",
    "straggler": "held up",
    "fault": "fault",
}


def draw_charts(run: RunRecord) -> str:
    """Returns the HTML of the run's charts, which share an axis of steps; "" if no step was recorded."""
    if not run.metrics.steps:
        return ""
    first, last = run.metrics.steps[0], run.last_step
    charts = [one for one in (_loss_chart(run), *_small_charts(run)) if any(c.points for c in one.curves)]
    drawn = [
        f'<div class="{"wide" if chart.key == "loss" else "small"}">{chart.draw(first, last)}</div>'
        for chart in charts
    ]
    lines = [_pointer_values(chart.key, curve) for chart in charts for curve in chart.curves if curve.points]
    data = json.dumps({"first": first, "last": last, "lines": lines}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # which could end the element
    script = f'<script type="application/json" class="data">{data}</script>'
    return f'<div class="charts">{"".join(drawn)}</div>{script}'


@dataclass(frozen=True)
class _Curve:
    """A curve of a chart.

    label: text at its end, before its last value
    ink: CSS class of its colour
    smooth: the smoothed curve; `points` are then drawn thin
    is_dotted: draws points as circles, without a line
    """

    label: str
    points: Points
    ink: str
    smooth: Points | None = None
    is_dotted: bool = False


@dataclass(frozen=True)
class _Chart:
    """A chart.

    key: name under which the page's data has its values
    show: formats a value for a label
    rule: (value, label) of a horizontal line, such as a prediction
    lanes: rows of marks below the axis: CSS class, label, and the (step, text) of each mark
    size: width and height of the area of the curves, in pixels
    from_zero: whether the axis starts at 0; else it fits the values, and may be logarithmic
    """

    key: str
    title: str
    curves: Sequence[_Curve]
    show: Callable[[float], str]
    rule: tuple[float, str] | None = None
    lanes: Sequence[tuple[str, str, Sequence[tuple[float, str]]]] = ()
    size: tuple[int, int] = (400, 116)
    from_zero: bool = False

    def draw(self, first: float, last: float) -> str:
        """Returns the chart of the steps from `first` to `last` as an SVG element."""
        width, height = self.size
        values = [value for curve in self.curves for _, value in curve.points]
        marked = [*values, self.rule[0]] if self.rule else values
        axis = _Axis(marked, height=height, from_zero=self.from_zero)

        def place(step: float) -> float:
            return (step - first) / max(last - first, 1) * width

        foot = height + (7 + _LANE * len(self.lanes) if self.lanes else 0)
        parts = [
            f'<svg viewBox="{-_LEFT} {-_TOP} {width + _LEFT + _RIGHT} {foot + _TOP + _BELOW}" '
            f'data-key="{self.key}" data-width="{width}" role="img" aria-label="{escape_html(self.title)}">'
            f'<text class="title" x="{-_LEFT}" y="-12">{escape_html(self.title)}</text>'
            f'<text class="readout" x="{width + _RIGHT}" y="-12"></text>'
            f'<text x="0" y="{foot + 13}">{first:,.0f}</text>'
            f'<text class="end" x="{width}" y="{foot + 13}">step {last:,.0f}</text>'
        ]
        for tick in axis.ticks():
            y = axis.y(tick)
            parts.append(f'<path class="grid" d="M0 {y:.1f}H{width}"/>')
            parts.append(f'<text class="tick" x="-6" y="{y + 3.5:.1f}">{escape_html(self.show(tick))}</text>')
        if self.rule is not None:
            parts.append(f'<path class="rule" d="M0 {axis.y(self.rule[0]):.1f}H{width}"/>')
        for curve in self.curves:
            parts += _draw_curve(curve, axis, place=place, count=_DRAWN * width // 400)
        parts += self._draw_curve_labels(axis)
        parts += self._draw_lanes(place)
        return "".join([*parts, f'<line class="hair" y1="0" y2="{foot}"/></svg>'])

    def _draw_curve_labels(self, axis: "_Axis") -> Iterator[str]:
        """Yields the labels at the ends of the curves, moved apart where they would overlap."""
        ends = [(one.ink, one.label, (one.smooth or one.points)[-1][1]) for one in self.curves if one.points]
        found = [(axis.y(value), ink, f"{label} {self.show(value)}".strip()) for ink, label, value in ends]
        if self.rule is not None:
            found.append((axis.y(self.rule[0]), "plan", self.rule[1]))
        found.sort()
        lowest = self.size[1] + 4.0
        places: list[float] = []
        for y, *_ in found:
            places.append(max(y, places[-1] + _LABEL if places else -_TOP))
        for index in reversed(range(len(places))):  # push up what would be below the axis
            places[index] = min(places[index], lowest)
            lowest = places[index] - _LABEL
        for y, (_, ink, label) in zip(places, found, strict=True):
            at = f'x="{self.size[0] + 6}" y="{y + 3.5:.1f}"'
            yield f'<text class="label {ink}" {at}>{escape_html(label)}</text>'

    def _draw_lanes(self, place: Callable[[float], float]) -> Iterator[str]:
        """Yields rows of marks. Marks that would overlap share the sign of the first."""
        for row, (kind, label, marks) in enumerate(self.lanes):
            y = self.size[1] + 16 + _LANE * row
            columns: dict[int, list[tuple[float, str]]] = {}
            for step, text in sorted(marks):
                columns.setdefault(math.floor(place(step) / _MARK_COLUMN), []).append((step, text))
            for found in columns.values():
                more = "" if len(found) == 1 else f" … {found[-1][1]} ({len(found)})"
                title = f"<title>{escape_html(found[0][1] + more)}</title>"
                x = place(found[0][0])
                yield f'<circle class="sign {kind}" cx="{x:.1f}" cy="{y}" r="3.5">{title}</circle>'
            yield f'<text class="{kind}" x="{self.size[0] + 10}" y="{y + 3.5}">{escape_html(label)}</text>'


class _Axis:
    """The vertical axis: places values between its foot, at y = height, and its top, at y = 0."""

    def __init__(self, values: Sequence[float], *, height: int, from_zero: bool) -> None:
        self._low, self._high, self._height = min(values), max(values), height
        self._is_log = not from_zero and self._low > 0 and self._high >= _LOG_FROM * self._low
        self._low = min(0.0, self._low) if from_zero else self._low

    def y(self, value: float) -> float:
        low, high = self._low, self._high
        if self._is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self._height * (1 - min(max(share, 0.0), 1.0))

    def ticks(self) -> list[float]:
        """Returns round values within the axis, two to five where there are that many."""
        low, high = self._low, self._high
        if self._is_log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) >= 2:
                return ticks[:: -(-len(ticks) // _MOST_TICKS)]
        raw = (high - low) / 4
        if not raw > 0:
            return [low]
        unit = 10.0 ** math.floor(math.log10(raw))
        distance = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
        first = math.ceil(low / distance - 1e-9)
        return [index * distance for index in range(first, math.floor(high / distance + 1e-9) + 1)]


def _draw_curve(curve: _Curve, axis: _Axis, *, place: Callable[[float], float], count: int) -> Iterator[str]:
    def path(points: Points) -> str:
        spots = [f"{place(step):.1f} {axis.y(value):.1f}" for step, value in points]
        return f"M{'L'.join(spots if len(spots) > 1 else spots * 2)}"

    if curve.is_dotted:
        for step, value in _thin_evenly(curve.points, count):
            yield f'<circle class="{curve.ink}" cx="{place(step):.1f}" cy="{axis.y(value):.1f}" r="3"/>'
        return
    if not curve.points:
        return
    thin = " thin" if curve.smooth else ""
    yield f'<path class="{curve.ink}{thin}" d="{path(_thin_to_extremes(curve.points, count))}"/>'
    if curve.smooth:
        yield f'<path class="{curve.ink}" d="{path(_thin_evenly(curve.smooth, count))}"/>'


def _thin_to_extremes(points: Points, columns: int) -> Points:
    """Returns at most 2 * columns of the points: the lowest and the highest of each column.

    A curve of any length so keeps a constant size, and every spike that is in it.
    """
    if len(points) <= 2 * columns:
        return points
    kept: list[tuple[float, float]] = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _thin_evenly(points: Points, count: int) -> Points:
    """Returns at most `count` of the points, at equal distances, with the first and the last."""
    if len(points) <= count:
        return points
    return [points[index * (len(points) - 1) // (count - 1)] for index in range(count)]


def _smooth(points: Points) -> Points | None:
    """Returns the mean of each point and equally many on either side; None for few points.

    The window is symmetric everywhere, so the curve lags behind nothing.
    """
    if len(points) < _SMOOTH_FROM:
        return None
    reach = max(1, round(len(points) * _REACH))
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smooth: list[tuple[float, float]] = []
    for index, (step, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)
        low, high = index - side, index + side + 1
        smooth.append((step, (sums[high] - sums[low]) / (high - low)))
    return smooth


def _make_single_curve(
    run: RunRecord, key: str, *, factor: float = 1.0, is_smoothed: bool = False
) -> list[_Curve]:
    points: Points = [(step, value * factor) for step, value in run.metrics.points(key)]
    return [_Curve("", points, "c0", _smooth(points) if is_smoothed else None)]


def _loss_chart(run: RunRecord) -> _Chart:
    points = run.metrics.points("loss")
    smooth = _smooth(points)
    validation = _Curve("validation", run.metrics.points("validation_loss"), "c2", is_dotted=True)
    return _Chart(
        key="loss",
        title="loss (thin: each step; thick: mean of the steps around it)" if smooth else "loss",
        curves=[_Curve("train", points, "c0", smooth), validation],
        show=lambda value: f"{value:.4g}",
        lanes=_event_lanes(run),
        size=(950, 230),
    )


def _event_lanes(run: RunRecord) -> list[tuple[str, str, list[tuple[float, str]]]]:
    """Returns the rows of marks for the events of the run whose step is known."""
    marks: dict[str, list[tuple[float, str]]] = {kind: [] for kind in _LANES}
    for event in run.events_of_kinds(*_LANES):
        if event.step is not None:
            marks[event.event].append((event.step, f"step {event.step:,}: {describe_event(event)}"))
    return [(kind, _LANES[kind], found) for kind, found in marks.items() if found]


def _small_charts(run: RunRecord) -> Iterator[_Chart]:
    rate, planned = _make_single_curve(run, "tokens_per_second", is_smoothed=True), run.prediction
    rule = None
    if planned is not None and planned.has_complete_step_time:
        rule = (planned.tokens_per_second, f"planned {format_count(planned.tokens_per_second)}")
    yield _Chart("tokens_per_second", "tokens/s of all ranks", rate, format_count, rule, from_zero=True)
    yield _Chart(
        "grad_norm", "gradient norm, before clipping", _make_single_curve(run, "grad_norm"), _short_figure
    )
    rate = _make_single_curve(run, "learning_rate")
    yield _Chart("learning_rate", "learning rate", rate, _short_figure, from_zero=True)
    longest = max(run.metrics.values("data_seconds"), default=0.0)
    unit, factor = ("ms", 1e3) if longest < 1.0 else ("s", 1.0)
    waiting = _make_single_curve(run, "data_seconds", factor=factor)
    yield _Chart("data_seconds", f"waiting for data, {unit} a step", waiting, _short_figure, from_zero=True)
    key, title = "resident_bytes", "resident memory after each step on rank 0"
    if run.metrics.values("peak_allocated_bytes"):
        key, title = "peak_allocated_bytes", "peak memory of each step on rank 0"
    most = max(run.metrics.values(key), default=0.0)
    unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    for name, points in list(run.metrics.results.items())[:_MOST_RESULTS]:
        first = run.metrics.steps[0]
        points = [(max(step, first), value) for step, value in points]  # a result before the first step
        yield _Chart(name, name, [_Curve("", points, "c2", is_dotted=True)], _short_figure)
    yield _Chart(
        key, f"{title}, {unit}", _make_single_curve(run, key, factor=1 / size), _short_figure, from_zero=True
    )


def _pointer_values(key: str, curve: _Curve) -> dict[str, object]:
    """Returns the steps and values of a curve that the page's script shows at the pointer."""
    points = _thin_evenly(curve.points, _READ)
    return {
        "key": key,
        "label": curve.label,
        "steps": [step for step, _ in points],
        "values": [float(f"{value:.5g}") for _, value in points],
        "every": not curve.is_dotted,
    }


def _short_figure(value: float) -> str:
    """Returns a figure in as few characters as an axis has room for: `0.0003` -> `3e-4`."""
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}"

"""A line chart over the steps of one or several runs, as SVG with classes of `page.css`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fullshard.report.curves import Points, axis_ticks, thin_evenly, thin_to_extremes, wants_log_axis
from fullshard.report.markup import escape

_LEFT, _RIGHT, _TOP, _BELOW = 52, 118, 26, 18  # margins for labels, in pixels of the viewBox
_LANE, _LANES_FROM, _LABEL = 13, 7, 12  # heights of a lane, of the gap above the lanes, and of a label
_SIGN_COLUMN = 9.0  # signs nearer than this share one sign

# Outlines of signs around (0, 0).
_SIGNS = {
    "save": "M-4 4L4 4L0 -4Z",
    "straggler": "M-4 0L0 -4L4 0L0 4Z",
    "resume": "M-3.5 -4L4 0L-3.5 4Z",
    "skip": "M-3.5 -3.5L3.5 3.5M3.5 -3.5L-3.5 3.5",
    "spike": "M0 -4.5L4.5 0L0 4.5L-4.5 0Z",
    "leak": "M0 -4.5C5 2 3 4 0 4C-3 4 -5 2 0 -4.5Z",
    "rollback": "M0 -4L-4 0L0 4ZM4.5 -4L.5 0L4.5 4Z",
    "fault": "M-1.3 -5H1.3V1H-1.3ZM-1.3 2.6H1.3V5H-1.3Z",
}


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    label: text at the end of the curve
    ink: CSS class of its colour, such as `c0`
    smooth: the smoothed curve; `points` are then drawn thin. None draws `points` alone.
    is_dotted: draws points as circles, without a line
    has_label: whether the label is drawn, and the pointer reads the curve
    columns: number of columns in which the curve keeps its lowest and its highest point
    """

    label: str
    points: Points
    ink: str
    smooth: Points | None = None
    is_dotted: bool = False
    has_label: bool = True
    columns: int = 200


@dataclass(frozen=True)
class Lane:
    """A row of signs below the axis.

    kind: the sign, a key of `_SIGNS`, and the CSS class of its colour
    marks: (step, text that is shown while the pointer is on the sign)
    """

    kind: str
    label: str
    marks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Chart:
    """A chart. `draw` returns its SVG.

    key: name under which the page's data has the values of the chart
    show: formats a value for a label
    steps: first and last step of the horizontal axis
    rule: (value, label) of a horizontal line, such as a prediction
    size: width and height of the area of the curves, in pixels
    from_zero: whether the axis starts at 0; else it fits the values, and may be logarithmic
    """

    key: str
    title: str
    lines: Sequence[Line]
    show: Callable[[float], str]
    steps: tuple[float, float]
    rule: tuple[float, str] | None = None
    lanes: Sequence[Lane] = ()
    size: tuple[int, int] = (400, 116)
    from_zero: bool = False

    def draw(self) -> str:
        """Returns the chart as an SVG element; an empty text if there is nothing to draw."""
        values = [value for line in self.lines for _, value in line.points]
        if not values:
            return ""
        axis = _Axis.fit(
            [*values, *([self.rule[0]] if self.rule else [])], height=self.size[1], from_zero=self.from_zero
        )
        foot = self.size[1] + self._lanes_height()
        total = foot + _TOP + _BELOW
        parts = [
            f'<svg viewBox="{-_LEFT} {-_TOP} {self.size[0] + _LEFT + _RIGHT} {total}" data-key="{self.key}" '
            f'data-width="{self.size[0]}" role="img" aria-label="{escape(self.title)}">'
            f'<text class="title" x="{-_LEFT}" y="-12">{escape(self.title)}</text>'
            f'<text class="readout" x="{self.size[0] + _RIGHT}" y="-12"></text>',
            *self._draw_axes(axis),
        ]
        for line in self.lines:
            parts += self._draw_line(line, axis)
        parts += self._draw_labels(axis)
        parts += self._draw_lanes()
        parts.append(f'<line class="hair" y1="0" y2="{foot}"/></svg>')
        return "".join(parts)

    def _x(self, step: float) -> float:
        return (step - self.steps[0]) / max(self.steps[1] - self.steps[0], 1) * self.size[0]

    def _lanes_height(self) -> int:
        return _LANES_FROM + _LANE * len(self.lanes) if self.lanes else 0

    def _draw_axes(self, axis: "_Axis") -> Iterator[str]:
        for tick in axis.ticks():
            y = axis.y(tick)
            yield f'<path class="grid" d="M0 {y:.1f}H{self.size[0]}"/>'
            yield f'<text class="tick" x="-6" y="{y + 3.5:.1f}">{escape(self.show(tick))}</text>'
        y = self.size[1] + self._lanes_height() + 13
        yield f'<text x="0" y="{y}">{self.steps[0]:,.0f}</text>'
        yield f'<text class="end" x="{self.size[0]}" y="{y}">step {self.steps[1]:,.0f}</text>'
        if self.rule is not None:
            yield f'<path class="rule" d="M0 {axis.y(self.rule[0]):.1f}H{self.size[0]}"/>'

    def _draw_line(self, line: Line, axis: "_Axis") -> Iterator[str]:
        if line.is_dotted:
            for step, value in thin_evenly(line.points, line.columns):
                x, y = self._x(step), axis.y(value)
                yield f'<circle class="{line.ink}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
            return
        raw = thin_to_extremes(line.points, line.columns)
        yield f'<path class="{line.ink}{" thin" if line.smooth else ""}" d="{self._path(raw, axis)}"/>'
        if line.smooth:
            yield f'<path class="{line.ink}" d="{self._path(thin_evenly(line.smooth, line.columns), axis)}"/>'

    def _path(self, points: Points, axis: "_Axis") -> str:
        spots = [f"{self._x(step):.1f} {axis.y(value):.1f}" for step, value in points]
        return f"M{'L'.join(spots if len(spots) > 1 else spots * 2)}"

    def _draw_labels(self, axis: "_Axis") -> Iterator[str]:
        """Yields the labels at the ends of the curves, moved apart where they would overlap."""
        ends = [
            (line.ink, line.label, (line.smooth or line.points)[-1][1])
            for line in self.lines
            if line.points and line.has_label
        ]
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
        for place, (_, ink, label) in zip(places, found, strict=True):
            spot = f'x="{self.size[0] + 6}" y="{place + 3.5:.1f}"'
            yield f'<text class="label {ink}" {spot}>{escape(label)}</text>'

    def _draw_lanes(self) -> Iterator[str]:
        for row, lane in enumerate(self.lanes):
            y = self.size[1] + _LANES_FROM + _LANE * row + 9
            for x, text in self._merge_marks(lane):
                yield (
                    f'<g class="sign {lane.kind}" transform="translate({x:.1f} {y})"><title>{escape(text)}'
                    f'</title><path d="{_SIGNS[lane.kind]}"/></g>'
                )
            spot = f'x="{self.size[0] + 10}" y="{y + 3.5}"'
            yield f'<text class="{lane.kind}" {spot}>{escape(lane.label)}</text>'

    def _merge_marks(self, lane: Lane) -> Iterator[tuple[float, str]]:
        """Yields (x, text) of the signs. Marks whose signs would overlap share the sign of the first."""
        columns: dict[int, list[tuple[float, str]]] = {}
        for step, text in sorted(lane.marks):
            columns.setdefault(math.floor(self._x(step) / _SIGN_COLUMN), []).append((step, text))
        for marks in columns.values():
            more = "" if len(marks) == 1 else f" … {marks[-1][1]} ({len(marks)})"
            yield self._x(marks[0][0]), marks[0][1] + more


@dataclass(frozen=True)
class _Axis:
    """The vertical axis: values from `low` at the bottom to `high` at the top, `height` pixels above."""

    low: float
    high: float
    height: int
    is_log: bool

    @classmethod
    def fit(cls, values: Sequence[float], *, height: int, from_zero: bool) -> "_Axis":
        log = not from_zero and wants_log_axis(values)
        low = min(0.0, *values) if from_zero else min(values)
        return cls(low, max(values), height, log)

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.height * (1 - min(max(share, 0.0), 1.0))

    def ticks(self) -> list[float]:
        return axis_ticks(self.low, self.high, log=self.is_log)

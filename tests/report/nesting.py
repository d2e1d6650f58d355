"""The rule of Perfetto for the slices of a track."""

from collections import defaultdict
from collections.abc import Iterable

from fullshard.spec.records.step_spans import StepSpan


def overlaps_in_part(spans: Iterable[StepSpan]) -> list[StepSpan]:
    """The spans that overlap another one of their track without nesting; Perfetto drops these."""
    tracks: dict[str, list[StepSpan]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    found: list[StepSpan] = []
    for each in tracks.values():
        open_ends: list[float] = []
        for span in sorted(each, key=lambda one: (one.begin, -one.end)):
            while open_ends and open_ends[-1] <= span.begin + 1e-12:
                open_ends.pop()
            if open_ends and span.end > open_ends[-1] + 1e-12:
                found.append(span)
            open_ends.append(span.end)
    return found

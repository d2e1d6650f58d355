"""A measured step of one rank as spans: a line of JSON in `<run.dir>/spans/rank-<rank>.jsonl`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from fullshard.spec.measurement import StepSeconds
from fullshard.spec.step_span import StepSpan

COMPUTE = "compute"
"""The track that a step's seconds are counted on: its spans are disjoint, and leave no gap."""

MODEL_PARALLEL_TRACKS: Mapping[str, str] = {
    "gather_sequence": "parts of sequences",
    "reduce_sequence": "parts of sequences",
    "exchange_heads": "parts of sequences",
    "reduce_over_ranks": "parts of sequences",
    "exchange_counts": "rows of experts",
    "exchange_rows": "rows of experts",
}
"""Collective of ranks that share sequences, matmuls or experts -> its track."""

MODEL_PARALLEL_WAITS: Mapping[str, str] = {
    "gather_sequence": "wait for gather of sequences",
    "reduce_sequence": "wait for reduction of sequences",
    "exchange_heads": "wait for exchange of heads",
    "reduce_over_ranks": "wait for reduction over ranks",
    "exchange_counts": "wait for counts of rows",
    "exchange_rows": "wait for rows of experts",
}
"""Kind of a collective, as above -> name of the span in which a rank waits for it."""

TERM_OF_SPAN: Mapping[str, str] = {
    "forward": "compute",
    "backward": "compute",
    "wait for all-to-all": "model_parallel",
    **dict.fromkeys(MODEL_PARALLEL_WAITS.values(), "model_parallel"),
    "wait for all-gather": "exposed_all_gather",
    "wait for reduce-scatter": "exposed_reduce_scatter",
    "wait for all-reduce": "exposed_all_reduce",
    "FSDP2": "engine",
    "copy": "engine",
    "norm": "optimizer",
    "update": "optimizer",
    "data": "data",
}
"""Name of a span of the track `compute` -> term of `StepSeconds`. Spans of other names count as `other`."""

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """The spans of one step on one rank.

    attempt: number of the run's attempt, as in events.jsonl
    host: name of the rank's host
    reason: why the step was written: `sampled`, `last`, or the event around which it was
    begin_ns: its start by the clock of rank 0's host, in ns
    clock_error_ns: largest error of `begin_ns`, because clocks of hosts are compared over the network; 0 on
        rank 0's host, None if the clocks could not be compared
    seconds: time from its start to its end; spans after that are of the work before the next step
    spans: their times are seconds from the step's start; on one track, they nest or are disjoint
    """

    step: int
    attempt: int
    rank: int
    host: str
    reason: str
    begin_ns: int
    clock_error_ns: int | None = 0
    seconds: float
    spans: tuple[StepSpan, ...]

    @classmethod
    def of_prediction(cls, spans: Iterable[StepSpan], *, seconds: float) -> Self:
        """Returns the planned step, as of step 0 of rank 0."""
        made = cls(
            step=0, attempt=1, rank=0, host="", reason="predicted", begin_ns=0, seconds=seconds, spans=()
        )
        return replace(made, spans=tuple(spans))

    def terms(self) -> StepSeconds:
        """Returns the seconds of the step by term, which sum to `seconds`."""
        sums = dict.fromkeys(StepSeconds.model_fields, 0.0)
        for span in self.spans:
            if span.track == COMPUTE:
                length = min(span.end, self.seconds) - min(span.begin, self.seconds)
                sums[TERM_OF_SPAN.get(span.name, "other")] += length
        return StepSeconds(**sums)

    def to_line(self) -> str:
        """Returns the step as one line of JSON, with times in ns."""
        names: dict[tuple[str, str], int] = {}
        units: dict[str | None, int] = {}
        rows = [
            [
                names.setdefault((span.track, span.name), len(names)),
                units.setdefault(span.unit, len(units)),
                span.microbatch or 0,
                round(span.begin * _NANOSECONDS),
                # Both ends are rounded, so that spans that touch still do.
                round(span.end * _NANOSECONDS) - round(span.begin * _NANOSECONDS),
            ]
            for span in self.spans
        ]
        fields = {key: value for key, value in vars(self).items() if key not in ("seconds", "spans")}
        fields |= {"length_ns": round(self.seconds * _NANOSECONDS)}
        fields |= {"names": list(names), "units": list(units), "spans": rows}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, line: bytes | str) -> Self | None:
        """Returns the step of a line of JSON; None if the line is not one."""
        try:
            fields: Any = json.loads(line)
            return cls._from_fields(cast(dict[str, Any], fields))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            return None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        names, units = [(str(track), str(name)) for track, name in fields["names"]], fields["units"]
        spans: list[StepSpan] = []
        for name, unit, microbatch, begin, length in fields["spans"]:
            if not (math.isfinite(begin) and 0 <= length < math.inf and name >= 0 and unit >= 0):
                raise ValueError("a time is not a number")
            (track, label), known = names[name], units[unit]
            spans.append(
                StepSpan(
                    track,
                    label,
                    begin / _NANOSECONDS,
                    (begin + length) / _NANOSECONDS,
                    unit=None if known is None else str(known),
                    microbatch=int(microbatch) or None,
                )
            )
        error = fields["clock_error_ns"]
        return cls(
            step=int(fields["step"]),
            attempt=int(fields["attempt"]),
            rank=int(fields["rank"]),
            host=str(fields["host"]),
            reason=str(fields["reason"]),
            begin_ns=int(fields["begin_ns"]),
            clock_error_ns=None if error is None else int(error),
            seconds=int(fields["length_ns"]) / _NANOSECONDS,
            spans=tuple(spans),
        )

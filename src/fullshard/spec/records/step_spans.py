"""A step of one rank as spans, and the names that its work has everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.spec.records.measurement import StepSeconds

COMPUTE = "compute"
"""The track that a step's seconds are counted on: its spans are disjoint, and leave no gap."""

RANGE_PREFIX = "fullshard::"
"""Beginning of the names of our ranges in a profile."""

_MODEL_PARALLEL = {
    "gather_sequence": ("parts of sequences", "wait for gather of sequences"),
    "reduce_sequence": ("parts of sequences", "wait for reduction of sequences"),
    "reduce_over_ranks": ("parts of sequences", "wait for reduction over ranks"),
    "exchange_counts": ("rows of experts", "wait for counts of rows"),
    "exchange_rows": ("rows of experts", "wait for rows of experts"),
}
COLLECTIVES: Mapping[str, tuple[str, str]] = {
    "all_gather": ("all-gather", "wait for all-gather"),
    "reduce_scatter": ("reduce-scatter", "wait for reduce-scatter"),
    "all_reduce": ("all-reduce", "wait for all-reduce"),
    "all_to_all": ("all-to-all", "wait for all-to-all"),
    **_MODEL_PARALLEL,
    "agreement": ("agreement", "wait for other ranks"),
}
"""Range of a collective -> (its track, name of the span in which a rank waits for it)."""

TERM_OF_SPAN: Mapping[str, str] = {
    "forward": "compute",
    "backward": "compute",
    "other kernels": "compute",
    **{COLLECTIVES[one][1]: "model_parallel" for one in ("all_to_all", *_MODEL_PARALLEL)},
    **{COLLECTIVES[one][1]: f"exposed_{one}" for one in ("all_gather", "reduce_scatter", "all_reduce")},
    "FSDP2": "engine",
    "copy": "engine",
    "norm": "optimizer",
    "update": "optimizer",
    "data": "data",
}
"""Name of a span of the track `compute` -> term of `StepSeconds`. Spans of other names count as `other`."""


class StepSpan(NamedTuple):
    """Work or waiting on one track, from `begin` to `end` in seconds from the step's start.

    track: the stream, or another row of its own; spans of one track nest or are disjoint
    unit: name of the communication unit that the work is for; None for the whole step
    microbatch: number of the microbatch, from 1; None for the whole step
    """

    track: str
    name: str
    begin: float
    end: float
    unit: str | None = None
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """The spans of one step on one rank.

    attempt: number of the run's attempt, as in events.jsonl
    host: name of the rank's host
    begin_ns: its start by the host's clock, in ns since the epoch
    """

    step: int
    attempt: int
    rank: int
    host: str
    begin_ns: int
    spans: tuple[StepSpan, ...]

    def seconds_by_name_on_compute_track(self) -> dict[str, float]:
        """Returns name of the work -> its seconds, which sum to the step."""
        sums: dict[str, float] = {}
        for span in self.spans:
            if span.track == COMPUTE:
                sums[span.name] = sums.get(span.name, 0.0) + span.end - span.begin
        return sums

    def terms(self) -> StepSeconds:
        """Returns the seconds of the step by term."""
        sums = dict.fromkeys(StepSeconds.model_fields, 0.0)
        for name, seconds in self.seconds_by_name_on_compute_track().items():
            sums[TERM_OF_SPAN.get(name, "other")] += seconds
        return StepSeconds(**sums)

"""The predicted step as spans on the streams of one rank, to be drawn as a trace.

A simulation that records what it adds to each clock. It skips no turn, and is otherwise that of `step_time`.
Contention and stragglers are factors on the whole step, and so are spans after its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.planner.predict.schedule import ScheduledPhase
from fullshard.planner.predict.simulate import MicrobatchWork, StepSimulation
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.predict.streams import Cause, HostStream, StreamClocks
from fullshard.planner.predict.unit_costs import TICKS, UnitCost
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import Event, ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.records.step_spans import COLLECTIVES, StepSpan

_WAITS: dict[Cause, str] = {
    "all_gather": COLLECTIVES["all_gather"][1],
    "reduce_scatter": COLLECTIVES["reduce_scatter"][1],
    "all_reduce": COLLECTIVES["all_reduce"][1],
    "copy": "wait for copies of gradients",
    "host": "wait for host memory or drive",
}
_HOST_STREAMS: dict[HostStream, tuple[str, str]] = {
    "disk": ("drive", "read or write"),
    "updating": ("update", "update"),
    "host_in": ("copies from host", "copy"),
    "host_out": ("copies to host", "copy"),
    "host_sum": ("sums on host", "add gradients"),
}
_WORK: dict[Event, str] = {
    "start": "start",
    "pre_forward": "forward",
    "post_forward": "after forward",
    "end_forward": "loss",
    "pre_backward": "backward",
    "post_backward": "after backward",
    "end_backward": "end of backward",
}


class _TickSpan(NamedTuple):
    """Work on a stream from tick `begin` to tick `end`, for a unit of the model; -1 for none."""

    track: str
    name: str
    begin: int
    end: int
    unit: int
    microbatch: int


@dataclass
class _RecordedClocks(StreamClocks):
    """Stream clocks that record a span for each piece of work and each wait."""

    spans: list[_TickSpan] = field(default_factory=list[_TickSpan])
    work: str = ""  # name of the kernels of the current phase
    unit: int = -1
    microbatch: int = 0

    def run_kernels(self, length: int, *, issue: int) -> None:
        start, idle, host = self.compute, self.idle, self.host
        super().run_kernels(length, issue=issue)
        gap = self.idle - idle
        self._record("compute", "wait for launches", begin=start, end=start + gap)
        self._record("compute", self.work, begin=start + gap, end=self.compute)
        if not self.serial:
            self._record("host", "launches", begin=host, end=self.host)

    def run_fsdp_host_work(self, length: int) -> None:
        start = self.host
        super().run_fsdp_host_work(length)
        self._record("compute" if self.serial else "host", "FSDP2", begin=start, end=self.host)

    def copy_on_compute_stream(self, length: int) -> None:
        start, idle = self.compute, self.idle
        super().copy_on_compute_stream(length)
        gap = self.idle - idle
        self._record("compute", "wait for launches", begin=start, end=start + gap)
        self._record("compute", "copy", begin=start + gap, end=self.compute)

    def stall_compute_until(self, until: int, cause: Cause) -> None:
        start = self.compute
        super().stall_compute_until(until, cause)
        self._record("compute", _WAITS[cause], begin=start, end=self.compute)

    def start_all_gather(self, cost: UnitCost, *, again: bool, inline: bool, after: int) -> int:
        copied = self.copy_in
        end = super().start_all_gather(cost, again=again, inline=inline, after=after)
        if self.copy_in > copied:
            self._record(
                "copy-in",
                "copy",
                begin=self.copy_in - (cost.again_in if again else cost.copy_in),
                end=self.copy_in,
            )
        length = cost.backward_gather if again else cost.gather
        apart = again and cost.separate_network
        self._record(
            "all-gather over fewer ranks" if apart else "all-gather",
            "all-gather",
            begin=end - length,
            end=end,
        )
        return end

    def run_reduce_scatter(self, cost: UnitCost) -> None:
        super().run_reduce_scatter(cost)
        if cost.is_sharded:
            self._record(
                "reduce-scatter", "reduce-scatter", begin=self.reduce - cost.scatter, end=self.reduce
            )

    def copy_on_reduce_stream(self, length: int) -> None:
        super().copy_on_reduce_stream(length)
        if not self.serial:
            self._record("reduce-scatter", "copy", begin=self.reduce - length, end=self.reduce)

    def start_all_reduce(self, cost: UnitCost, *, settle: int) -> None:
        start = max(self.all_reduce, self.reduce, self.network if cost.shares_wires else 0)
        super().start_all_reduce(cost, settle=settle)
        end = start + cost.all_reduce
        self._record("all-reduce", "all-reduce", begin=start, end=end)
        if not self.serial:
            self._record("all-reduce", "copy", begin=end, end=end + settle)

    def run_on_stream(self, stream: HostStream, length: int, *, after: int) -> int:
        end = super().run_on_stream(stream, length, after=after)
        track, name = _HOST_STREAMS[stream]
        self._record(track, name, begin=end - length, end=end)
        return end

    def _add_sent_and_blocked_time(self, length: int, cause: Cause) -> None:
        start = self.compute
        super()._add_sent_and_blocked_time(length, cause)
        self._record("compute", _WAITS[cause], begin=start, end=self.compute)

    def _record(self, track: str, name: str, *, begin: int, end: int) -> None:
        if end > begin:
            self.spans.append(_TickSpan(track, name, begin, end, self.unit, self.microbatch))


@dataclass
class _RecordedSimulation(StepSimulation):
    """A simulation that tells its clocks which unit, phase and microbatch the work is for."""

    @property
    def _clocks(self) -> _RecordedClocks:
        assert isinstance(self.streams, _RecordedClocks), "the predictor makes both"
        return self.streams

    def simulate_step(self, work: MicrobatchWork, *, accumulating: MicrobatchWork, accumulation: int) -> None:
        self._clocks.spans.clear()  # of a step before, simulated for what it leaves in the host's buffers
        super().simulate_step(work, accumulating=accumulating, accumulation=accumulation)

    def _simulate_microbatch(self, work: MicrobatchWork) -> None:
        self._clocks.microbatch += 1
        super()._simulate_microbatch(work)

    def _simulate_phases(self, steps: Sequence[ScheduledPhase], work: MicrobatchWork, *, shift: int) -> None:
        clocks = self._clocks
        for step in steps:
            clocks.unit = step.unit + shift if step.unit >= 0 else -1
            clocks.work = _WORK[step.event]
            super()._simulate_phases((step,), work, shift=shift)

    def _start_all_gather(self, unit: int, cost: UnitCost) -> None:
        clocks = self._clocks
        current, clocks.unit = clocks.unit, unit
        super()._start_all_gather(unit, cost)
        clocks.unit = current


def predict_step_spans(spec: ModelSpec, plan: Plan, *, hardware: Hardware) -> list[StepSpan]:
    """Returns the spans of one predicted step of the slowest rank, from its start to the predicted step time.

    Their number grows with the microbatches of a step: about 20 per unit and microbatch.

    Raises PlanError if `spec` lacks the trace, or `hardware` a rate, that `plan` needs.
    """
    predictor = StepTimePredictor(
        spec, hardware, skips=False, clocks=_RecordedClocks, simulation=_RecordedSimulation
    )
    streams = predictor.simulate_streams(plan, units=predictor.unit_costs(plan))
    assert isinstance(streams, _RecordedClocks), "as asked for"
    spans = [
        StepSpan(
            one.track,
            one.name,
            one.begin / TICKS,
            one.end / TICKS,
            unit=spec.units[one.unit].name if one.unit >= 0 else None,
            microbatch=one.microbatch,
        )
        for one in streams.spans
    ]
    # Another predictor: this one would record, and skip no repeated turn.
    return spans + _spans_after_backward(
        plan, StepTimePredictor(spec, hardware), after=streams.compute / TICKS
    )


def _spans_after_backward(plan: Plan, predictor: StepTimePredictor, *, after: float) -> list[StepSpan]:
    """Returns the spans from `after`, the end of the last backward in seconds, to the end of the step."""
    terms, summed = predictor.predict_time(plan), predictor.unit_costs(plan).all_reduce / TICKS
    lengths = {
        "sum of loss and norm": summed,
        "update": terms.optimizer,
        "contention (of the whole step)": terms.contention,
        "wait for the slowest rank (of the whole step)": terms.stragglers,
    }
    lengths = {"wait for drive": terms.total - after - sum(lengths.values()), **lengths}
    spans: list[StepSpan] = []
    for name, length in lengths.items():
        if length > 1 / TICKS:
            spans.append(StepSpan("compute", name, after, after + length))
            after += length
    return spans

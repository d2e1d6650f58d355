"""Steps are recorded on every rank, agree with torch's profiler, and never wait for a device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.distributed.ranges import record_ranges
from fullshard.profiler.clock_offset import ClockOffset, compare_clocks
from fullshard.profiler.recorded_step import COLLECTIVES, step_spans
from fullshard.profiler.span_clock import DeviceClock, HostClock
from fullshard.profiler.step_recorder import StepRecorder
from fullshard.profiler.trace import profile_step
from fullshard.profiler.unit_hooks import record_units
from fullshard.spec.measured_step import TERM_OF_SPAN, StepSpans
from fullshard.survival.phase import PhaseTracker
from fullshard.training.loop import train
from tests.fakes.device import FakeDevice
from tests.report.nesting import overlaps_in_part
from tests.training.runs import WIDTH, mean_square, run_of, sharded


class Wide(nn.Module):
    """Layers that compute for long enough to be timed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH if i == 0 else 512, 512) for i in range(4))
        self.head = nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(256, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).view(256, -1, 2).mean(0)


class Observer:
    def __init__(self, recorder: StepRecorder) -> None:
        self.note_phase = recorder.note_phase

    def note_hang(self) -> None:
        raise AssertionError("nothing hangs")


def recorded(settings: tuple[str, ...], clock: Any, *, model: Any = Wide, profiled: bool = True) -> Any:
    """The steps that were recorded, and the terms that the profiler found in the last of them."""
    state, plan = sharded(run_of("train.microbatch=2", *settings), model=model)
    state.phase = PhaseTracker()
    before = methods_of_units(state.model)
    recorder = StepRecorder(clock)
    state.phase.observer = Observer(recorder)
    traced = None
    with record_ranges(recorder), record_units(state.model, recorder):
        steps = train(state, plan, loss=mean_square)
        for _ in range(5):
            next(steps)
        if profiled:
            with profile_step(torch.device("cpu")) as traced:
                next(steps)
    recorder.finish()
    left = [name for name, method in methods_of_units(state.model).items() if before.get(name) != method]
    return list(recorder.closed), None if traced is None else traced.seconds, left


def methods_of_units(model: Any) -> dict[Any, Any]:
    """The methods that were set on FSDP2's parameter groups, by group and name."""
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return {(id(one), name): value for one in groups for name, value in vars(one).items() if callable(value)}


def terms_of_both(
    settings: tuple[str, ...],
) -> tuple[dict[str, float], dict[str, float], list[str], list[Any]]:
    steps, traced, left = recorded(settings, HostClock())
    assert [one.step for one in steps] == [1, 2, 3, 4, 5, 6]
    assert left == [], "the methods are the same again"
    spans = step_spans(steps[-1])
    known = {"attempt": 1, "rank": 0, "host": "h", "reason": "r", "begin_ns": 0}
    own = StepSpans(step=6, seconds=steps[-1].seconds, spans=tuple(spans), **known).terms()
    return own.terms(), traced.terms(), [str(one) for one in overlaps_in_part(spans)], spans


SETTINGS = [
    (2, ("sharding.strategy=full_shard",)),
    (4, ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2", "train.microbatch=1")),
    (2, ("sharding.strategy=no_shard",)),
    (
        2,
        (
            "sharding.strategy=full_shard",
            "optimizer.in_backward=true",
            "optimizer.clip_norm=0",
            "train.microbatch=6",
        ),
    ),
]


@pytest.mark.parametrize(("count", "settings"), SETTINGS)
def test_spans_nest_and_their_sums_are_the_terms_of_the_profiler(ranks, count, settings):
    for own, traced, overlaps, spans in ranks(count).run(terms_of_both, settings):
        assert overlaps == []
        assert {one.name for one in spans} & TERM_OF_SPAN.keys() >= {"forward", "backward", "data", "update"}
        total = sum(traced.values())
        assert sum(own.values()) == pytest.approx(total, rel=0.02)
        if "sharding.strategy=no_shard" in settings:
            # The profiler also counts the time after an all-reduce was started, as waiting.
            own["compute"] += own.pop("exposed_all_reduce")
            traced["compute"] += traced.pop("exposed_all_reduce")
        for term, seconds in traced.items():
            # The profiler's own work lies between its ranges and ours; more so where replicas are summed.
            within = 0.02 if "sharding.strategy=full_shard" in settings else 0.04
            assert own[term] == pytest.approx(seconds, abs=within * total), (term, own, traced)


class Event:
    """An event of a device that is two steps behind: it has passed once `AHEAD` later ones were recorded."""

    AHEAD, recorded, made = 40, 0, 0

    def __init__(self) -> None:
        Event.made += 1
        self.number = -1

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return Event.recorded - self.number >= self.AHEAD

    def elapsed_time(self, end_event: "Event") -> float:
        assert end_event.query(), "the host would wait for the device"
        return (end_event.number - self.number) * 1.0


def device_steps() -> tuple[list[str], float, list[int], list[bool]]:
    Event.recorded = Event.made = 0
    with FakeDevice() as device:
        steps, _, _ = recorded(("sharding.strategy=full_shard",), DeviceClock(Event), profiled=False)
    kinds = {one.kind for step in steps for one in step.ranges}
    assert {"all_gather", "reduce_scatter", "wait_for_unshard"} <= kinds
    own_stream = [
        one for step in steps for one in step_spans(step) if one.track in dict(COLLECTIVES.values())
    ]
    waits = [one for one in device.waits if "profiler/" in one or "step_recorder" in one]
    return waits, Event.made / Event.recorded, [one.step for one in steps], [bool(own_stream)]


def test_on_a_device_events_are_read_later_and_reused(ranks):
    for waits, made, steps, found in ranks(2).run(device_steps):
        assert waits == []
        assert steps[:2] == [1, 2]
        assert len(steps) < 5, "the last ones have not passed"
        assert found == [True]
        assert made < 0.8, "events of steps that have passed are recorded again"


def skewed_offset() -> tuple[ClockOffset, int]:
    import time

    skew = dist.get_rank() // 2 * 1_234_567_890
    offset = compare_clocks(f"host {dist.get_rank() // 2}", now=lambda: time.perf_counter_ns() + skew)
    return offset, skew


def test_the_error_of_a_clocks_offset_is_at_most_what_is_recorded(ranks):
    found = ranks(4).run(skewed_offset)
    assert found[0][0] == found[1][0] == ClockOffset()
    assert found[2][0] == found[3][0], "ranks of one host share its clock"
    offset, skew = found[2]
    assert abs(offset.offset_ns + skew) <= offset.error_ns

"""Steps are recorded on every rank, agree with torch's profiler, and never wait for a device."""

import itertools
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
from fullshard.spec.measured_step import MODEL_PARALLEL_TRACKS, TERM_OF_SPAN, StepSpans
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.step_span import StepSpan
from fullshard.survival.phase import PhaseTracker
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.device import FakeDevice
from tests.fakes.models import VOCABULARY
from tests.planner.measured import on_all_ranks
from tests.report.nesting import overlaps_in_part
from tests.training.runs import WIDTH, mean_square, run_of, sharded
from tests.training.same_numbers import build, make_run


class Wide(nn.Module):
    """Layers that compute for long enough to be timed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH if i == 0 else 512, 512) for i in range(4))
        self.head = nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(512, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).view(512, -1, 2).mean(0)


class Observer:
    def __init__(self, recorder: StepRecorder) -> None:
        self.note_phase = recorder.note_phase

    def note_hang(self) -> None:
        raise AssertionError("nothing hangs")


def recorded(settings: tuple[str, ...], clock: Any, *, profiled: int = 0) -> Any:
    """The steps that were recorded, and the terms that the profiler found in the last ones."""
    state, plan = sharded(run_of("train.microbatch=2", f"train.steps={6 + profiled}", *settings), model=Wide)
    state.phase = PhaseTracker()
    before = methods_of_units(state.model)
    recorder = StepRecorder(clock)
    state.phase.observer = Observer(recorder)
    found: list[dict[str, float]] = []
    with record_ranges(recorder), record_units(state.model, recorder):
        steps = train(state, plan, loss=mean_square)
        for _ in range(6 if not profiled else 3):
            next(steps)
        for _ in range(profiled):
            with profile_step(torch.device("cpu")) as traced:
                next(steps)
            assert traced.seconds is not None
            found.append(traced.seconds.terms())
    recorder.finish()
    left = [name for name, method in methods_of_units(state.model).items() if before.get(name) != method]
    assert left == [], "the methods are the same again"
    return list(recorder.closed), found


def methods_of_units(model: Any) -> dict[Any, Any]:
    """The methods that were set on FSDP2's parameter groups, by group and name."""
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return {(id(one), name): value for one in groups for name, value in vars(one).items() if callable(value)}


MOST_DIFFERENCE = 0.02


def terms_of_both(settings: tuple[str, ...], profiled: int) -> tuple[list[Any], list[str], set[str]]:
    """See `terms_of_steps`; of further steps, until one of each rank was quiet enough to agree."""
    found = terms_of_steps(settings, profiled)
    for _ in range(100 // profiled):
        if on_all_ranks(any(largest_difference(*pair) < MOST_DIFFERENCE for pair in found[0])):
            break
        found = terms_of_steps(settings, profiled)
    return found


def terms_of_steps(settings: tuple[str, ...], profiled: int) -> tuple[list[Any], list[str], set[str]]:
    """Terms of profiled steps by their spans and by the profiler; spans that overlap; names of spans."""
    steps, traced = recorded(settings, HostClock(), profiled=profiled)
    assert [one.step for one in steps] == list(range(1, 4 + profiled))
    known = {"attempt": 1, "rank": 0, "host": "h", "reason": "r", "begin_ns": 0}
    spans = [tuple(step_spans(one)) for one in steps]
    own = [
        StepSpans(step=one.step, seconds=one.seconds, spans=each, **known).terms().terms()
        for one, each in zip(steps, spans, strict=True)
    ]
    overlaps = [str(one) for each in spans for one in overlaps_in_part(each)]
    return (
        list(zip(own[-profiled:], traced, strict=True)),
        overlaps,
        {one.name for each in spans for one in each},
    )


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


def largest_difference(own: dict[str, float], traced: dict[str, float]) -> float:
    """The largest difference between terms, as a part of the step."""
    total = sum(traced.values())
    return max(abs(own[term] - seconds) / total for term, seconds in traced.items())


@pytest.mark.parametrize(("count", "settings"), SETTINGS)
def test_spans_nest_and_their_sums_are_the_terms_of_the_profiler(ranks, count, settings):
    for pairs, overlaps, names in ranks(count).run(terms_of_both, settings, 8):
        assert overlaps == []
        assert names & TERM_OF_SPAN.keys() >= {"forward", "backward", "data", "update"}
        # The profiler's own work lies between its ranges and ours, and so does the time in which another
        # program has the core: the quietest step counts.
        assert min(largest_difference(own, traced) for own, traced in pairs) < MOST_DIFFERENCE, pairs


def test_a_step_that_hangs_has_the_collective_that_does_not_end():
    recorder = StepRecorder(HostClock(itertools.count(1000, 1000).__next__))
    for phase in ("data", "forward"):
        recorder.note_phase(phase, 3)
    assert recorder.current_wait() == ""
    recorder.begin_range("gather_sequence")
    assert recorder.begin_range("all_gather") is None, "it is a part of the gather of sequences"
    assert recorder.current_wait() == "wait for gather of sequences"
    [step] = recorder.copy_open_step()
    assert step.step == 4
    last = step_spans(step)[-1]
    assert (last.track, last.name, last.end) == ("parts of sequences", "gather of sequences", 3e-6)
    recorder.close()


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
        steps, _ = recorded(("sharding.strategy=full_shard",), DeviceClock(Event))
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
        assert len(steps) < 6, "the last ones have not passed"
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


def shared_work(model: str, run: Run) -> tuple[set[tuple[str, str]], float, float, list[StepSpan]]:
    """Names on the tracks of shared work; their seconds; those of the term; spans that overlap in part."""
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    built = shard(build(model, run), plan)
    state = TrainState(built, build_optimizer(built, plan), data=Rows(VOCABULARY))
    state.phase, recorder = PhaseTracker(), StepRecorder(HostClock())
    state.phase.observer = Observer(recorder)
    with record_ranges(recorder), record_units(built, recorder):
        next(train(state, plan))
    recorder.finish()
    [step] = recorder.closed
    spans = step_spans(step)
    shared = [one for one in spans if one.track in MODEL_PARALLEL_TRACKS.values()]
    known = {"attempt": 1, "rank": 0, "host": "h", "reason": "r", "begin_ns": 0}
    terms = StepSpans(step=1, seconds=step.seconds, spans=tuple(spans), **known).terms()
    seconds = sum(one.end - one.begin for one in shared)
    return {(one.track, one.name) for one in shared}, seconds, terms.model_parallel, overlaps_in_part(spans)


GATHERED = {("parts of sequences", "gather of sequences"), ("parts of sequences", "reduction of sequences")}


@pytest.mark.parametrize(
    ("model", "axis", "names"),
    [
        ("decoder", {"context": 2, "extra": ["sharding.context_method=gather"]}, GATHERED),
        (
            "decoder",
            {"context": 2, "extra": ["sharding.context_method=ulysses"]},
            {("parts of sequences", "exchange of heads")},
        ),
        ("decoder", {"tensor": 2}, GATHERED | {("parts of sequences", "reduction over ranks")}),
        (
            "mixture_decoder",
            {"expert": 2},
            {("rows of experts", "counts of rows"), ("rows of experts", "rows of experts")},
        ),
    ],
)
def test_collectives_of_shared_sequences_matmuls_and_experts_have_names_and_one_term(
    ranks, model, axis, names
):
    run = make_run(model=model, ranks=2, strategy="full_shard", length=16, **axis)
    for found, seconds, term, overlaps in ranks(2).run(shared_work, model, run):
        assert found == names
        assert term == pytest.approx(seconds) != 0
        assert overlaps == []

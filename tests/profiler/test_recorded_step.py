"""A recorded step fills its compute track, and a rank's own seconds leave out what others cause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.profiler.recorded_step import PhaseMark, RangeMark, RecordedStep, own_seconds, step_spans
from fullshard.spec.measured_step import COMPUTE, StepSpans
from tests.report.nesting import overlaps_in_part

KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "unshard", "wait_for_unshard")
KINDS += ("all_gather", "reduce_scatter", "all_reduce", "optimizer", "agreement", "write")


def nested_ranges(draw: st.DrawFn, begin: int, end: int, depth: int) -> list[RangeMark]:
    """Ranges within (begin, end), as calls of one thread nest."""
    cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
    found: list[RangeMark] = []
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        found.append(RangeMark(draw(st.sampled_from(KINDS)), draw(st.sampled_from("ab")), a, b))
        found += nested_ranges(draw, a, b, depth - 1) if depth else []
    return found


@st.composite
def steps(draw: st.DrawFn) -> RecordedStep:
    names = ["data", "forward", "backward", "reduce", "optimizer", "between steps", "saving"]
    at = sorted(draw(st.lists(st.integers(0, 1000), min_size=len(names), max_size=len(names))))
    phases = [PhaseMark(name, moment, 0) for name, moment in zip(names, at, strict=True)]
    step = RecordedStep(3, phases=phases, finished=at[5], end=at[-1] + draw(st.integers(0, 50)))
    step.ranges = nested_ranges(draw, at[0], step.end, 2)
    step.collections = [(a, a + 5) for a in draw(st.lists(st.integers(0, 1000), max_size=3))]
    return step


def measured(step: RecordedStep) -> StepSpans:
    spans = tuple(step_spans(step))
    known = {"attempt": 1, "rank": 0, "host": "h", "reason": "sampled", "begin_ns": step.begin}
    return StepSpans(step=step.step, seconds=step.seconds, spans=spans, **known)


@given(step=steps())
def test_spans_of_a_track_nest_or_are_disjoint_and_those_of_compute_fill_the_step(step: RecordedStep):
    spans = step_spans(step)
    assert overlaps_in_part([one for one in spans if one.track not in ("garbage collection",)]) == []
    compute = [one for one in spans if one.track == COMPUTE]
    assert sum(one.end - one.begin for one in compute) == pytest.approx((step.end - step.begin) * 1e-9)
    assert all(a.end == pytest.approx(b.begin) for a, b in zip(compute, compute[1:], strict=False))
    assert measured(step).terms().total == pytest.approx(step.seconds)


@given(step=steps())
def test_a_line_of_json_keeps_the_spans(step: RecordedStep):
    one = measured(step)
    again = StepSpans.parse(one.to_line())
    assert again is not None
    assert again.to_line() == one.to_line()


@pytest.mark.parametrize(
    "line", ["", "1", "[]", "{}", '{"step":1}', '{"step":1,"names":[],"units":[],"spans":[[0,0,0,0,1]]}']
)
def test_another_line_is_no_step(line: str):
    assert StepSpans.parse(line) is None


def step_of(*ranges: RangeMark, queued: int = 0) -> RecordedStep:
    phases = [
        PhaseMark("forward", 0, 0),
        PhaseMark("backward", 100, queued),
        PhaseMark("optimizer", 300, queued),
    ]
    return RecordedStep(1, phases=phases, ranges=list(ranges), finished=400, end=400)


def test_the_unit_that_began_last_and_has_not_ended_computes():
    # `b` takes tokens: its backward ends with the whole backward, after `a` began and ended.
    step = step_of(
        RangeMark("pre_forward", "a", 0, 10),
        RangeMark("post_forward", "a", 50, 60),
        RangeMark("pre_backward", "b", 110, 120),
        RangeMark("pre_backward", "a", 150, 160),
        RangeMark("post_backward", "a", 200, 210),
        RangeMark("post_backward", "b", 290, 300),
    )
    compute = [s for s in step_spans(step) if s.track == COMPUTE and s.name in ("forward", "backward")]
    units = [(round(s.begin * 1e9), s.unit) for s in compute]
    assert units == [(10, "a"), (60, None), (100, None), (120, "b"), (160, "a"), (210, "b")]


def test_own_seconds_leave_out_waiting_the_run_queue_collections_and_pauses():
    step = step_of(
        RangeMark("all_gather", "a", 10, 40),
        RangeMark("exchange_heads", None, 120, 150),
        RangeMark("all_gather", None, 125, 145),  # within it: counted once
        queued=7,
    )
    step.collections, step.pauses = [(50, 60)], [(55, 80), (140, 160)]
    own = own_seconds(step)
    # forward: 100 - 30 waiting - 10 collecting - 20 paused - 7 queued; backward: 200 - 30 - 10 paused outside
    assert own.by_phase == pytest.approx({"forward": 33e-9, "backward": 160e-9, "optimizer": 100e-9})
    assert (own.waiting, own.garbage, own.paused) == pytest.approx((60e-9, 10e-9, 40e-9))


def test_writing_within_an_agreement_is_a_ranks_own_work():
    step = step_of(RangeMark("agreement", None, 310, 390), RangeMark("write", None, 320, 370))
    own = own_seconds(step)
    assert own.waiting == pytest.approx(30e-9)
    assert own.by_phase["optimizer"] == pytest.approx(70e-9)


def test_on_a_device_the_methods_that_wait_are_waiting_and_collectives_have_streams_of_their_own():
    step = step_of(RangeMark("all_gather", "a", 5, 90), RangeMark("wait_for_unshard", "a", 20, 60))
    step.on_device = True
    spans = step_spans(step)
    [apart] = [one for one in spans if one.track == "all-gather"]
    assert (apart.begin, apart.end) == pytest.approx((5e-9, 90e-9))
    waits = [one for one in spans if one.track == COMPUTE and one.name == "wait for all-gather"]
    assert [(round(one.begin * 1e9), round(one.end * 1e9)) for one in waits] == [(20, 60)]
    assert own_seconds(step).waiting == pytest.approx(40e-9)

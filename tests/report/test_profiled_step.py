"""A profile becomes spans: each moment of a step has one kind of work, of a unit."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import SpecError
from fullshard.report.profiled_step import (
    ON_GPU,
    STEP_RANGE,
    parse_kernel_trace,
    parse_profile_json,
    profiled_step,
    read_kernel_trace,
)
from fullshard.spec.records.step_spans import COMPUTE, ProfiledStep, StepSpan
from tests.report.profiles import BACKWARD_THREAD, MadeProfile, made_step, overlaps_in_part

KINDS = (
    *("pre_forward (a)", "post_forward (a)", "pre_backward (b)", "post_backward_reduce (b)"),
    "all_gather (a)",
)
RANGES = (*(f"FSDP::{kind}" for kind in KINDS), "fullshard::all_gather", "fullshard::all_reduce", "aten::mm")
RANGES += ("c10d::allreduce_", "fullshard::norm", "fullshard::gather_sequence")

Ranges = list[tuple[str, float, float]]


def nested_ranges(draw: st.DrawFn, begin: int, end: int, depth: int) -> Ranges:
    """Ranges within (begin, end), as calls of one thread nest."""
    cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
    found: Ranges = []
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        found.append((draw(st.sampled_from(RANGES)), a, b))
        found += nested_ranges(draw, a, b, depth - 1) if depth else []
    return found


@st.composite
def steps(draw: st.DrawFn) -> MadeProfile:
    parts: Ranges = [("fullshard::data", 10, 20), ("fullshard::forward", 20, 400)]
    parts += [("fullshard::backward", 400, 800), ("fullshard::update", 900, 950)]
    inside = [one for _, a, b in parts for one in nested_ranges(draw, int(a), int(b), 2)]
    return made_step(*parts, *inside, end=1000)


def compute(step: ProfiledStep) -> list[StepSpan]:
    return [one for one in step.spans if one.track == COMPUTE]


@given(made=steps())
def test_spans_of_a_track_nest_or_are_disjoint_and_those_of_compute_fill_the_step(made: MadeProfile):
    step = made.measured()
    assert overlaps_in_part(step.spans) == []
    spans = compute(step)
    assert (spans[0].begin, spans[-1].end) == pytest.approx((0, 1000e-6))
    assert all(a.end == pytest.approx(b.begin) for a, b in zip(spans, spans[1:], strict=False))
    assert step.terms().total == pytest.approx(1000e-6)


def test_a_profile_without_a_step_is_refused():
    with pytest.raises(SpecError, match="not of a step"):
        MadeProfile().measured()


def test_a_profile_of_a_gpu_without_its_work_is_refused():
    event = {"ph": "X", "ts": 0, "dur": 9, "pid": 1, "tid": 1, "cat": "user_annotation", "name": STEP_RANGE}
    for on_gpu in (0, 1):
        trace = parse_profile_json(json.dumps({"traceEvents": [event], ON_GPU: on_gpu}).encode(), name="a")
        with pytest.raises(SpecError, match="no work of the GPU") if on_gpu else nullcontext():
            assert profiled_step(trace, step=1, rank=0).spans


def test_on_the_host_the_inner_range_counts_and_casts_are_the_models():
    step = made_step(
        ("fullshard::data", 10, 30),
        ("fullshard::forward", 50, 750),
        ("FSDP::cast_forward_inputs", 60, 80),
        ("FSDP::pre_forward (a)", 100, 300),
        ("FSDP::all_gather (a)", 110, 250),
        ("fullshard::all_gather", 150, 240),
        ("fullshard::reduce_sequence", 350, 400),
        ("fullshard::all_gather", 355, 395),
        ("FSDP::post_backward_reduce (a)", 500, 600),
        ("fullshard::reduce_scatter", 520, 560),
        ("c10d::allreduce_", 521, 530),
        ("FSDP::root_post_backward_callback", 610, 690),
        ("fullshard::all_reduce", 620, 670),
        ("fullshard::update", 800, 900),
        end=1000,
    ).measured()
    assert {name: round(value * 1e6) for name, value in step.terms().terms().items()} == {
        "compute": 700 - 200 - 100 - 80 - 50,
        "model_parallel": 50,
        "exposed_all_gather": 90,
        "exposed_reduce_scatter": 40,
        "exposed_all_reduce": 50,
        "engine": 200 - 90 + 100 - 40 + 80 - 50,
        "optimizer": 100,
        "data": 20,
        "other": 1000 - 700 - 20 - 100,
    }
    waits = {(one.name, one.unit) for one in compute(step) if one.name.startswith("wait for")}
    assert ("wait for all-gather", "a") in waits
    assert ("wait for reduction of sequences", None) in waits
    shared = [one for one in step.spans if one.track == "parts of sequences"]
    assert [(one.name, round(one.begin * 1e6)) for one in shared] == [("reduction of sequences", 350)]


def test_the_unit_that_began_last_and_has_not_ended_computes():
    # `b` takes tokens: its backward ends with the whole backward, after `a` began and ended.
    step = made_step(
        ("fullshard::forward", 0, 100),
        ("FSDP::pre_forward (a)", 1, 10),
        ("FSDP::post_forward (a)", 50, 60),
        ("fullshard::backward", 100, 300),
        ("FSDP::pre_backward (b, c)", 110, 120),
        ("FSDP::pre_backward (a)", 150, 160),
        ("FSDP::post_backward_accumulate (a)", 200, 210),
        end=300,
    ).measured()
    units = [(round(s.begin * 1e6), s.unit) for s in compute(step) if s.name in ("forward", "backward")]
    assert units == [(0, None), (10, "a"), (60, None), (100, None), (120, "b+c"), (160, "a"), (210, "b+c")]
    assert {one.microbatch for one in step.spans} == {1}


@pytest.mark.parametrize(
    ("following", "end"),
    [(("aten::narrow", 40, 45), 40), (("aten::empty", 12, 18), 60), (("aten::add", 70, 75), 60)],
)
def test_all_reduce_lasts_to_the_next_operation_or_its_range(following: tuple[str, float, float], end: int):
    reduction = [("FSDP::post_backward_reduce (a)", 0, 60), ("c10d::allreduce_", 10, 20)]
    [wait] = [s for s in compute(made_step(*reduction, following, end=100).measured()) if "wait" in s.name]
    assert (wait.name, wait.unit) == ("wait for all-reduce", "a")
    assert (wait.begin, wait.end) == pytest.approx((10e-6, end * 1e-6))


def test_another_thread_of_the_host_takes_no_time_of_the_step():
    made = made_step(("fullshard::forward", 0, 100), end=100)
    made.host("fullshard::all_gather", 0, 100, thread=2)
    assert made.measured().terms().compute == pytest.approx(100e-6)


def test_on_a_device_kernels_count_by_the_work_that_launched_them():
    made = made_step(
        ("fullshard::data", 0, 5),
        ("fullshard::forward", 5, 100),
        ("FSDP::pre_forward (a)", 5, 20),
        ("FSDP::all_gather (a)", 6, 15),
        ("FSDP::all_gather_copy_out (a)", 15, 18),
        ("FSDP::post_forward (a)", 60, 65),
        ("fullshard::backward", 100, 200),
        ("fullshard::update", 200, 210),
        end=210,
    )
    made.host("FSDP::pre_backward (a)", 110, 10, thread=BACKWARD_THREAD)
    made.host("FSDP::post_backward_reduce (a)", 150, 20, thread=BACKWARD_THREAD)
    made.kernel("ncclDevKernel_AllGather_RING_LL", 20, 30, launched=10)
    made.kernel("split_copy", 50, 5, launched=16)
    made.kernel("gemm", 55, 40, launched=30)
    made.kernel("gemm", 130, 40, launched=130, thread=BACKWARD_THREAD)
    made.kernel("ncclDevKernel_Generic", 150, 80, launched=160, thread=BACKWARD_THREAD)
    made.kernel("adamw", 230, 10, launched=205)
    step = made.measured()
    found = [(s.name, s.unit, round(s.begin * 1e6), round(s.end * 1e6)) for s in compute(step)]
    assert found == [
        ("data", None, 0, 5),
        ("wait for launches", None, 5, 20),
        ("wait for all-gather", "a", 20, 50),
        ("copy", "a", 50, 55),
        ("forward", "a", 55, 95),
        ("wait for launches", None, 95, 130),
        ("backward", "a", 130, 170),
        ("wait for reduce-scatter", "a", 170, 230),
        ("update", None, 230, 240),
    ]
    [reduced] = [one for one in step.spans if one.track == "reduce-scatter"]
    assert (reduced.unit, reduced.end - reduced.begin) == ("a", pytest.approx(80e-6))


CUT_OFF = gzip.compress(b"{}", mtime=0)[:-4]
DAMAGED = gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": 3}', CUT_OFF, DAMAGED])
def test_other_files_are_no_profiles(tmp_path: Path, content: bytes):
    for name in ("step.json", "step.json.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError):
            read_kernel_trace(tmp_path / name)


def test_a_profile_of_more_values_than_memory_has_room_for_is_refused():
    with pytest.raises(SpecError, match="about 16,000,0.. values, at most 16,000,000"):
        parse_profile_json(b'{"traceEvents": [' + b"{}," * 8_000_000 + b"{}]}", name="it")


def test_events_with_odd_fields_are_left_out():
    odd = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "cpu_op", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1e308, "dur": 1e308},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": float("nan"), "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "k", "ts": 1, "dur": 0, "args": {"correlation": [1]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::t", "ts": 3, "dur": 0, "tid": []},
    ]
    odd += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {"Input Dims": [3, "x"]}}
    ]
    trace = parse_kernel_trace(json.loads(json.dumps(odd)))
    assert [(one.name, one.begin) for one in trace.host] == [("aten::mm", 1), ("k", 1), ("aten::t", 3)]
    assert trace.device == []

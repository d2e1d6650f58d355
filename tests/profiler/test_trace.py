"""Every moment of a step goes to one term; a collective is exposed while nothing is computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import record_function

from fullshard.profiler.trace import (
    DEVICE_ORDER,
    KindInterval,
    TraceEvent,
    device_intervals,
    divide_time_among_kinds,
    host_intervals,
    profile_step,
    step_seconds_by_term,
)

SPANS = st.lists(
    st.builds(
        lambda kind, start, length: KindInterval(kind, start, start + length),
        st.sampled_from(DEVICE_ORDER),
        st.integers(-5, 30),
        st.integers(0, 20),
    ),
    max_size=12,
)


@given(spans=SPANS, start=st.integers(0, 10), length=st.integers(0, 30))
def test_every_moment_goes_to_the_first_kind_that_is_active(
    spans: list[KindInterval], start: int, length: int
):
    expected = dict.fromkeys([*DEVICE_ORDER, "other"], 0)
    for moment in range(start, start + length):
        active = {span.kind for span in spans if span.start <= moment < span.end}
        expected[next((kind for kind in DEVICE_ORDER if kind in active), "other")] += 1
    assert divide_time_among_kinds(spans, DEVICE_ORDER, start=start, end=start + length) == expected


def test_a_collective_is_exposed_where_no_kernel_of_the_model_runs():
    spans = [
        KindInterval("exposed_all_gather", 0, 10),
        KindInterval("compute", 6, 20),
        KindInterval("exposed_reduce_scatter", 15, 40),
        KindInterval("engine", 20, 23),  # a copy while gradients are on their way
        KindInterval("exposed_all_reduce", 38, 45),
    ]
    own = divide_time_among_kinds(spans, DEVICE_ORDER, start=0, end=50)
    assert own == {
        "compute": 14,
        "optimizer": 0,
        "engine": 3,
        "model_parallel": 0,
        "exposed_all_gather": 6,
        "exposed_reduce_scatter": 17,
        "exposed_all_reduce": 5,
        "data": 0,
        "other": 5,
    }


def host(*events: tuple[str, int, int]) -> list[TraceEvent]:
    return [TraceEvent(*event, thread=1, id=number) for number, event in enumerate(events, 1)]


def test_on_the_host_the_inner_range_counts_and_casts_are_the_models():
    seconds = step_seconds_by_term(
        host(
            ("fullshard::step", 0, 1000),
            ("fullshard::data", 10, 30),
            ("fullshard::compute", 50, 700),
            ("FSDP::cast_forward_inputs", 60, 80),
            ("FSDP::pre_forward", 100, 300),
            ("FSDP::all_gather", 110, 250),
            ("fullshard::all_gather", 150, 240),
            ("fullshard::model_parallel", 350, 400),
            ("fullshard::all_gather", 355, 395),
            ("FSDP::post_backward_reduce", 500, 600),
            ("fullshard::reduce_scatter", 520, 560),
            ("c10d::allreduce_", 521, 530),
            ("FSDP::root_post_backward_callback", 610, 690),
            ("fullshard::all_reduce", 620, 670),
            ("fullshard::optimizer", 800, 900),
        )
    )
    in_ns = {name: round(value * 1e9) for name, value in seconds.terms().items()}
    assert in_ns == {
        "compute": 650 - 200 - 100 - 80 - 50,
        "model_parallel": 50,
        "exposed_all_gather": 90,
        "exposed_reduce_scatter": 40,
        "exposed_all_reduce": 50,
        "engine": 200 - 90 + 100 - 40 + 80 - 50,
        "optimizer": 100,
        "data": 20,
        "other": 1000 - 650 - 20 - 100,
    }


@pytest.mark.parametrize(
    ("next_event", "end"),
    [(("aten::narrow", 40, 45), 40), (("gloo:all_reduce", 12, 18), 60), (("aten::add", 70, 75), 60)],
)
def test_an_all_reduce_lasts_to_the_next_operation_or_the_end_of_its_range(
    next_event: tuple[str, int, int], end: int
):
    events = host(("FSDP::post_backward_reduce", 0, 60), ("c10d::allreduce_", 10, 20), next_event)
    assert KindInterval("exposed_all_reduce", 10, end) in host_intervals(events)


def test_another_thread_of_the_host_takes_no_time_of_the_step():
    events = host(("fullshard::step", 0, 100), ("fullshard::compute", 0, 100))
    worker = TraceEvent("fullshard::all_gather", 0, 100, thread=2, id=9)
    assert step_seconds_by_term([*events, worker]).compute == pytest.approx(100e-9)


def test_kernels_are_told_by_name_or_by_the_range_of_their_launch():
    launches = host(
        ("fullshard::step", 0, 100),
        ("fullshard::compute", 1, 60),
        ("aten::mm", 2, 3),
        ("FSDP::all_gather", 4, 9),
        ("aten::copy_", 5, 6),
        ("fullshard::optimizer", 70, 80),
        ("aten::_fused_adamw_", 71, 72),
        ("fullshard::model_parallel", 81, 85),
        ("aten::cat", 82, 83),
    )
    kernels = [("gemm", 3), ("ncclDevKernel_AllGather_RING_LL", 5), ("ncclDevKernel_Generic", 5)]
    kernels += [("copy", 5), ("adamw", 7), ("ncclDevKernel_AllReduce_Sum_f32", 0), ("Memset", 0)]
    kernels += [("ncclDevKernel_AllGather_RING_LL", 9), ("cat", 9)]
    events = [*launches, *(TraceEvent(name, 0, 1, launched_by=by, on_device=True) for name, by in kernels)]
    assert [span.kind for span in device_intervals(events)] == [
        "compute",
        "exposed_all_gather",
        "exposed_all_gather",
        "engine",
        "optimizer",
        "exposed_all_reduce",
        "compute",
        "model_parallel",
        "compute",
    ]


def test_a_step_on_a_device_ends_with_its_last_kernel():
    seconds = step_seconds_by_term(
        [
            *host(("fullshard::step", 0, 100), ("fullshard::data", 0, 20), ("fullshard::compute", 20, 90)),
            TraceEvent("gemm", 30, 80, launched_by=3, on_device=True),
            TraceEvent("ncclDevKernel_ReduceScatter_Sum_f32", 70, 120, launched_by=3, on_device=True),
        ]
    )
    assert seconds.total == pytest.approx(120e-9)
    assert seconds.compute == pytest.approx(50e-9)
    assert seconds.exposed_reduce_scatter == pytest.approx(40e-9)
    assert seconds.data == pytest.approx(20e-9)
    assert seconds.other == pytest.approx(10e-9)


def test_a_traced_block_is_told_term_by_term_and_silently(capfd: pytest.CaptureFixture[str]):
    model = nn.Linear(64, 64)
    with profile_step(torch.device("cpu")) as traced:
        with record_function("fullshard::compute"):
            model(torch.ones(8, 64)).sum().backward()
        with record_function("fullshard::optimizer"):
            model.weight.grad = None
    assert traced.seconds is not None
    assert min(traced.seconds.compute, traced.seconds.optimizer) > 0
    assert traced.seconds.exposed_collective_seconds == traced.seconds.engine == 0
    assert not torch.autograd._profiler_enabled()
    assert capfd.readouterr() == ("", "")

"""The quick bound on memory is never above the peak, and not far below."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.planner.predict.memory import (
    least_bytes_of_mesh,
    least_bytes_of_trace,
    peak_bytes,
    peak_lower_bound,
)
from fullshard.planner.search.candidates import build_plan, iterate_candidates
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, Shape, decoder_spec, run_for

SHAPES = st.builds(
    Shape,
    layers=st.integers(3, 9),
    d_model=st.sampled_from([64, 512]),
    vocabulary=st.sampled_from([256, 32_000]),
    precision=st.sampled_from(["fp32", "bf16", "bf16_reduce", "bf16_pure"]),
)


def bound_of(spec: ModelSpec, plan: Plan) -> int:
    return peak_lower_bound(least_bytes_of_trace(spec, plan), least_bytes_of_mesh(spec, plan))


@settings(max_examples=15)
@given(st.data())
def test_the_bound_is_never_above_the_peak(data: st.DataObject):
    shape, world = data.draw(SHAPES), data.draw(st.sampled_from([1, 2, 8, 12]))
    hardware, spec = hardware_of(1, world), decoder_spec(shape)
    everything = list(
        iterate_candidates(spec, hardware, run=run_for(shape, f"train.global_batch={3 * world}"))
    )
    for candidate in data.draw(st.lists(st.sampled_from(everything), min_size=10, max_size=20)):
        plan = build_plan(candidate, run_for(shape, f"train.global_batch={3 * world}"), hardware=hardware)
        assert bound_of(spec, plan) <= peak_bytes(spec, plan).total


def test_the_bound_is_near_enough_to_spare_most_of_the_peaks():
    hardware, spec = hardware_of(1, 8), decoder_spec(LLAMA_8B)
    run = run_for(LLAMA_8B, "train.global_batch=16")
    ratios = sorted(
        bound_of(spec, plan) / peak_bytes(spec, plan).total
        for candidate in iterate_candidates(spec, hardware, run=run)
        for plan in (build_plan(candidate, run, hardware=hardware),)
    )
    assert ratios[len(ratios) // 2] > 2 / 3

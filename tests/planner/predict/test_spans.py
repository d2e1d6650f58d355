"""The planned step as spans: they fill its tracks, and their sums are the plan's terms."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.planner.predict.offload import TIERS
from fullshard.planner.predict.spans import predict_step_spans
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.prediction import TimeTerms
from fullshard.spec.records.step_spans import StepSpan
from fullshard.spec.run import Tier
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import decoder_spec, plan_for
from tests.planner.predict.test_offload import SMALL, Where, tiered, with_host
from tests.planner.predict.test_step_time import SHAPES, hardwares, plans


def seconds_by_name(spans: Iterable[StepSpan]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for span in spans:
        sums[span.name] += span.end - span.begin
    return sums


def check_no_track_has_two_spans_at_once(spans: Sequence[StepSpan]) -> None:
    """Viewers drop spans that overlap in part."""
    free: dict[str, float] = defaultdict(lambda: float("-inf"))
    for span in sorted(spans, key=lambda one: one.begin):
        assert span.begin >= free[span.track] - 1e-12, span
        free[span.track] = span.end


def check_sums_are_terms(spans: Sequence[StepSpan], terms: TimeTerms, *, within: float = 1e-9) -> None:
    sums = seconds_by_name(span for span in spans if span.track == "compute")
    work = ("start", "forward", "after forward", "loss", "backward", "after backward", "end of backward")
    computed = sum(sums[name] for name in (*work, "wait for launches"))
    assert computed == pytest.approx(terms.compute + terms.recompute, abs=within)
    assert sums["wait for all-gather"] == pytest.approx(terms.exposed_all_gather, abs=within)
    assert sums["wait for reduce-scatter"] == pytest.approx(terms.exposed_reduce_scatter, abs=within)
    reduced = sums["wait for all-reduce"] + sums["sum of loss and norm"]
    assert reduced == pytest.approx(terms.exposed_all_reduce, abs=within)
    copied = sums["copy"] + sums["FSDP2"] + sums["wait for copies of gradients"]
    assert copied == pytest.approx(terms.engine, abs=within)
    assert sum(sums.values()) == pytest.approx(terms.total, abs=within), "the track has no gaps"


@settings(max_examples=30)
@given(st.data())
def test_spans_fill_the_compute_track_and_sum_to_the_terms(data: st.DataObject):
    shape, hardware = data.draw(SHAPES), data.draw(hardwares())
    plan, spec = data.draw(plans(shape)), decoder_spec(shape)
    spans = predict_step_spans(spec, plan, hardware=hardware)
    check_no_track_has_two_spans_at_once(spans)
    check_sums_are_terms(spans, StepTimePredictor(spec, hardware).predict_time(plan))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("update", ["host", "device"])
def test_spans_of_an_offloaded_step_end_at_its_predicted_time(device: str, tier: Tier, update: Where):
    spec, hardware = decoder_spec(SMALL), with_host(hardware_of(1, 4)).model_copy(update={"device": device})
    plan = tiered(plan_for(SMALL, 4, "sharding.strategy=full_shard"), tier, update)
    spans = predict_step_spans(spec, plan, hardware=hardware)
    check_no_track_has_two_spans_at_once(spans)
    total = StepTimePredictor(spec, hardware).predict_time(plan).total
    assert max(span.end for span in spans) == pytest.approx(total, abs=1e-9)

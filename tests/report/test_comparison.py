"""Predictions and measurements share lines, which sum to the totals under them."""

import io
import json

import pytest

from fullshard.report.comparison import (
    ComparisonLine,
    compare_prediction,
    comparison_rows,
    measurement_rows,
    show_measurement,
)
from fullshard.spec.prediction import MemoryTerms, OffloadTerms, Prediction, TimeTerms
from fullshard.spec.records.measurement import DriveTrafficBytes, Measurement, PeakBytes, StepSeconds
from tests.spec.records.test_measurement import measurement, pace

MEMORY = MemoryTerms(
    moment="backward",
    parameter_shards=100,
    gradients=50,
    optimizer_state=200,
    buffers=0,
    batch=1,
    units_in_flight=30,
    whole_gradients=9,
    activations=80,
    loss=20,
    backward=10,
    workspace=3,
)
TIME = TimeTerms(
    compute=0.25,
    recompute=0.05,
    exposed_all_gather=0.04,
    exposed_reduce_scatter=0.02,
    exposed_all_reduce=0.01,
    engine=0.01,
    contention=0.02,
    optimizer=0.03,
    stragglers=0.01,
)


def prediction() -> Prediction:
    return Prediction(
        hardware="2 x cpu",
        memory=MEMORY,
        allocator_reserve_bytes=100,
        capacity_bytes=1000,
        time=TIME,
        tokens_per_step=100,
        tokens_per_second=100 / TIME.total,
        mfu=0.2,
    )


def measured(**changes: object) -> Measurement:
    peak = PeakBytes(
        parameter_shards=100, gradients=40, optimizer_state=200, buffers=0, units_in_flight=30, rest=130
    )
    seconds = StepSeconds(compute=6, exposed_all_gather=1, engine=1, optimizer=1, data=0.5, other=0.5)
    return measurement(**{"peak_bytes": peak, "step_seconds": seconds.scaled_to(0.5)} | changes)


def test_mfu_is_compared_only_if_the_plan_is_of_the_peak_of_the_run():
    """On the CPU, the peak of the plan is another than the one that a run measures."""
    rate, alone = compare_prediction(prediction(), measured()).speed
    assert (alone.predicted, alone.measured) == (None, measured().mfu)
    peak = measured().peak
    assert peak is not None
    of_same_peak = prediction().tokens_per_second * 1e6 / (2 * peak.flops_per_second)
    made = prediction().model_copy(update={"mfu": of_same_peak})
    _, mfu = compare_prediction(made, measured()).speed
    assert (mfu.predicted, mfu.measured) == (of_same_peak, measured().mfu)
    assert mfu.error_percent == pytest.approx(rate.error_percent)
    idle = measured(pace=measured().pace.model_copy(update={"tokens": 0}))
    assert [line.measured for line in compare_prediction(made, idle).speed] == [0.0, 0.0]


def on_cuda() -> Measurement:
    # The meter counts all gradients as if they were there at the peak, and units in flight as rest.
    peak = PeakBytes(
        parameter_shards=100,
        gradients=60,
        optimizer_state=200,
        buffers=0,
        units_in_flight=0,
        rest=140,
        allocated=500,
        reserved=640,
    )
    return measured(peak_bytes=peak)


@pytest.mark.parametrize("made", [measured(), on_cuda()], ids=["cpu", "cuda"])
def test_lines_sum_to_the_totals(made: Measurement):
    comparison = compare_prediction(prediction(), made)
    for lines in (comparison.memory, comparison.step):
        terms = [line for line in lines if line.term not in ("total", "reserved")]
        total = next(line for line in lines if line.term == "total")
        assert sum(line.predicted or 0 for line in terms) == pytest.approx(total.predicted)
        assert sum(line.measured or 0 for line in terms) == pytest.approx(total.measured)


def test_terms_that_meters_do_not_separate_share_a_line():
    by_term = {line.term: line for line in compare_prediction(prediction(), measured()).memory}
    assert by_term["rest"].predicted == 1 + 9 + 80 + 20 + 10 + 3
    assert by_term["gradients"].error_percent == pytest.approx(25)
    cuda = {line.term: line for line in compare_prediction(prediction(), on_cuda()).memory}
    assert cuda["rest"].predicted == 123 + 30 + 50
    assert cuda["rest"].measured == 500 - 300
    assert (cuda["reserved"].predicted, cuda["reserved"].measured) == (603, 640)
    assert {"gradients", "units_in_flight"}.isdisjoint(cuda)
    step = {line.term: line for line in compare_prediction(prediction(), measured()).step}
    assert step["compute"].predicted == pytest.approx(0.25 + 0.05 + 0.02)
    assert step["compute"].measured == pytest.approx(0.325)
    assert (step["data"].predicted, step["stragglers"].measured) == (None, None)


def test_error_is_relative_to_the_measurement():
    assert ComparisonLine(term="x", predicted=90, measured=100).error_percent == pytest.approx(-10)
    assert ComparisonLine(term="x", predicted=90, measured=0).error_percent is None
    assert ComparisonLine(term="x", measured=100).error_percent is None


def test_a_person_reads_both_and_every_term_once():
    rows = {row[0].strip(): row[1:] for row in comparison_rows(compare_prediction(prediction(), measured()))}
    assert rows["gradients"] == ("50 B", "40 B", "+25.0 %")
    assert rows["optimizer"] == ("30.0 ms", "50.0 ms", "-40.0 %")
    assert rows["waiting: data"] == ("-", "25.0 ms", "")
    assert rows["tokens/s"][1:] == ("200", "+13.6 %")
    assert "buffers" not in rows, "what is nothing has no line"
    out = io.StringIO()
    show_measurement(measured(), prediction=prediction(), file=out)
    assert out.getvalue().count("parameter shards") == 1
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_without_a_prediction_every_term_that_was_measured_has_its_line():
    rows = {row[0].strip(): row[1:] for row in comparison_rows(compare_prediction(None, measured()))}
    assert rows["waiting: all-gather"] == ("-", "50.0 ms", "")
    assert rows["gradients"] == ("-", "40 B", "")
    assert rows["in all"] == ("-", "500.0 ms", "")


def test_unmeasured_figures_are_not_compared():
    bare = compare_prediction(prediction(), measured(peak_bytes=None, step_seconds=None, pace=pace(2)))
    assert bare.memory == bare.step == bare.speed == ()
    assert (
        json.loads(compare_prediction(prediction(), measured()).model_dump_json())["step"][0]["term"]
        == "compute"
    )


def with_tier(**terms: object) -> Prediction:
    offload = OffloadTerms.model_validate({"host_bytes": 300, "disk_bytes": 900, "disk_seconds": 0.1} | terms)
    time = TIME.model_copy(update={"optimizer": 0.0, "offload": 0.03})
    return prediction().model_copy(update={"offload": offload, "time": time})


def measured_with_tier() -> Measurement:
    peak = measured().peak_bytes
    assert peak is not None
    return measured(
        peak_bytes=peak.model_copy(update={"host": 200}),
        offload="optimizer:nvme in drive",
        drive=DriveTrafficBytes(read=4, written=4),
    )


def test_comparison_has_host_and_drive_of_a_tier():
    made, expected = measured_with_tier(), with_tier(disk_read_bytes=2, disk_written_bytes=4)
    rows = {row[0].strip(): row[1:] for row in comparison_rows(compare_prediction(expected, made))}
    assert rows["host memory, beside"] == ("300 B", "200 B", "+50.0 %")
    assert rows["optimizer"] == ("30.0 ms", "50.0 ms", "-40.0 %")
    assert rows["read in a step"] == ("2 B", "4 B", "-50.0 %")
    assert rows["written in a step"] == ("4 B", "4 B", "+0.0 %")
    assert dict(measurement_rows(made))["offload"] == "optimizer:nvme in drive"


def test_time_of_an_unmeasured_drive_is_not_predicted():
    rows = {
        row[0].strip(): row[1]
        for row in comparison_rows(compare_prediction(with_tier(disk_seconds=None), measured()))
    }
    for term in ("optimizer", "tokens/s"):
        assert rows[term] == "-"
    assert [line.predicted for line in compare_prediction(with_tier(disk_seconds=None), measured()).step][
        -1
    ] is None
    assert rows["compute, host"] != "-"


def test_crumbs_of_memory_have_no_line():
    peak = PeakBytes(
        parameter_shards=156, gradients=0, optimizer_state=300, buffers=0, units_in_flight=0, rest=20_000_000
    )
    rows = [
        row[0].strip() for row in comparison_rows(compare_prediction(prediction(), measured(peak_bytes=peak)))
    ]
    assert "parameter shards" not in rows
    assert "optimizer state" in rows


def test_seconds_of_rates_that_nobody_measured_are_marked_and_have_no_errors():
    unmeasured = prediction().model_copy(update={"calibration": "none"})
    rows = comparison_rows(compare_prediction(unmeasured, measured()))
    begin = [row[0] for row in rows].index("step (not calibrated)")
    assert not any(row[3] for row in rows[begin:])
    known = comparison_rows(compare_prediction(prediction(), measured()))
    assert any(row[3] for row in known[[row[0] for row in known].index("step") :])

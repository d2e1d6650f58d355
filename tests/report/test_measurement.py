"""The table says what was measured, names its units, and says nothing about the rest."""

import io

from fullshard.report.comparison import measurement_rows, show_measurement
from fullshard.spec.records.measurement import Measurement, Throughput
from tests.spec.records.test_measurement import measurement, pace


def whole() -> Measurement:
    return measurement(
        first_loss=5.5,
        last_loss=1.5,
        validation_loss=2.4,
        startup_seconds=8.0,
        checkpoint="runs/default/checkpoints/step-00000010",
    )


def test_without_a_terminal_the_table_is_short_ascii_and_aligned():
    file = io.StringIO()
    show_measurement(whole(), file=file)
    text = file.getvalue()
    lines = text.partition("\n\n")[0].splitlines()
    assert len(lines) <= 25
    assert text.isascii()
    assert "\x1b" not in text
    labels = [label for label, _ in measurement_rows(whole())]
    column = max(map(len, labels)) + 2
    assert [line[:column].rstrip() for line in lines] == labels


def test_rows_of_a_measurement():
    assert {
        ("speed", "200 tokens/s on all ranks, 100 per rank"),
        ("", "over 6 steps; left out: 4 warmup steps"),
        ("step", "500.0 ms, of these 100.0 ms waiting for data"),
        ("MFU", "10.0 % of 1.00 GFLOP/s per rank (cpu, fp32, a matmul measured here)"),
        ("validation", "2.4000 nats a token"),
    } <= set(measurement_rows(whole()))


def test_a_loss_of_the_users_own_has_no_unit():
    rows = dict(measurement_rows(whole().model_copy(update={"has_own_loss": True})))
    assert rows["validation"] == "loss 2.4000"


def test_unmeasured_figures_have_no_line():
    bare = measurement(peak=None, peak_bytes=None, world_size=1)
    labels = [label for label, _ in measurement_rows(bare)]
    assert labels == ["run", "steps", "speed", "", "step"]


def test_one_step_is_not_written_as_one_steps():
    rows = measurement_rows(measurement(pace=pace(2, 1).model_copy(update={"untimed_steps": 1, "steps": 3})))
    assert ("", "over 1 step; left out: 1 warmup step and 1 profiled step") in set(rows)


def test_a_run_of_nothing_but_warmup_has_no_speed():
    rows = dict(measurement_rows(measurement(pace=pace(3))))
    assert rows["speed"] == "not known: 3 steps, all warmup"


def test_resumed_run_at_its_end_has_no_steps():
    rows = dict(measurement_rows(measurement(first_step=301, pace=Throughput(warmup_steps=5))))
    assert rows["steps"] == "none: 300 were done before"

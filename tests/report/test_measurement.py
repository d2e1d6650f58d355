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


def test_the_table_is_short_plain_and_aligned_off_a_terminal():
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


def test_speed_is_that_of_all_ranks_and_of_one_and_says_what_was_left_out():
    rows = list(measurement_rows(whole()))
    assert ("speed", "200 tokens/s on all ranks, 100 per rank") in rows
    assert ("", "over 6 steps, the 4 warmup steps before them left out") in rows
    assert ("step", "500.0 ms, of these 100.0 ms waiting for data") in rows


def test_mfu_says_what_it_is_held_against():
    rows = dict(measurement_rows(whole()))
    assert rows["MFU"] == "10.0 % of 1.00 GFLOP/s per rank (cpu, fp32, a matmul measured here)"


def test_what_was_not_measured_has_no_line():
    bare = measurement(peak=None, peak_bytes=None, world_size=1)
    labels = [label for label, _ in measurement_rows(bare)]
    assert labels == ["run", "steps", "speed", "", "step"]


def test_a_run_of_nothing_but_warmup_has_no_speed():
    rows = dict(measurement_rows(measurement(pace=pace(3))))
    assert rows["speed"] == "not known: all 3 steps were warmup"


def test_a_resumed_run_that_was_at_its_end_says_so():
    rows = dict(measurement_rows(measurement(first_step=301, pace=Throughput(warmup_steps=5))))
    assert rows["steps"] == "none: 300 were done before"

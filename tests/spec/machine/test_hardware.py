"""Hardware is a value that a file keeps to the last digit; curves and collectives follow their formulas."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import SpecError
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import CollectiveRate, Hardware, RatePoint, interpolate_rate

CURVE = (RatePoint(1e3, 1e9), RatePoint(1e6, 4e9), RatePoint(1e9, 8e9))


@given(
    figure=st.floats(min_value=0, exclude_min=True, max_value=1e100),
    name=st.text(st.characters(exclude_categories=["Cs"])),
)
@settings(max_examples=50)
def test_numbers_and_texts_survive_a_file(figure: float, name: str, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("files") / "hardware.toml"
    hardware = hardware_on("H100").model_copy(update={"price_per_hour": figure, "name": name})
    hardware.save(path)
    assert Hardware.load(path) == hardware


def test_saved_file_has_units(tmp_path: Path):
    hardware_on("8xH100").save(tmp_path / "new" / "hardware.toml")
    text = (tmp_path / "new" / "hardware.toml").read_text()
    assert "memory_bytes_per_second = 3.35e12  # peak, bytes/s" in text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hardware.toml"]


@pytest.mark.parametrize(
    ("text", "said"), [("name = ", "is not TOML"), ("nodse = 2", "nodes"), ('name = "x"', "is missing")]
)
def test_a_wrong_file_is_an_error_that_names_it(text: str, said: str, tmp_path: Path):
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        Hardware.load(path)
    assert "hardware.toml" in str(caught.value)


def test_an_absent_file_is_an_error_that_names_calibrate(tmp_path: Path):
    with pytest.raises(SpecError, match="fullshard calibrate"):
        Hardware.load(tmp_path / "absent.toml")


def test_the_rate_is_exact_at_points_and_straight_in_logarithms_between():
    for point in CURVE:
        assert interpolate_rate(CURVE, point.size) == pytest.approx(point.rate)
    assert interpolate_rate(CURVE, math.sqrt(1e3 * 1e6)) == pytest.approx(math.sqrt(1e9 * 4e9))


def test_beyond_the_last_point_the_rate_stays_and_before_the_first_the_duration():
    assert interpolate_rate(CURVE, 1e12) == CURVE[-1].rate
    first = CURVE[0].size / CURVE[0].rate
    for size in (1.0, 10.0, 500.0):
        assert size / interpolate_rate(CURVE, size) == pytest.approx(first)


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_work_never_takes_less_time_on_a_curve_whose_rates_do_not_jump(one: float, other: float):
    less, more = sorted((one, other))
    assert less / interpolate_rate(CURVE, less) <= more / interpolate_rate(CURVE, more) * (1 + 1e-9)


def test_collective_takes_latency_and_received_bytes():
    rate = CollectiveRate(base_seconds=1e-5, hop_seconds=1e-6, bytes_per_second=1e9)
    assert rate.predict_seconds(8e6, 1) == 0
    assert rate.predict_seconds(8e6, 4) == pytest.approx(1e-5 + 3e-6 + 6e6 / 1e9)


def test_a_measured_curve_goes_before_the_line_and_more_ranks_add_their_hops():
    curve = (RatePoint(1e3, 1e3 / 2e-4), RatePoint(1e6, 1e6 / 1e-3))
    rate = CollectiveRate(
        base_seconds=1.0, hop_seconds=1e-5, bytes_per_second=1.0, curve=curve, curve_ranks=2
    )
    assert rate.predict_seconds(2e6, 2) == pytest.approx(1e-3)
    assert rate.predict_seconds(2.0, 2) == pytest.approx(2e-4)
    assert rate.predict_seconds(4e6 / 3, 4) == pytest.approx(1e-3 + 2e-5)


def test_rates_of_a_file_that_were_measured_are_calibrated():
    data = hardware_on("H100").model_dump()
    assert Hardware.parse(data, source="hardware.toml").calibration == "none"
    assert Hardware.parse(data | {"is_calibrated": True}, source="hardware.toml").calibration == "idle"

"""Bytes, counts and seconds, read and printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import SpecError
from fullshard.quantities import (
    count_text,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
)


@given(st.integers(0, 2**60))
def test_a_plain_number_is_bytes(count):
    assert parse_bytes(str(count), source="--size") == int(float(count))


@given(st.floats(1, 2**55))
def test_printed_bytes_are_right_to_three_digits(count):
    assert parse_bytes(format_bytes(count), source="--size") == pytest.approx(count, rel=0.005, abs=0.5)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 2 kib ", 2048),
        (".5MB", 500_000),
        ("4096", 4096),
        ("3tb", 3 * 10**12),
    ],
)
def test_units_are_read_in_any_case(text, count):
    assert parse_bytes(text, source="--size") == count


@pytest.mark.parametrize("text", ["", "GB", "1.5.2 GB", "-1 GB", "12 parsecs", "1 GB extra", "nan"])
def test_invalid_bytes_are_refused(text):
    with pytest.raises(SpecError, match="(?s)^--size .* one of B, KiB, MiB"):
        parse_bytes(text, source="--size")


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (count_text(1.0, "day"), "1 day"),
        (count_text(2.5, "day"), "2.5 days"),
        (count_text(1024, "rank"), "1,024 ranks"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(3 * 2**30), "3.00 GiB"),
        (format_bytes(-(2**20)), "-1.00 MiB"),
        (format_bytes(5 * 2**60), "5120.00 PiB"),
        (format_count(0), "0"),
        (format_count(999), "999"),
        (format_count(1000), "1.00k"),
        (format_count(12_345_678), "12.3M"),
        (format_count(999_999), "1.00M"),
        (format_count(-7_000), "-7.00k"),
        (format_count(8_030_000_000), "8.03B"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(1), "1.0 s"),
        (format_seconds(93), "1 min 33 s"),
        (format_seconds(7200), "2 h 00 min"),
        (format_seconds(59.97), "1 min 00 s"),
        (format_seconds(0.99997), "1.0 s"),
    ],
)
def test_quantities_are_printed_as_people_write_them(printed, text):
    assert printed == text


@given(st.floats(0, 1e6))
def test_no_printed_part_reaches_the_next_unit(seconds):
    text = format_seconds(seconds)
    numbers = [float(part) for part in text.split() if part[0].isdigit()]
    limit = 1000 if text.endswith("ms") else 60
    assert all(number < limit for number in numbers[-1:] + numbers[:-1] * (limit == 60 and " h " not in text))


@pytest.mark.parametrize(
    ("text", "count"),
    [("15T", 15 * 10**12), ("4M", 4_000_000), ("1.5B", 1_500_000_000), ("65_536", 65536), ("2,048", 2048)],
)
def test_counts_are_read_as_people_write_them(text, count):
    assert parse_count(text, source="--size") == count


@given(st.integers(0, 999), st.sampled_from(["", "k", "M", "G", "T"]))
def test_a_printed_count_can_be_read(count, unit):
    number = parse_count(f"{count}{unit}", source="--size")
    assert parse_count(format_count(number), source="--size") == number


def test_a_number_of_more_than_64_bits_is_refused():
    for parse in (parse_count, parse_bytes):
        for text in ("9" * 400, "9" * 19):
            with pytest.raises(SpecError, match="(?s)^--size .* too large"):
                parse(text, source="--size")


@pytest.mark.parametrize("text", ["", "many", "4MiB", "-3", "4 M M"])
def test_invalid_counts_are_refused(text):
    with pytest.raises(SpecError, match="^--size is not a count"):
        parse_count(text, source="--size")

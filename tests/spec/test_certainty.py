"""Certainty: the table holds what the page of published rows gives."""

import re
import tomllib
from pathlib import Path
from statistics import quantiles

import pytest

from fullshard.spec.certainty import read_certainty, speed_certainty
from fullshard.spec.hardware_text import hardware_on
from tests.fakes.hardware import cpu_of

BENCH = Path(__file__).parents[2] / "bench"
ROW = re.compile(r"\| test \| (.*?) \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+) %")


def deviations() -> list[tuple[int, str, float]]:
    """Parameters, chip and deviation of each row that sets no rate."""
    rows = {row["name"]: row for row in tomllib.loads((BENCH / "published.toml").read_text())["row"]}
    page = (BENCH / "results" / "2026-11-20-published.md").read_text()
    found: list[tuple[int, str, float]] = []
    for name, error in ROW.findall(page):
        sizes, chip = rows[name]["model"], rows[name]["chip"]
        width, ff = sizes["d_model"], sizes["d_ff"]
        narrow = sizes.get("kv_heads", sizes["heads"]) / sizes["heads"]
        block = width * width * (2 + 2 * narrow) + (3 if sizes["gated"] else 2) * width * ff
        tables = sizes["vocabulary"] * width * (1 if sizes["tied"] else 2)
        found.append((int(sizes["layers"] * block + tables), chip, float(error) / 100))
    return found


def test_the_table_is_of_the_published_rows():
    rows, table = deviations(), read_certainty()
    errors = [error for *_, error in rows]
    assert table.all.rows == len(rows)
    assert (table.all.low, table.all.high) == pytest.approx((min(errors), max(errors)))
    assert {chip.split()[0] for _, chip, _ in rows} == set(table.chips)
    for one in table.size:
        own = [error for numel, _, error in rows if one.parameters[0] <= numel < one.parameters[1]]
        cuts = quantiles(own, n=20, method="inclusive")
        assert one.rows == len(own)
        assert (one.low, one.high) == pytest.approx((cuts[0], cuts[-1]), abs=6e-4)


def test_small_models_and_chips_without_rows_are_less_certain():
    hopper, other = hardware_on("8xH100"), hardware_on("8xMI300X")
    known = speed_certainty(8_000_000_000, hopper)
    assert known is not None
    for found in (speed_certainty(100_000_000, hopper), speed_certainty(8_000_000_000, other)):
        assert found is not None
        assert found.high - found.low > known.high - known.low
    assert speed_certainty(8_000_000_000, cpu_of(2)) is None

"""SpeedDeviation: the table holds what the pages of published rows give."""

import re
import tomllib
from collections import Counter
from pathlib import Path
from statistics import quantiles

import pytest

from fullshard.spec.machine.catalog import hardware_on, read_machine_tables
from fullshard.spec.machine.certainty import speed_deviation
from tests.fakes.hardware import cpu_of

BENCH = Path(__file__).parents[3] / "bench"
SETS = range(7)  # that the table's bars are of
PAGES = [BENCH / "results" / f"2026-11-25-blind-{number}.md" for number in (4, 5, 6)]
MIXTURES = BENCH / "results" / "2026-11-25-mixtures.md"
ROW = re.compile(r"\| test \| (.*?) \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+) %")


def deviations() -> list[tuple[int, int, str, float]]:
    """Parameters, nodes, chip and deviation of each row that sets no rate."""
    found: list[tuple[int, int, str, float]] = []
    errors = {name: error for page in PAGES for name, error in ROW.findall(page.read_text())}
    table = tomllib.loads((BENCH / "published.toml").read_text())
    for row in (table["series"].get(row.get("series"), {}) | row for row in table["row"]):
        error = errors.get(row["name"])
        if error is None or "mixture" in row or row.get("set", 0) not in SETS:
            continue
        sizes = row["model"]
        width, ff = sizes["d_model"], sizes["d_ff"]
        narrow = sizes.get("kv_heads", sizes["heads"]) / sizes["heads"]
        block = width * width * (2 + 2 * narrow) + (3 if sizes["gated"] else 2) * width * ff
        tables = sizes["vocabulary"] * width * (1 if sizes["tied"] else 2)
        numel = int(sizes["layers"] * block + tables)
        found.append((numel, row["nodes"], row["chip"], float(error) / 100))
    return found


def test_the_table_is_of_the_published_rows():
    rows, table = deviations(), read_machine_tables("certainty")
    errors = [error for *_, error in rows]
    assert table["all"]["rows"] == len(rows)
    assert (table["all"]["low"], table["all"]["high"]) == pytest.approx((min(errors), max(errors)))
    chips = Counter(chip.split()[0] for *_, chip, _ in rows)
    assert {chip for chip, count in chips.items() if count >= 5} == set(table["chips"])
    for spread, one_node in ((table["one_node"], True), (table["several_nodes"], False)):
        own = [e for numel, nodes, _, e in rows if numel >= table["parameters"] and (nodes == 1) == one_node]
        cuts = quantiles(own, n=20, method="inclusive")
        assert spread["rows"] == len(own)
        assert (spread["low"], spread["high"]) == pytest.approx((cuts[0], cuts[-1]), abs=6e-4)


def test_a_network_makes_a_speed_less_certain():
    one, several = (speed_deviation(8_000_000_000, hardware_on(text)) for text in ("8xH100", "8x8xH100"))
    assert one is not None
    assert several is not None
    assert several.high > one.high


def test_small_models_and_chips_without_rows_are_less_certain():
    hopper, other = hardware_on("8xH100"), hardware_on("8xMI300X")
    known = speed_deviation(8_000_000_000, hopper)
    assert known is not None
    for found in (
        speed_deviation(100_000_000, hopper),
        speed_deviation(8_000_000_000, other),
        speed_deviation(8_000_000_000, hopper, offloads=True),
    ):
        assert found is not None
        assert found.high - found.low > known.high - known.low
    assert speed_deviation(8_000_000_000, cpu_of(2)) is None


def test_a_mixture_is_less_certain_than_any_other_model():
    for text in ("8xH100", "8x8xH100", "8xMI300X"):
        hardware = hardware_on(text)
        mixture, dense = (speed_deviation(8_000_000_000, hardware, mixture=known) for known in (True, False))
        assert mixture is not None
        assert dense is not None
        assert mixture.low <= dense.low
        assert mixture.high >= dense.high
        assert "mixtures" in mixture.grounds


def test_the_spread_of_mixtures_is_of_all_their_published_rows():
    """The blind rows are among them, none of which was within the bars of other models."""
    page, blind = MIXTURES.read_text(), PAGES[1].read_text().partition("## Mixtures of experts")[2]
    late = re.search(r"\| Megatron Core Qwen3 235B-A22B, .*\| (-[\d.]+) % \|", page)
    assert late is not None
    errors = [float(error) / 100 for text in (page, blind) for _, error in ROW.findall(text)]
    errors.append(float(late[1]) / 100)
    spread = read_machine_tables("certainty")["mixtures"]
    assert spread["rows"] == len(errors) == 7
    assert (spread["low"], spread["high"]) == pytest.approx((min(errors), max(errors)))
    found = speed_deviation(30_000_000_000, hardware_on("2x8xH100"), mixture=True)
    assert found is not None
    assert found[:2] == (spread["low"], spread["high"])

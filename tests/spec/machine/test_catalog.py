"""The catalog is asked by the names that drivers report, and never guesses; every figure has its source."""

import itertools

import pytest

from fullshard.spec.machine.catalog import (
    CatalogChip,
    find_chip_by_device_name,
    link_from_catalog,
    normalized_chip_name,
    read_catalog_chips,
    read_machine_tables,
)

CHIPS = read_catalog_chips()


@pytest.mark.parametrize(
    ("device_name", "chip", "bf16_flops_per_second"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", 312e12),
        ("A100-SXM4-80GB", "A100 SXM 80 GB", 312e12),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB", 312e12),
        ("NVIDIA H200", "H200 SXM", 989.4e12),
        ("NVIDIA B200", "B200", 2.25e15),
        ("NVIDIA GB200", "GB200", 2.5e15),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", 71e12),
        ("AMD Instinct MI250X", "Instinct MI250X, one of its two dies", 191.5e12),
        ("AMD Instinct MI300X", "Instinct MI300X", 1307.4e12),
        ("GAUDI2", "Gaudi 2", 432e12),
    ],
)
def test_a_chip_is_found_by_its_device_name(device_name: str, chip: str, bf16_flops_per_second: float):
    found = find_chip_by_device_name(device_name)
    assert found is not None
    assert found.name == chip
    assert found.flops_per_second["bf16"] == bf16_flops_per_second


@pytest.mark.parametrize(
    "device_name",
    [
        *("NVIDIA H100", "NVIDIA H20", "NVIDIA H800", "NVIDIA A10G", "NVIDIA L40"),
        *("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
        *("AMD Instinct MI250X / MI250", "AMD Radeon Graphics", "cpu", ""),
    ],
)
def test_a_name_that_is_not_in_the_catalog_is_no_chip(device_name: str):
    assert find_chip_by_device_name(device_name) is None


def test_partition_of_a_chip_is_known_by_its_memory():
    whole, eighth = 206_141_652_992, 25_757_220_864
    assert find_chip_by_device_name("AMD Instinct MI300X", memory_bytes=whole) is not None
    assert find_chip_by_device_name("AMD Instinct MI300X", memory_bytes=eighth) is None


def test_no_name_means_two_chips():
    names = [name for entry in CHIPS for name in entry.device_names]
    assert len(names) == len(set(names))
    keys = [
        key
        for entry in CHIPS
        for key in {normalized_chip_name(n) for n in (*entry.aliases, *entry.device_names)}
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("entry", CHIPS, ids=lambda entry: entry.name)
def test_figures_are_of_one_chip_and_dense(entry: CatalogChip):
    chip = entry.chip
    assert 24 <= chip.memory_bytes / 2**30 <= 256
    assert 0.3e12 <= chip.memory_bytes_per_second <= 8e12
    rates = [
        chip.flops_per_second[dtype] for dtype in ("tf32", "bf16", "fp8") if dtype in chip.flops_per_second
    ]
    assert chip.flops_per_second["bf16"] == chip.flops_per_second.get("fp16", chip.flops_per_second["bf16"])
    if chip.name != "Gaudi 3":  # whose fp8 is no faster than its bf16
        # Half the bits, twice the rate: one figure with sparsity among dense ones would be twice too high.
        assert all(narrow / wide == pytest.approx(2, rel=0.03) for wide, narrow in itertools.pairwise(rates))


@pytest.mark.parametrize("entry", CHIPS, ids=lambda entry: entry.name)
def test_every_figure_has_a_source_and_none_is_over_its_peak(entry: CatalogChip):
    assert entry.source
    if entry.matmul_flops_per_second is not None:
        assert entry.matmul_source
        assert entry.matmul_flops_per_second < entry.flops_per_second["bf16"]
        assert ("fitted" in entry.matmul_source) == bool(entry.matmul_runs_of)
    for forward, backward in entry.attention.values():
        assert entry.attention_source
        assert backward < forward < 1
    for name in filter(None, (entry.within, entry.across, entry.pair)):
        assert read_machine_tables("links")[name]["source"]


@pytest.mark.parametrize("name", read_machine_tables("links"))
def test_no_collective_is_faster_than_its_link_and_an_all_reduce_takes_two(name: str):
    link = link_from_catalog(name)
    assert link.all_gather.bytes_per_second <= link.bytes_per_second
    both = link.all_gather.predict_seconds(1e9, 8) + link.reduce_scatter.predict_seconds(1e9, 8)
    assert link.all_reduce.predict_seconds(1e9, 8) == pytest.approx(both, rel=1e-2)


def test_larger_launches_reach_more_of_the_peak():
    table = read_machine_tables("rates")
    for shape in (table["matmul"]["curve"], table["memory"]["curve"]):
        assert all(a[0] < b[0] and a[1] <= b[1] <= 1 for a, b in itertools.pairwise(shape))

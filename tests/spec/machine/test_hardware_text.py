"""A few characters name hardware; what they do not say comes from the catalog."""

from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import interpolate_rate


@pytest.mark.parametrize(
    ("text", "chip", "nodes", "ranks_per_node"),
    [
        ("4xH100", "H100 SXM", 1, 4),
        ("H200", "H200 SXM", 1, 1),
        ("32x8xH100", "H100 SXM", 32, 8),
        ("256 x h100", "H100 SXM", 32, 8),
        ("2x8xA100-80GB", "A100 SXM 80 GB", 2, 8),
        ("8xa100", "A100 SXM 80 GB", 1, 8),
        ("a100-40gb", "A100 SXM 40 GB", 1, 1),
        ("H100-PCIe", "H100 PCIe", 1, 1),
        ("NVIDIA H100 NVL", "H100 NVL", 1, 1),
        ("8xMI300X", "Instinct MI300X", 1, 8),
        ("8xMI250X", "Instinct MI250X, one of its two dies", 1, 8),
        ("4xRTX4090", "GeForce RTX 4090", 1, 4),
        ("2x4090", "GeForce RTX 4090", 1, 2),
        ("8xGaudi3", "Gaudi 3", 1, 8),
        ("144xGB200", "GB200", 2, 72),
        ("2x6xL40S", "L40S", 2, 6),
    ],
)
def test_a_text_names_a_chip_and_its_layout(text: str, chip: str, nodes: int, ranks_per_node: int):
    hardware = hardware_on(text)
    layout = (hardware.chip.name, hardware.nodes, hardware.ranks_per_node)
    assert layout == (chip, nodes, ranks_per_node)
    assert hardware.across is not None
    assert hardware.device_bytes_limit < hardware.chip.memory_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH1000", "H100"),
        ("8xA10G", "A10"),
        ("12xH100", "8 or 16"),
        ("0xH100", "0 of anything"),
        ("", "no hardware"),
        ("8x", "not a chip"),
        ("absent.toml", "absent.toml cannot be read"),
    ],
)
def test_a_text_that_names_none_is_an_error_with_the_nearest(text: str, said: str):
    with pytest.raises(SpecError, match=said):
        hardware_on(text)


@pytest.mark.parametrize("text", ["99999x99999xH100", "8" * 15 + "xH100", "9" * 5000 + "xH100"])
def test_too_many_ranks_are_refused(text: str):
    with pytest.raises(SpecError, match=r"too many ranks|is not a chip"):
        hardware_on(text)


def test_two_cards_with_a_bridge_are_joined_by_it_and_more_are_not():
    assert hardware_on("2xH100-NVL").within.name == "nvlink4-bridge"
    assert hardware_on("4xH100-NVL").within.name == "pcie5"


def test_no_rate_is_over_the_chips_peak():
    rates, chip = hardware_on("H100").rates, hardware_on("H100").chip
    assert max(point.rate for point in rates.memory) < chip.memory_bytes_per_second
    for curves in (rates.matmul, rates.attention, rates.attention_backward):
        assert curves.keys() == chip.flops_per_second.keys()
        assert all(
            point.rate < chip.flops_per_second[dtype] for dtype, curve in curves.items() for point in curve
        )


@pytest.mark.parametrize("chip", ["A100", "H100", "B200"])
def test_attention_is_slower_with_heads_of_64_than_with_heads_of_128(chip: str):
    rates = hardware_on(chip).rates
    for widths in (rates.attention_by_head_dim, rates.attention_backward_by_head_dim):
        assert 0.7 < interpolate_rate(widths, 64) < interpolate_rate(widths, 128) == 1.0


def test_a_count_goes_before_a_file_too(tmp_path: Path):
    path = tmp_path / "mine.toml"
    hardware_on("2x4xH200").save(path)
    assert hardware_on(str(path)) == hardware_on("2x4xH200")
    assert hardware_on(f"3x8x{path}") == hardware_on("3x8xH200")


def test_file_may_omit_figures_of_the_catalog(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('chip = "H100"\nnodes = 2\nranks_per_node = 8\nacross = "nic-200"\n')
    hardware = hardware_on(str(path))
    assert (hardware.chip, hardware.world_size) == (hardware_on("H100").chip, 16)
    assert hardware.across is not None
    assert hardware.across.name == "nic-200"


def test_custom_chip_gets_rates_and_links(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "lab"\nranks_per_node = 4\nwithin = "pcie5"\n[chip]\nname = "X1"\n'
        "memory_bytes = 68_719_476_736\nmemory_bytes_per_second = 1e12\nflops_per_second = { bf16 = 2e14 }\n"
    )
    hardware = hardware_on(f"2x4x{path}")
    assert (hardware.name, hardware.chip.name, hardware.world_size) == ("lab", "X1", 8)
    assert hardware.within.name == "pcie5"
    assert hardware.rates.matmul["bf16"][-1].rate < 2e14


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 2", "chip is missing"),
        ('chip = "H1OO"', "H100"),
        ('chip = "H100"\nwithin = "nvlink9"', "nvlink4"),
        ('[chip]\nname = "X1"', "is missing"),
        ('chip = "H100"\nnodse = 2', "nodes"),
    ],
)
def test_a_file_that_says_too_little_or_wrong_is_an_error(text: str, said: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        hardware_on(str(path))


def test_chips_with_the_same_die_and_power_have_the_same_rates():
    h100, h200 = hardware_on("H100"), hardware_on("H200")
    assert h100.chip.flops_per_second == h200.chip.flops_per_second
    assert h100.rates.matmul == h200.rates.matmul
    assert "runs of mid-2024 to 2026" in h100.source


def test_a_chip_that_works_alone_has_faster_matmuls_than_one_of_several():
    one, two = hardware_on("H200"), hardware_on("2xH200")
    assert one.rates == two.rates == two.rates_at_world_size
    ratio = one.rates_at_world_size.matmul["bf16"][-1].rate / two.rates_at_world_size.matmul["bf16"][-1].rate
    assert ratio == pytest.approx(one.rates.single_rank_matmul)
    assert one.rates_at_world_size.memory == two.rates_at_world_size.memory

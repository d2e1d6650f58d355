"""The hardware of a run is that of this machine, or the saved file if it is of the same chip."""

from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.launch.detect import (
    DetectedGpus,
    catalog_hardware_of_machine,
    cpu_name_with_core_count,
    detect_hardware,
    user_hardware_path,
)
from fullshard.spec.machine.catalog import (
    default_gpu_rates,
    find_catalog_entry_of_chip,
    find_chip_by_device_name,
    hardware_on,
)


def environment(path: Path, **more: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(path), **more}


def test_ranks_on_the_cpu_share_its_cores_and_memory(tmp_path: Path):
    one, four = (detect_hardware("cpu", ranks=n, environment=environment(tmp_path)) for n in (1, 4))
    assert (one.device, one.chip.name, four.ranks_per_node) == ("cpu", cpu_name_with_core_count(), 4)
    assert four.chip.memory_bytes == one.chip.memory_bytes // 4
    assert four.rates.memory[-1].rate == pytest.approx(one.rates.memory[-1].rate / 4)
    assert four.overlap == 0
    assert "not calibrated" in four.source


def test_the_ranks_of_torchrun_are_the_default(tmp_path: Path):
    left = environment(tmp_path, WORLD_SIZE="8", LOCAL_WORLD_SIZE="2")
    hardware = detect_hardware("cpu", environment=left | {"RANK": "3"})
    assert (hardware.nodes, hardware.ranks_per_node) == (4, 2)
    assert detect_hardware("cpu", environment=left).ranks_per_node == 1  # another job left the variables


def test_a_saved_file_of_this_machine_is_used_for_as_many_ranks(tmp_path: Path):
    under = environment(tmp_path)
    saved = detect_hardware("cpu", ranks=2, environment=under).model_copy(update={"source": "calibrated"})
    saved.save(user_hardware_path(under))
    assert detect_hardware("cpu", ranks=2, environment=under) == saved
    assert detect_hardware("cpu", environment=under) == saved
    other = detect_hardware("cpu", ranks=4, environment=under)
    assert other.ranks_per_node == 4
    assert "is of 2 ranks" in other.source


def test_a_saved_file_of_another_chip_is_left_alone(tmp_path: Path):
    path = tmp_path / "other.toml"
    hardware_on("8xH100").save(path)
    found = detect_hardware("cpu", ranks=1, environment={"FULLSHARD_HARDWARE": str(path)})
    assert found.chip.name == cpu_name_with_core_count()
    assert "H100" in found.source


def test_a_file_that_is_named_but_absent_is_an_error(tmp_path: Path):
    with pytest.raises(SpecError, match="absent.toml"):
        detect_hardware("cpu", environment={"FULLSHARD_HARDWARE": str(tmp_path / "absent.toml")})


def test_a_gpu_is_known_by_the_name_and_memory_of_the_driver():
    gpus = DetectedGpus(8, "NVIDIA H100 80GB HBM3", 84_942_979_072, 9, 91900)
    found = catalog_hardware_of_machine(gpus, ranks=8, ranks_per_node=8)
    assert found.host_memory_bytes, "a rank has its share of this machine's"
    assert found.model_copy(update={"host_memory_bytes": None}) == hardware_on("8xH100")


def test_a_gpu_that_nobody_knows_is_described_for_calibration():
    found = catalog_hardware_of_machine(
        DetectedGpus(1, "NVIDIA X1", 2**36, 12, 91900), ranks=1, ranks_per_node=1
    )
    assert (found.device, found.chip.name, found.chip.memory_bytes) == ("cuda", "NVIDIA X1", 2**36)
    assert find_catalog_entry_of_chip(found.chip) is None


@pytest.mark.parametrize(
    ("name", "major", "cudnn", "deprioritized", "kernel"),
    [
        ("NVIDIA H100 80GB HBM3", 9, 91900, "0", "cudnn_256"),
        ("NVIDIA B200", 10, 92600, "0", "cudnn"),
        ("NVIDIA H100 80GB HBM3", 9, 91002, "0", "flash"),
        ("NVIDIA H100 80GB HBM3", 9, 91900, "1", "flash"),
        ("NVIDIA A100-SXM4-80GB", 8, 91900, "0", "flash"),
        ("AMD Instinct MI300X", 9, None, "0", "flash"),
    ],
)
def test_attention_has_the_rates_of_the_kernel_that_torch_chooses_here(
    name, major, cudnn, deprioritized, kernel
):
    gpus = DetectedGpus(1, name, find_chip_by_device_name(name).memory_bytes, major, cudnn)
    under = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": deprioritized}
    found = catalog_hardware_of_machine(gpus, ranks=1, ranks_per_node=1, environment=under)
    entry = find_catalog_entry_of_chip(found.chip)
    assert found.attention_kernel == kernel
    assert found.rates == default_gpu_rates(entry, kernel)


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "~")  # which cannot be expanded
    assert not user_hardware_path({}).exists()

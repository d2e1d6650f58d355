"""A short calibration on gloo ranks: complete, the same on every rank, and what a file keeps."""

import itertools
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.cli.calibrate import calibration_rows
from fullshard.jobs.calibrate.device import (
    RateMeter,
    attend_by_preferred_kernel,
    measure_flash_factors,
    open_two_random_files,
    read_plus_write_bandwidth,
)
from fullshard.jobs.calibrate.job import measure_hardware
from fullshard.parallel.mesh import process_group
from fullshard.spec.machine.catalog import default_gpu_rates, read_catalog_chips
from fullshard.spec.machine.hardware import Hardware, RatePoint


def calibrate(seconds: float) -> Hardware:
    assert dist.is_initialized()
    with process_group("cpu") as ranks:
        return measure_hardware(ranks, seconds=seconds, drive=Path())


@pytest.fixture(scope="module")
def found(ranks) -> list[Hardware]:
    return ranks(2).run(calibrate, 0.2)


def test_every_rank_finds_the_same_rates(found: list[Hardware]):
    one, other = found
    assert one.rates.matmul == other.rates.matmul
    assert one.within == other.within


def test_all_rates_are_positive_and_curves_rise_in_size(found: list[Hardware]):
    rates = found[0].rates
    curves = [*rates.matmul.values(), *rates.attention.values(), *rates.attention_backward.values()]
    for curve in (*curves, rates.memory, rates.optimizer):
        assert all(point.rate > 0 for point in curve)
        assert all(a.size < b.size for a, b in itertools.pairwise(curve))
    assert rates.launch_seconds >= 0  # a difference of two times, which a busy machine may hide


def test_each_collective_has_a_curve(found: list[Hardware]):
    rates = found[0].within.known_rates
    assert set(rates) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    for rate in rates.values():
        assert rate.curve_ranks == 2
        assert 0 < rate.predict_seconds(2**20, 2) < rate.predict_seconds(2**20, 3)


def test_the_chip_has_a_peak_for_each_dtype_of_its_matmuls(found: list[Hardware]):
    hardware = found[0]
    assert hardware.chip.flops_per_second.keys() == hardware.rates.matmul.keys()
    assert min(hardware.chip.flops_per_second.values()) > 0
    assert (hardware.device, hardware.ranks_per_node, hardware.overlap) == ("cpu", 2, 0.0)


def test_the_file_reads_back_equal_and_the_table_names_the_main_rates(found: list[Hardware], tmp_path: Path):
    found[0].save(tmp_path / "hardware.toml")
    assert Hardware.load(tmp_path / "hardware.toml") == found[0]
    table = dict(calibration_rows(found[0]))
    for label in ("matmul fp32", "memory", "reduce-scatter within"):
        assert label in table


def wait_for_a_busy_thread() -> None:
    def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.01:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_rank_that_waits_has_no_core_whatever_its_other_threads_compute():
    meter = RateMeter(torch.device("cpu"))
    meter.measure_calls_per_second(wait_for_a_busy_thread, seconds=0.1)
    assert meter.core_share < 0.5


def rate_of(directory: Path) -> float | None:
    return read_plus_write_bandwidth(directory, pieces=1)


def test_all_ranks_find_the_same_and_leave_nothing(ranks, tmp_path: Path):
    one, other = ranks(2).run(rate_of, tmp_path)
    assert one == other
    assert one > 0
    assert not list(tmp_path.iterdir())


def rate_where_one_has_none(directory: Path) -> float | None:
    return rate_of(directory if dist.get_rank() == 0 else directory / "missing")


def test_drive_rate_is_none_if_a_rank_cannot_write(ranks, tmp_path: Path):
    assert ranks(2).run(rate_where_one_has_none, tmp_path) == [None, None]
    assert not list(tmp_path.iterdir())


def test_files_of_measurements_are_unlinked_while_open(tmp_path: Path):
    with ExitStack() as open_files:
        open_two_random_files(tmp_path, open_files, pieces=1)
        assert not list(tmp_path.iterdir())


def test_attention_within_documents_is_measured_against_the_preferred_kernel():
    meter = RateMeter(torch.device("cpu"))
    known = default_gpu_rates(read_catalog_chips()[0], "cudnn_256")
    assert known.flash_by_head_dim is not None
    preferred = ((RatePoint(1e6, 1e9),), (RatePoint(1e6, 1e9),))
    measure = partial(measure_flash_factors, meter, preferred=preferred, seconds=0.02)
    found = measure(known, attend=attend_by_preferred_kernel)
    curve = found["flash_by_head_dim"]
    factors = {new.rate / old.rate for new, old in zip(curve, known.flash_by_head_dim, strict=True)}
    assert max(factors) == pytest.approx(min(factors)), "only one width is measured"
    none = known.model_copy(update={"flash_by_head_dim": None, "flash_backward_by_head_dim": None})
    assert measure(none) == {}

"""The meter counts every byte of live tensors once, and says whose they were at the peak."""

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.observe.memory import (
    allocator_figures,
    measure_peak_memory,
    read_memory_and_reset_peaks,
    storage_bytes_of_tensors,
)
from fullshard.spec.records.run_files import METRICS
from tests.jobs.test_train import leaves_a_measurement

CPU = torch.device("cpu")
KIB = 1024


def kibibytes(count: int) -> Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def peak_of_known_tensors() -> int:
    with measure_peak_memory(CPU) as peak:
        first = kibibytes(3)
        second = kibibytes(5)
        del first
        third = kibibytes(2)
        del second, third
    return peak.bytes


def test_peak_is_the_largest_sum_of_live_tensors_and_measuring_leaves_nothing(capfd):
    with pytest.raises(ZeroDivisionError), measure_peak_memory(CPU):
        1 / 0  # noqa: B018
    assert [peak_of_known_tensors() for _ in range(2)] == [8 * KIB] * 2
    assert not torch.autograd._profiler_enabled()
    assert capfd.readouterr() == ("", "")


def test_the_peak_of_a_resize_counts_the_old_and_the_new_memory():
    with measure_peak_memory(CPU) as peak:
        tensor = kibibytes(1)
        tensor.untyped_storage().resize_(4 * KIB)  # the old KiB stands beside the new four while it is copied
        tensor.untyped_storage().resize_(0)
    assert peak.bytes == 5 * KIB


def test_temporaries_inside_an_operation_count():
    x = torch.ones(KIB, dtype=torch.bfloat16)
    with measure_peak_memory(CPU) as peak:
        total = x + torch.ones(KIB)  # the sum in fp32, the ones, and x cast to fp32 within
    assert peak.bytes >= 3 * 4 * KIB
    assert total.dtype == torch.float32


def test_each_storage_counts_once_whatever_its_views():
    tensor = torch.empty(4, KIB, dtype=torch.uint8)
    assert storage_bytes_of_tensors([tensor, tensor[1:], tensor.view(-1)]) == 4 * KIB
    assert storage_bytes_of_tensors([tensor, torch.empty(4 * KIB, device="meta")]) == 4 * KIB


def own_part_of_a_distributed_tensor() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return storage_bytes_of_tensors(
        [distribute_tensor(torch.zeros(8 * KIB, dtype=torch.uint8), mesh, [Shard(0)])]
    )


def test_local_part_of_a_dtensor_counts(ranks):
    assert ranks(2).run(own_part_of_a_distributed_tensor) == [4 * KIB, 4 * KIB]


def test_an_address_that_another_thread_released_is_not_counted_twice():
    with measure_peak_memory(CPU) as peak:
        larger = kibibytes(96)
        del larger
        holder = [kibibytes(64)]
        thread = threading.Thread(target=holder.clear)  # a thread that the profiler does not see
        thread.start()
        thread.join()
        again = kibibytes(64)
        del again
    # Whether the address is handed out again, which shows the release, is the allocator's choice.
    assert peak.bytes in (96 * KIB, (64 + 64) * KIB)


def one_step_of_a_small_model():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False))
    model.register_buffer("table", torch.zeros(10, 7))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(16, 64)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure_peak_memory(CPU, model=model, optimizer=optimizer) as peak:
        step()
    return model, peak


def test_parts_sum_to_the_peak():
    model, peak = one_step_of_a_small_model()
    parts, weights = peak.parts, sum(p.numel() for p in model.parameters()) * 4
    assert parts is not None
    assert parts.parameter_shards == weights
    assert parts.optimizer_state == 2 * weights + 4 * len(list(model.parameters()))
    assert parts.buffers == 10 * 7 * 4
    # The peak is at the end of backward, when all gradients are there; the step has cleared them since.
    assert parts.gradients == weights
    total = parts.parameter_shards + parts.optimizer_state + parts.buffers + parts.gradients + parts.rest
    assert total + parts.units_in_flight == peak.bytes
    assert parts.units_in_flight == 0


def test_each_step_has_the_memory_of_rank_0_and_a_window_the_most_of_all_ranks(ranks, tmp_path: Path):
    ranks(2).run(leaves_a_measurement, str(tmp_path / "run"), 6, "log.every=4")
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert all(line["resident_bytes"] > 0 for line in lines)
    assert sum(line.get("resident_bytes_most", 0) > 0 for line in lines) == 1, "after the fourth step"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_the_live_bytes_and_the_peak_of_each_step():
    device = torch.device("cuda", 0)
    before = read_memory_and_reset_peaks(device)["allocated_bytes"]
    kept = torch.ones(1 << 23, device="cuda")
    torch.ones(1 << 24, device="cuda")  # freed at once
    during, after = read_memory_and_reset_peaks(device), read_memory_and_reset_peaks(device)
    assert during["allocated_bytes"] - before == kept.nbytes
    assert during["peak_allocated_bytes"] - before == 3 * kept.nbytes
    assert after["peak_allocated_bytes"] == after["allocated_bytes"] == during["allocated_bytes"]


def test_figures_of_the_allocator_are_read_from_its_statistics():
    stats = {
        "allocated_bytes": {"all": {"current": 60, "peak": 90}},
        "reserved_bytes": {"all": {"current": 100, "peak": 110}},
        "inactive_split_bytes": {"all": {"current": 25}},
        "num_alloc_retries": 2,
    }
    assert allocator_figures(stats) == {
        "allocated_bytes": 60,
        "reserved_bytes": 100,
        "peak_allocated_bytes": 90,
        "peak_reserved_bytes": 110,
        "allocator_retries": 2,
        "fragmentation": 0.25,
    }
    assert allocator_figures({})["fragmentation"] == 0.0, "before the first allocation"

"""Times by kind of kernel, rates and idle time: of a made-up profile of a GPU and a real one of the CPU."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from fullshard.errors import SpecError
from fullshard.report.kernels import KernelSummary, kernel_sentences, summarise_kernels
from fullshard.report.profiled_step import parse_kernel_trace, parse_profile_json, read_kernel_trace
from tests.report.profiles import BACKWARD_THREAD, MadeProfile


def summary(made: MadeProfile) -> KernelSummary:
    return summarise_kernels(made.trace(), name="step")


def gpu_step() -> MadeProfile:
    trace = MadeProfile()
    trace.host("FSDP::all_gather_copy_out", 0, 10)
    trace.kernel("void split_with_sizes_copy_kernel", 5, 10, launched=2)
    trace.host("aten::mm", 10, 10)
    trace.kernel("nvjet_hsh_128x128_NNT", 15, 100, launched=12)
    trace.kernel("splitKreduce_kernel", 115, 20, launched=14)
    trace.host("aten::scaled_dot_product_attention", 20, 10)
    trace.host("aten::_scaled_dot_product_flash_attention", 21, 8)
    trace.kernel("pytorch_flash::flash_fwd_kernel", 135, 50, launched=23)
    trace.host("aten::native_layer_norm", 30, 5)
    trace.kernel("vectorized_layer_norm_kernel", 185, 15, launched=32)
    # Idle from 200 to 300: launched at 260, so the host was late for 60 µs, and the kernel waited for 39.
    trace.host("aten::add", 255, 6)
    trace.kernel("vectorized_elementwise_kernel", 300, 10, launched=260)
    trace.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 305, 45, launched=262)
    trace.host("fullshard::update", 265, 20)
    trace.kernel("multi_tensor_apply_kernel", 350, 30, launched=270)
    trace.kernel("Memcpy DtoH", 380, 5, launched=290)
    return trace


def test_kernels_of_a_gpu_are_counted_by_kind():
    made = summary(gpu_step())
    seconds = {str(one.kind): round(one.seconds * 1e6) for one in made.kinds}
    assert seconds == {
        "matmul": 120,
        "attention": 50,
        "collectives": 45,
        "optimizer": 30,
        "norm": 15,
        "copies": 15,
        "pointwise": 10,
    }
    assert made.on_device
    assert made.attention == ("flash",)


def test_overlapping_work_of_one_kind_counts_once():
    trace = MadeProfile()
    trace.host("fullshard::all_gather", 0, 100)
    trace.host("c10d::recv_", 1, 5)
    trace.host("gloo:recv", 2, 96)  # ends after the call that began it
    trace.host("gloo:send", 8, 94)
    trace.host("aten::mm", 101, 9)
    made = summary(trace)
    seconds = {str(one.kind): round(one.seconds * 1e6) for one in made.kinds}
    assert seconds == {"collectives": 101, "matmul": 9}
    assert sum(one.count for one in made.kinds) == 5
    trace.kernel("ncclDevKernel_AllGather", 200, 50, launched=1)
    trace.kernel("ncclDevKernel_ReduceScatter", 220, 50, launched=2)
    trace.kernel("nvjet_hsh_128x128_NNT", 210, 30, launched=102)
    seconds = {str(one.kind): round(one.seconds * 1e6) for one in summary(trace).kinds}
    assert seconds == {"collectives": 70, "matmul": 30}


def test_idle_time_is_split_into_a_late_host_and_waiting():
    made = summary(gpu_step())
    assert made.host_late_seconds * 1e6 == pytest.approx(61)  # the launch ends at 261
    assert made.waiting_seconds * 1e6 == pytest.approx(39)


def test_attention_as_matmuls_is_warned_of():
    trace = gpu_step()
    assert not any(one.startswith("Warning: ") for one in kernel_sentences(summary(trace), attempts=1))
    trace.host("aten::_scaled_dot_product_attention_math", 400, 20)
    trace.host("aten::_scaled_dot_product_efficient_attention", 430, 9)
    assert summary(trace).attention == ("efficient", "flash", "math")
    assert any(one.startswith("Warning: ") for one in kernel_sentences(summary(trace), attempts=1))


def test_backward_on_another_thread_is_recognised():
    trace = MadeProfile()
    trace.host("aten::mm", 0, 5)
    trace.host("ScaledDotProductFlashAttentionBackward0", 10, 20, thread=BACKWARD_THREAD)
    name = "aten::_scaled_dot_product_flash_attention_backward"
    trace.host(name, 11, 8, thread=BACKWARD_THREAD)
    trace.kernel("flash_bwd_kernel", 20, 40, launched=13, thread=BACKWARD_THREAD)
    [one] = summary(trace).kinds
    assert str(one.kind) == "attention"


def profiled(directory: Path) -> Path:
    weight, x = torch.ones(64, 64, requires_grad=True), torch.ones(2, 4, 32, 64)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, acc_events=True
    ) as made:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = scaled_dot_product_attention(x, x, x, is_causal=True)
        out = layer_norm(attended.reshape(-1, 64) @ weight, (64,))
        out.sum().backward()
    path = directory / "step-00000001-rank-00000.json.gz"
    made.export_chrome_trace(str(path))
    return path


def test_a_profile_of_the_cpu_has_its_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    made = summarise_kernels(read_kernel_trace(profiled(tmp_path)), name="step")
    kinds = {str(one.kind): one for one in made.kinds}
    assert not made.on_device
    assert kinds["matmul"].count == 2, "forward, and the gradient of the weight"
    assert kinds["norm"].seconds > 0
    assert made.attention == ("flash",)
    assert sum(one.seconds for one in made.kinds) <= made.seconds


CUT_OFF = gzip.compress(b"{}", mtime=0)[:-4]
DAMAGED = gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": 3}', CUT_OFF, DAMAGED])
def test_other_files_are_no_profiles(tmp_path: Path, content: bytes):
    for name in ("step.json", "step.json.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError):
            read_kernel_trace(tmp_path / name)


def test_a_profile_of_more_values_than_memory_has_room_for_is_refused():
    with pytest.raises(SpecError, match="about 16,000,0.. values, at most 16,000,000"):
        parse_profile_json(b'{"traceEvents": [' + b"{}," * 8_000_000 + b"{}]}", name="it")


def test_events_with_odd_fields_are_left_out():
    odd = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "cpu_op", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1e308, "dur": 1e308},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": float("nan"), "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "k", "ts": 1, "dur": 0, "args": {"correlation": [1]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::t", "ts": 3, "dur": 0, "tid": []},
    ]
    odd += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {"Input Dims": [3, "x"]}}
    ]
    trace = parse_kernel_trace(json.loads(json.dumps(odd)))
    assert [str(one.kind) for one in summarise_kernels(trace, name="step").kinds] == ["matmul", "host"]

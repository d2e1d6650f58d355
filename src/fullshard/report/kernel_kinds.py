"""Finds the kind of a kernel or an operation, and its FLOP by the shapes of its tensors."""

import math
import re
from enum import StrEnum
from typing import Any, NamedTuple

from fullshard.report.kernel_trace import DeviceWork, HostOperation
from fullshard.spec.hardware import ComputeDtype
from fullshard.spec.step_spans import COLLECTIVES, RANGE_PREFIX


class KernelKind(StrEnum):
    """A kind of work in a step. `host` is work of the host alone, such as views and allocation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    POINTWISE = "pointwise"
    COPIES = "copies"
    COLLECTIVES = "collectives"
    OPTIMIZER = "optimizer"
    HOST = "host"


class CountedFlops(NamedTuple):
    """FLOP of one operation, and the curve of rates (`Rates`) for their comparison."""

    flops: float
    rates: str  # matmul, attention or attention_backward
    dtype: ComputeDtype | None


class AttentionKernelUse(NamedTuple):
    """The kernel with which attention ran, and the dtype of its inputs; None if it is not known."""

    kernel: str
    dtype: ComputeDtype | None


_COLLECTIVE_RANGES = (*(RANGE_PREFIX + kind for kind in COLLECTIVES), "gloo:", "nccl:", "c10d::")
_OPTIMIZER_RANGES = (f"{RANGE_PREFIX}norm", f"{RANGE_PREFIX}update", "Optimizer.step")
_ENGINE, _ENGINE_CASTS = "FSDP::", "FSDP::cast_"
_ATTENTION = re.compile(r"scaled_?dot_?product|flash_?attention|flex_?attention|efficient_?attention", re.I)
_NORM = re.compile(r"(layer|rms|batch|group|instance)_?norm", re.I)
_COPIES = {"copy_", "_to_copy", "to", "clone", "contiguous", "cat", "stack", "split_with_sizes_copy"}
_DENSE = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "mkldnn_linear", "_int_mm"}
_SCALED = {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
_MATMULS = _DENSE | _SCALED | {"convolution", "mkldnn_convolution", "cudnn_convolution"}
_VIEWS = (
    {"t", "transpose", "view", "as_strided", "detach", "reshape", "expand", "slice", "select", "narrow"}
    | {"unsqueeze", "squeeze", "permute", "flatten", "unflatten", "split", "chunk", "alias", "view_as"}
    | {"_unsafe_view", "_reshape_alias", "resolve_conj", "resolve_neg", "lift_fresh", "set_", "resize_"}
)
_ALLOCATIONS = {"empty", "empty_like", "empty_strided"}
_READS = {"item", "_local_scalar_dense", "result_type", "is_nonzero"}
_WRAPPERS = {"matmul"}  # whose work is in the operation that they call
_NO_WORK = _VIEWS | _ALLOCATIONS | _READS | _WRAPPERS
# Parts of the names of kernels, where the operation that launched them is not known.
_KERNEL_NAMES = (
    (KernelKind.COLLECTIVES, re.compile(r"nccl", re.I)),
    (KernelKind.ATTENTION, re.compile(r"flash_|fmha|attention|sdpa|flex_", re.I)),
    (KernelKind.MATMUL, re.compile(r"gemm|cutlass|xmma|nvjet|wgmma|cublas|_mm_|matmul|triton_tem", re.I)),
    (KernelKind.NORM, _NORM),
    (KernelKind.COPIES, re.compile(r"memcpy|memset|copy_kernel|CatArray|split_with_sizes", re.I)),
    (KernelKind.OPTIMIZER, re.compile(r"FusedAdam|multi_tensor_apply", re.I)),
)
_DTYPES: dict[str, ComputeDtype] = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}

# Operation -> (argument that has the queries, argument that says whether it is causal).
_ATTENTION_ARGUMENTS = {
    "_scaled_dot_product_flash_attention": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_efficient_attention": (0, 6),
    "_scaled_dot_product_cudnn_attention": (0, 6),
    "_scaled_dot_product_flash_attention_backward": (1, 11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "_scaled_dot_product_efficient_attention_backward": (1, 11),
    "_scaled_dot_product_cudnn_attention_backward": (1, 14),
}
_ATTENTION_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_flash_attention_forward": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention_forward": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "flex_attention": "flex",
}


def host_kind(operation: HostOperation) -> KernelKind:
    """Returns the kind of the time that the host spends in `operation` itself."""
    ranges = [one.name for one in operation.chain()]
    if any(name.startswith(_COLLECTIVE_RANGES) for name in ranges):
        return KernelKind.COLLECTIVES
    found = _kind_of_ranges(ranges)
    name = bare_name(operation.name)
    if found is KernelKind.COPIES or found is None:
        if name in _MATMULS:
            return KernelKind.MATMUL
        if name in _COPIES:
            return KernelKind.COPIES
    if found is not None:
        return found
    is_operation = operation.name.startswith("aten::") and name not in _NO_WORK
    return KernelKind.POINTWISE if is_operation else KernelKind.HOST


def device_kind(work: DeviceWork) -> KernelKind:
    """Returns the kind of a kernel or copy of the device."""
    if "nccl" in work.name.lower():
        return KernelKind.COLLECTIVES
    ranges = [] if work.launch is None else [one.name for one in work.launch.chain()]
    found = _kind_of_ranges(ranges)
    if found is not None:
        return found
    if work.is_copy:
        return KernelKind.COPIES
    operation = next((bare_name(name) for name in ranges if name.startswith("aten::")), "")
    if operation in _MATMULS:
        return KernelKind.MATMUL
    if operation in _COPIES:
        return KernelKind.COPIES
    return next((kind for kind, name in _KERNEL_NAMES if name.search(work.name)), KernelKind.POINTWISE)


def _kind_of_ranges(ranges: list[str]) -> KernelKind | None:
    """Returns the kind by the enclosing operations and ranges; None if they do not determine it."""
    if any(name.startswith(_OPTIMIZER_RANGES) for name in ranges):
        return KernelKind.OPTIMIZER
    if any(_ATTENTION.search(name) for name in ranges):
        return KernelKind.ATTENTION
    if any(name.startswith(_ENGINE) and not name.startswith(_ENGINE_CASTS) for name in ranges):
        return KernelKind.COPIES  # in and out of the collectives' buffers
    return KernelKind.NORM if any(_NORM.search(name) for name in ranges) else None


def bare_name(name: str) -> str:
    """Returns the name of an operation without its library."""
    return name.rpartition("::")[2]


def counted_flops(operation: HostOperation) -> CountedFlops | None:
    """Returns the FLOP of a matmul or of attention by its shapes; None for other operations.

    Causal attention counts the pairs of positions that it computes, as `fullshard calibrate` does.
    """
    name = bare_name(operation.name)
    if name in _ATTENTION_ARGUMENTS:
        return _attention_flops(operation, name)
    first = {"addmm": 1, "baddbmm": 1}.get(name, 0)
    if name not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        return None
    left, right = _shape(operation, first), _shape(operation, first + 1)
    if len(left) not in (2, 3) or len(right) != len(left):
        return None
    dtype = "fp8" if name == "_scaled_mm" else _dtype(operation, first)
    return CountedFlops(2.0 * math.prod(left) * right[-1], "matmul", dtype)


def attention_kernel(operation: HostOperation) -> AttentionKernelUse | None:
    """Returns the kernel of an operation that is a forward of attention; None for other operations."""
    kernel = _ATTENTION_KERNELS.get(bare_name(operation.name))
    return None if kernel is None else AttentionKernelUse(kernel, _dtype(operation, 0))


def _attention_flops(operation: HostOperation, name: str) -> CountedFlops | None:
    place, causal_place = _ATTENTION_ARGUMENTS[name]
    query, key = _shape(operation, place), _shape(operation, place + 1)
    if len(query) != 4 or len(key) != 4:
        return None
    rows, columns = query[2], key[2]
    causal = causal_place < len(operation.values) and operation.values[causal_place] == "True"
    pairs = rows * (columns - rows) + rows * (rows + 1) // 2 if causal else rows * columns
    backward = name.endswith("_backward")
    flops = float((10 if backward else 4) * query[0] * query[1] * query[3] * pairs)
    rates = "attention_backward" if backward else "attention"
    return CountedFlops(flops, rates, _dtype(operation, place))


def _shape(operation: HostOperation, argument: int) -> list[int]:
    shape: Any = operation.dims[argument] if argument < len(operation.dims) else []
    is_shape = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    return shape if is_shape else []


def _dtype(operation: HostOperation, argument: int) -> ComputeDtype | None:
    kind = operation.types[argument] if argument < len(operation.types) else ""
    return _DTYPES.get(str(kind).lower())

"""Kind, FLOP and bytes of one operation, from the shapes of its arguments."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fullshard.distributed.sequence_parts import GATHER, REDUCE, REDUCE_ALL
from fullshard.distributed.tensors import storage_key
from fullshard.parallel.expert_parallel import EXCHANGE_COUNTS, EXCHANGE_ROWS
from fullshard.parallel.precision import TORCH_DTYPE
from fullshard.spec.model import KernelKind, SharedAxis
from fullshard.spec.plan import DeviceType, Dtype
from fullshard.torch_private.fake_tensors import schema
from fullshard.torch_private.tensors import tree_leaves

KernelDtype = Dtype | Literal["fp8"]
_DTYPE: dict[torch.dtype, KernelDtype] = {
    **{dtype: name for name, dtype in TORCH_DTYPE.items()},
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
_ATTENTION = "_scaled_dot_product_"
_VARLEN = "_varlen_attn"  # attention within documents on a GPU, with tensors (tokens, heads, head_dim)
GROUPED = "_grouped_mm"
# Collectives in the middle of computation, and how many times their input's bytes they need besides results.
_COLLECTIVES: dict[str, tuple[KernelKind, int]] = {
    GATHER: ("all_gather", 0),
    REDUCE: ("reduce_scatter", 1),
    REDUCE_ALL: ("all_reduce", 0),
    EXCHANGE_ROWS: ("row_exchange", 0),
    EXCHANGE_COUNTS: ("row_exchange", 0),
}
# Operations that create or inspect tensors and launch no kernel.
_NO_WORK = ("empty", "new_empty", "detach", "device", "_local_scalar", "lift", "is_same_size", "alias")


class OpCall(NamedTuple):
    """An operation with its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def bare_operator_name(self) -> str:
        return schema(self.func).name.partition("::")[2]

    def arguments_by_name(self) -> dict[str, Any]:
        """Returns the arguments by their names in the schema."""
        names = [argument.name for argument in schema(self.func).arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


class KernelLaunch(NamedTuple):
    """One kernel launch. `flops` of causal attention counts only the unmasked pairs of positions.

    backward: True if it computes a gradient during forward, as a chunked loss does
    unaligned: True for a matmul in half precision with a matrix whose rows are no multiple of 16 bytes
    axis: the ranks of a collective, whose name a trace gives it instead of a process group
    head_dim: width of the queries of one head of attention
    pieces: number of launches that it is where matrices of experts are multiplied in turn, or on the CPU
    rows: rows of each matrix of a grouped matmul, on average
    received: True if it works on rows that ranks sent to the experts of this one, or brings them
    """

    kind: KernelKind
    dtype: KernelDtype
    flops: int
    bytes: int
    causal: bool = False
    backward: bool = False
    unaligned: bool = False
    axis: SharedAxis | None = None
    head_dim: int = 0
    pieces: float = 1.0
    rows: float = 0.0
    received: bool = False


def find_kernel_launch(call: OpCall, result: Any) -> KernelLaunch | None:
    """Returns the launch for `call`; None for views, allocations and queries about a tensor."""
    name = call.bare_operator_name
    if getattr(call.func, "is_view", False) or name.startswith(_NO_WORK) or name == "_unsafe_view":
        return None
    read, written = list_tensors((call.args, call.kwargs)), list_tensors(result)
    if not written:
        return None
    moved = sum(map(readable_tensor_bytes, read)) + sum(map(readable_tensor_bytes, written))
    dtypes = (tensor.dtype for tensor in (*read, *written) if tensor.dtype in _DTYPE)
    dtype = _DTYPE[next(dtypes, torch.float32)]
    if name.startswith((_ATTENTION, _VARLEN)):
        return _attention_launch(call, moved=moved)
    if name == GROUPED:
        return _grouped_matmul_launch(call, dtype, moved=moved)
    count = flop_registry.get(call.func.overloadpacket)
    if count is not None:
        flops = int(count(*call.args, **call.kwargs, out_val=result))
        unaligned = not all(map(_has_aligned_rows, (*read, *written)))
        return KernelLaunch("matmul", dtype, flops, moved, unaligned=unaligned)
    kind, axis = "elementwise", None
    if name in _COLLECTIVES:
        kind, axis = _COLLECTIVES[name][0], call.arguments_by_name()["group"]
        moved = max(map(readable_tensor_bytes, (*read, *written)))
    received = name == EXCHANGE_ROWS and not call.arguments_by_name()["returns"]
    return KernelLaunch(kind, dtype, 0, moved, axis=axis, received=received)


def _has_aligned_rows(tensor: Tensor) -> bool:
    """Returns whether tensor cores can load each row of a matrix in half precision in vectors of 16 bytes.

    Only strides count, so a matrix may be transposed: cuBLAS documentation, tensor core usage.
    """
    if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.ndim < 2:
        return True
    strides = (stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return all(stride == 1 or stride * tensor.itemsize % 16 == 0 for stride in strides)


def transient_kernel_bytes(call: OpCall, *, device: DeviceType) -> int:
    """Returns the bytes that the kernel of `call` allocates, besides its results, and frees at its end.

    On the CPU those of an addition in place are known, which casts the tensor that it adds. On a GPU:

    - Attention backward: the gradient of the queries in fp32; one fp32 number per row; and with fewer
      key/value heads than query heads, the gradients of keys and values per query head, before they are
      summed. Measured for cuDNN's kernel on an H200; flash attention's source allocates the same.
    - Attention backward within documents: the same, with room for 128 more tokens per document in fp32
      (flash attention's source).
    - Embedding backward: one fp32 row per token.

    On both, collectives in the middle of computation hold what they send and receive in rank order.
    """
    name = call.bare_operator_name
    if name in _COLLECTIVES:
        times = call.args[1] if name == GATHER else _COLLECTIVES[name][1]
        return readable_tensor_bytes(call.args[0]) * times
    return _cpu_transient_bytes(call) if device == "cpu" else _cuda_transient_bytes(call)


def _cuda_transient_bytes(call: OpCall) -> int:
    name = call.bare_operator_name
    if name.startswith(_ATTENTION) and name.endswith("backward"):
        named = call.arguments_by_name()
        query, key = named["query"], named["key"]
        if query.dtype == torch.float32:
            return 0
        rows = query.numel() // query.shape[-1]
        expanded = 2 * rows // query.shape[2] * key.shape[2] * query.shape[-1] * query.itemsize
        return 4 * query.numel() + 4 * rows + (expanded if key.shape[1] != query.shape[1] else 0)
    if name.startswith(_VARLEN) and name.endswith("backward"):
        named = call.arguments_by_name()
        query, key = named["query"], named["key"]
        tokens, heads, channels = query.shape
        padded = tokens + 128 * (named["cu_seq_q"].shape[0] - 1)
        expanded = 2 * query.numel() * query.itemsize if key.shape[1] != heads else 0
        return 4 * padded * heads * (channels + 1) + expanded
    if name == "embedding_dense_backward":
        return 4 * call.args[0].numel()
    return 0


def _cpu_transient_bytes(call: OpCall) -> int:
    if call.bare_operator_name != "add_":
        return 0
    total, added = call.args[:2]
    differs = isinstance(added, Tensor) and added.ndim and added.dtype != total.dtype
    return added.numel() * total.itemsize if differs else 0


def _attention_launch(call: OpCall, *, moved: int) -> KernelLaunch:
    """Returns the launch for attention, with the FLOP of two matmuls in forward and five in backward.

    On a GPU, attention within documents counts as if each row were one document, without a sliding window.
    This is the most that it computes; how much less depends on the values in the batch.
    """
    named, name = call.arguments_by_name(), call.bare_operator_name
    query, key = named["query"], named["key"]
    causal = name.startswith(_VARLEN) or bool(named.get("is_causal", False))
    if name.startswith(_VARLEN):
        rows, columns = named["max_q"], named["max_k"]
    else:
        rows, columns = query.shape[2], key.shape[2]
    # Causal: the last query is aligned with the last key.
    pairs = rows * (columns - rows) + rows * (rows + 1) // 2 if causal else rows * columns
    backward = name.endswith("backward")
    flops = (10 if backward else 4) * (query.numel() // rows) * pairs
    kind: KernelKind = "attention_backward" if backward else "attention"
    dtype = _DTYPE.get(query.dtype, "fp32")
    return KernelLaunch(kind, dtype, flops, moved, causal, head_dim=query.shape[-1])


def run_on_fake_tensors(call: OpCall) -> Any:
    """Returns the result of an operation on fake tensors.

    torch infers the shapes of grouped matmuls only in bf16 and for some widths.
    """
    if call.bare_operator_name == GROUPED:
        return call.args[0].new_empty(grouped_mm_output_shape(call))
    return call.func(*call.args, **call.kwargs)


def grouped_mm_output_shape(call: OpCall) -> tuple[int, ...]:
    """Returns the result shape of a grouped matmul (the experts of a mixture), whose groups end at `offs`."""
    named = call.arguments_by_name()
    left, right, ends = call.args[0], named["mat2"], named.get("offs")
    groups = ends.shape[0] if ends is not None else max(left.shape[0], right.shape[0])
    rows, columns = left.shape[-2], right.shape[-1]
    return (groups, rows, columns) if left.ndim == right.ndim else (rows, columns)


def _grouped_matmul_launch(call: OpCall, dtype: KernelDtype, *, moved: int) -> KernelLaunch:
    """Returns the launch for a grouped matmul, which multiplies each row by the matrix of its own group only.

    Of a gradient of the matrices, the rows are those that it sums over.
    """
    named = call.arguments_by_name()
    left, right, ends = call.args[0], named["mat2"], named.get("offs")
    groups = (left if ends is None else ends).shape[0]
    flops, rows = 2 * left.shape[-2] * left.shape[-1] * right.shape[-1], left.shape[-2]
    if ends is None:
        flops *= groups
    else:
        rows = (left.shape[1] if right.ndim == 2 else rows) / groups
    return KernelLaunch("matmul", dtype, flops, moved, pieces=groups, rows=rows)


def list_tensors(nest: Any) -> list[Tensor]:
    """Returns the tensors in any nest of containers."""
    if isinstance(nest, Tensor):
        return [nest]
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def readable_tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a kernel can read from `tensor`; at most those of its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def distinct_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages behind `tensors`."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())

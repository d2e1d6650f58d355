"""Counts the bytes and the kernels of operations on fake tensors.

Without an allocator, a storage counts from its first use until its release. Kind, FLOP and bytes of a kernel
follow from the shapes of its arguments.
"""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fullshard.distributed.sequence_parts import GATHER, REDUCE, REDUCE_ALL
from fullshard.distributed.tensors import is_tensor_wrapper_subclass, storage_key, tensors_with_data
from fullshard.models.packed_weights import UNPACK, unpacking_cost
from fullshard.parallel.activation_offload import Way
from fullshard.parallel.expert_parallel import EXCHANGE_COUNTS, EXCHANGE_ROWS
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.spec.model import Event, KernelKind, SharedAxis
from fullshard.spec.plan import DeviceType, Dtype
from fullshard.torch_private.fake_tensors import TorchDispatchMode, schema
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
# Collectives in the middle of computation, and how often they need their input's bytes besides results
# (GATHER: once per rank instead).
_COLLECTIVES: dict[str, tuple[KernelKind, int]] = {
    GATHER: ("all_gather", 0),
    REDUCE: ("reduce_scatter", 1),
    REDUCE_ALL: ("all_reduce", 0),
    EXCHANGE_ROWS: ("row_exchange", 0),
    EXCHANGE_COUNTS: ("row_exchange", 0),
}
# Operations that create or inspect tensors and launch no kernel.
_NO_WORK = ("empty", "new_empty", "detach", "device", "_local_scalar", "lift", "is_same_size", "alias")
Kind = Literal["activations", "loss", "backward", "gradients"]
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor


class OpCall(NamedTuple):
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
    by_flash: True for attention that runs by flash attention also where torch prefers another kernel
    pieces: see `fullshard.spec.model.Kernel`
    rows: rows that each matrix of a grouped matmul multiplies, on average
    received: True if it works on rows that ranks sent to this rank's experts, or is that exchange
    waits: True if the host waits for its result
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
    by_flash: bool = False
    pieces: float = 1.0
    rows: float = 0.0
    received: bool = False
    waits: bool = False


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
    kind, axis, pieces = "elementwise", None, 1.0
    if name in _COLLECTIVES:
        kind, axis = _COLLECTIVES[name][0], call.arguments_by_name()["group"]
        # The row counts that an exchange reads are not sent.
        moved = max(map(readable_tensor_bytes, (*read, written[0])))
    if name == UNPACK:
        _, moved, pieces = unpacking_cost(result.numel(), call.arguments_by_name()["form"])
    received = name == EXCHANGE_ROWS and not call.arguments_by_name()["returns"]
    waits = name == EXCHANGE_COUNTS
    return KernelLaunch(kind, dtype, 0, moved, axis=axis, pieces=pieces, received=received, waits=waits)


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

    On the CPU, only an addition in place that casts its operand to another dtype is known. On a GPU:

    - Attention backward in half precision: the gradient of the queries in fp32; one fp32 number per row; and
      with fewer key/value heads than query heads, the gradients of keys and values per query head, before
      they are summed. Measured for cuDNN's kernel on an H200; flash attention's source allocates the same.
    - Attention backward within documents: the same, with room for 128 more tokens per document in fp32
      (flash attention's source).
    - Embedding backward: one fp32 row per token.

    On both, gathers and reduce-scatters in the middle of computation hold a copy in the order of ranks.
    """
    name = call.bare_operator_name
    if name == UNPACK:
        named = call.arguments_by_name()
        return unpacking_cost(named["packed"].shape[0] * named["columns"], named["form"]).temporary_bytes
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
    width, varlen = query.shape[-1], name.startswith(_VARLEN)
    by_flash = varlen and not _may_run_documents_by_cudnn(call)
    return KernelLaunch(kind, dtype, flops, moved, causal, head_dim=width, by_flash=by_flash)


def _may_run_documents_by_cudnn(call: OpCall) -> bool:
    """Returns whether this torch prefers cuDNN for attention within these documents (2.15; none before)."""
    named = call.arguments_by_name()
    asks = any(argument.name == "backend" for argument in schema(call.func).arguments)
    same = storage_key(named["cu_seq_q"]) == storage_key(named["cu_seq_k"])
    return asks and same and tuple(named["window_size"]) == (-1, 0) and named["query"].shape[-1] <= 128


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

    For the gradient of the matrices, `rows` counts the rows that it sums over.
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


@dataclass
class PhaseRecord:
    event: Event  # the FSDP2 event that opens the phase
    unit: int  # index of its unit; -1 if the event belongs to none
    # (kind, bytes) of each allocation (positive) and release (negative), in order
    changes: list[tuple[Kind, int]] = field(default_factory=list[tuple[Kind, int]])
    # number of first changes that belong to the event (gradients handed over), not the phase
    event_change_count: int = 0
    work: list[KernelLaunch] = field(default_factory=list[KernelLaunch])  # every kernel launch
    fused: list[KernelLaunch] = field(default_factory=list[KernelLaunch])  # with elementwise runs fused
    # (way, bytes) of copies to and from the host, and of waits for them (0 bytes)
    copies: list[tuple[Way, int]] = field(default_factory=list[tuple[Way, int]])


@dataclass
class _LiveStorage:
    """A live storage. `serial`: number of storages that were created before it, which identifies it."""

    size: int
    kind: Kind | None
    serial: int
    reference: "weakref.ref[torch.UntypedStorage]"


@dataclass
class _FusedElementwiseKernel:
    """Sequence of elementwise operations that a compiler fuses into one kernel."""

    born: int  # serials from this one on belong to storages that the run created
    read: dict[int, int] = field(default_factory=dict[int, int])  # bytes of older storages, by serial
    written: dict[int, int] = field(default_factory=dict[int, int])  # bytes by serial
    last: KernelLaunch | None = None  # the latest launch of the run; None if it is empty


class AllocationRecorder(TorchDispatchMode):
    """Records every storage that an operation returns, under the current `kind`, and every kernel launch.

    It must be entered inside a FakeTensorMode. Memory that kernels of `device` allocate and free within one
    operation counts too, as far as it is known (`transient_kernel_bytes`).

    A tensor that is used twice has two gradients. Autograd adds them in place, but those of fake tensors out
    of place. So a gradient that is released right after such a sum counts as released before it.
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.recorded = [PhaseRecord("start", -1)]
        self._device: DeviceType = device
        self._blocks: dict[int, _LiveStorage] = {}
        self._born = 0
        self._fusing = _FusedElementwiseKernel(0)
        self._is_compiled, self._unwritten = False, dict[int, None]()  # keys of storages not yet in memory
        self._work_factor, self._is_backward = 1.0, False
        self._has_received_rows = False  # between the exchanges to the experts and back
        self.loss_chunk = 0  # rows of logits that the loss computed at once; 0 for all
        # keys of the two gradients that the latest operation added; empty after another operation
        self._added_gradients: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # two thirds of all calls
            return args[0].device  # of a fake tensor a Python property, so no mode is called again
        if any(map(is_tensor_wrapper_subclass, types)):
            return NotImplemented  # the subclass calls operations on the tensors that it holds
        call = OpCall(func, args, kwargs or {})
        result = run_on_fake_tensors(call)
        self._added_gradients.clear()
        launch = find_kernel_launch(call, result)
        if self._unwritten and launch is not None and launch.kind != "elementwise":
            self.record_fused_launch()  # its inputs are in memory before its results are
        is_fused = self._is_compiled and launch is not None and launch.kind == "elementwise"
        for tensor in list_tensors(result):
            self._track_storage(tensor, self.kind, is_fused=is_fused)
        is_sum = func is _ADD and self.kind == "backward" and not torch.is_grad_enabled()
        if is_sum and not self._is_compiled:
            self._added_gradients.update(map(storage_key, list_tensors(args)))
        if size := transient_kernel_bytes(call, device=self._device):
            self._record_change(self.kind, size)
            self._record_change(self.kind, -size)
        if launch is not None:
            if self._device == "cpu":
                launches = launch.pieces * self._work_factor
                launch = launch._replace(pieces=launches)
            self._record_launch_eager_and_fused(launch, read=(call.args, call.kwargs), written=result)
        return result

    def ignore_storage(self, tensor: Tensor) -> None:
        """Excludes the storage of `tensor`, which exists outside the microbatch, from the count."""
        for one in tensors_with_data(tensor):
            self._track_storage(one, None)

    def change_storage_kind(self, tensor: Tensor, kind: Kind) -> None:
        """Counts the storage of `tensor` under `kind` from now on, if it is counted at all."""
        block = self._blocks.get(storage_key(tensor))
        if block is not None and block.kind is not None and block.kind != kind:
            self._record_change(block.kind, -block.size)
            block.kind = kind
            self._record_change(kind, block.size)

    def start_phase(self, event: Event, unit: int) -> None:
        self.record_fused_launch()
        self.recorded.append(PhaseRecord(event, unit))

    def scale_work_of_chunk(self, rows: int, *, of: int) -> AbstractContextManager[None]:
        """While active, scales FLOP and bytes moved from `rows` to all `of` rows; memory counts once."""
        self.loss_chunk = rows
        return _replace_attribute_between_kernels(self, "_work_factor", value=of / rows)

    def count_memory_as_compiled(self) -> AbstractContextManager[None]:
        """While active, results of elementwise operations take memory only if they outlive their kernel."""
        return _replace_attribute_between_kernels(self, "_is_compiled", value=True)

    def record_kernels_as_backward(self) -> AbstractContextManager[None]:
        """While active, records kernels as those of a backward."""
        return _replace_attribute_between_kernels(self, "_is_backward", value=True)

    def _record_launch_eager_and_fused(self, launch: KernelLaunch, *, read: Any, written: Any) -> None:
        factor = self._work_factor
        if launch.kind == "row_exchange":
            self._has_received_rows = launch.received
        launch = launch._replace(
            flops=round(factor * launch.flops),
            bytes=round(factor * launch.bytes),
            backward=self._is_backward,
            received=self._has_received_rows,
            unaligned=launch.unaligned and not self._is_compiled,  # Inductor pads such matrices
        )
        self.recorded[-1].work.append(launch)
        if launch.kind != "elementwise":
            self.record_fused_launch()
            self.recorded[-1].fused.append(launch)
            return
        run = self._fusing
        for tensor in list_tensors(read):
            if (serial := _storage_serial_number(tensor, self._blocks)) < run.born:
                run.read[serial] = max(run.read.get(serial, 0), readable_tensor_bytes(tensor))
        for tensor in list_tensors(written):
            run.written[_storage_serial_number(tensor, self._blocks)] = tensor.untyped_storage().nbytes()
        run.last = launch

    def record_fused_launch(self) -> None:
        """Records the current elementwise run, if it is not empty, as one kernel, and starts the next run.

        The kernel reads storages that existed before the run, and writes storages that are still alive.
        """
        run, self._fusing = self._fusing, _FusedElementwiseKernel(self._born)
        written, self._unwritten = self._unwritten, {}
        for block in (self._blocks[key] for key in written):
            self._record_change(block.kind, block.size)
        if run.last is not None:
            alive = {block.serial for block in self._blocks.values()}
            kept = sum(size for serial, size in run.written.items() if serial in alive)
            moved = round(self._work_factor * (sum(run.read.values()) + kept))
            self.recorded[-1].fused.append(run.last._replace(bytes=moved))

    def _track_storage(self, tensor: Tensor, kind: Kind | None, *, is_fused: bool = False) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._blocks:
            return
        reference = weakref.ref(storage, lambda _reference: self._record_release(key))
        self._blocks[key] = _LiveStorage(storage.nbytes(), kind, self._born, reference)
        self._born += 1
        if is_fused:
            self._unwritten[key] = None
        else:
            self._record_change(kind, storage.nbytes())

    def _record_release(self, key: int) -> None:
        block, changes = self._blocks.pop(key), self.recorded[-1].changes
        if key in self._unwritten:
            del self._unwritten[key]
        elif key in self._added_gradients and changes[-1:] == [("backward", block.size)] and block.kind:
            changes.insert(-1, (block.kind, -block.size))
            self._added_gradients.clear()
        else:
            self._record_change(block.kind, -block.size)

    def _record_change(self, kind: Kind | None, size: int) -> None:
        if kind is not None and size:
            self.recorded[-1].changes.append((kind, size))


def _storage_serial_number(tensor: Tensor, blocks: Mapping[int, _LiveStorage]) -> int:
    block = blocks.get(storage_key(tensor))
    return -1 if block is None else block.serial


@contextmanager
def _replace_attribute_between_kernels(
    recorder: AllocationRecorder, attribute: str, *, value: float | bool
) -> Generator[None]:
    """Replaces an attribute while active. No kernel is fused across its beginning or end."""
    recorder.record_fused_launch()
    before = getattr(recorder, attribute)
    setattr(recorder, attribute, value)
    yield
    recorder.record_fused_launch()
    setattr(recorder, attribute, before)

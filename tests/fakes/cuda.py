"""CUDA on the CPU: real tensors in the host's memory, and streams whose order is checked.

A `FakeCuda` makes torch answer as on a machine with GPUs: `device="cuda"` works, and tensors made by it
say so in `.device`, `.is_cuda` and `.is_cpu`, in backward and in other threads as well. The CPU does
their work at once. What is checked is whether a GPU would have to do it in that order. Two uses of the
same bytes, one of which writes, are ordered only by a stream itself, events, `wait_stream`, and the
host's waits. Freeing is such a use: the caching allocator gives the memory to the next allocation on the
stream that it was allocated on. By then this stream must have waited for uses on other streams, unless
`record_stream` covers them. A program without such faults computes the same numbers however late each
stream runs: no order need be tried.

    with FakeCuda(index=3) as cuda:     # entered before the program makes its tensors, streams and threads
        model = shard(...)              # plan.device is "cuda"; the process group may be gloo's
        cuda.waits.clear()
        ...
        assert cuda.waits == []         # the host did not wait for the device
        del model
        assert cuda.faults == []        # uses of the same memory that nothing orders
        assert cuda.contexts == {3}     # devices that some thread has touched
        assert cuda.registered == {}    # ranges that cudaHostRegister has registered

Not modelled: kernels without a CPU version (Triton, cuDNN), NCCL's own stream (a collective is work of the
current stream), reuse of an address by another tensor, races between threads of the host, the sizes of
memory, and moves that begin and end in C++ (`to` within an autograd formula). Several devices share memory.
"""

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.device_order import DeviceOrder, Event, Stream, place

_READS = {  # operations whose result, or the shape of whose result, the host reads
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"),
    *("unique_consecutive", "unique_dim", "bincount", "repeat_interleave"),
}
_INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}  # a mask: like nonzero
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_BASE: Any = torch._C.TensorBase
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_GROUP = torch._C._group_tensors_by_device_and_dtype
_active: list["FakeCuda"] = []


class FakeCuda(DeviceOrder):
    """Context in which torch has CUDA: see the module.

    index: this rank's device, which is the current device of the thread that enters
    contexts: devices on which a thread has made a context, by an allocation, a stream, or `set_device`
    """

    def __init__(self, index: int = 0, *, devices: int = 8) -> None:
        super().__init__()
        self.index, self.devices, self.contexts = index, devices, set[int]()
        self._thread, self._lock = threading.local(), threading.RLock()
        self._defaults: dict[int, Stream] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "FakeCuda":
        assert not _active, "one at a time"
        _active.append(self)
        self._undo.callback(_active.clear)
        for owner, name, value in (*_of_torch(self), *_of_tensors(self)):
            here = name in vars(owner)
            undo: Any = (setattr, owner, name, vars(owner)[name]) if here else (delattr, owner, name)
            self._undo.callback(*undo)
            setattr(owner, name, value)
        loaded = sys.modules.get("triton")  # its kernels cannot run, so it counts as not installed
        undo = (sys.modules.__setitem__, "triton", loaded) if loaded else (sys.modules.pop, "triton")
        self._undo.callback(*undo)
        sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
        self.set_device(self.index)
        self._undo.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    # A thread's current device and streams

    def index_of(self, device: Any = None) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return getattr(self._thread, "index", 0) if index is None or index < 0 else index

    def set_device(self, device: Any) -> int:
        """Sets the device, unless it is negative, which makes a context there. Returns the one before."""
        before, index = self.index_of(), device if isinstance(device, int) else torch.device(device).index
        if index >= 0:
            self._thread.index = index
            self.contexts.add(index)
        return before

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        chosen = vars(self._thread).setdefault("streams", {}).get(index)
        if chosen is None and index not in self._defaults:
            self._defaults[index] = Stream(self, torch.device("cuda", index))
        return chosen or self._defaults[index]

    def set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device.index)
        vars(self._thread).setdefault("streams", {})[stream.device.index] = stream

    # Operations

    def run(self, func: Any, args: tuple[Any, ...], *, kwargs: dict[str, Any]) -> Any:
        """Runs an operation on the CPU, and notes what it would do on the device."""
        name, given = func.overloadpacket.__name__, _tensors((args, kwargs))
        here = [self.is_on_device(one) for one in given]
        if name == "record_grad_output_stream":  # FSDP2's `record_stream` in newer releases
            return args[0].record_stream(self.streams[args[1]])
        device = kwargs.get("device")
        is_work = any(here) if device is None else torch.device(device).type == "cuda"
        moves = name in ("copy_", "_foreach_copy_") and any(here) and not all(here)
        moves |= name == "_to_copy" and is_work != here[0] and not given[0].is_meta
        if is_work and not moves:
            _check_devices(name, [one for one, on in zip(given, here, strict=True) if not on])
        waits = name in _READS and any(here)
        waits |= name in _INDEXED and any(here) and any(t.dtype is torch.bool for t in _tensors(args[1]))
        waits |= moves and not self._is_asynchronous(args, kwargs, given=given) and not _is_in_collective()
        plain = {**kwargs, "device": torch.device("cpu")} if device is not None and is_work else {**kwargs}
        pins = bool(plain.pop("pin_memory", False)) or (moves and not is_work and not waits)
        result = func(*args, **plain)
        with self._lock:
            for one in () if moves and name != "_to_copy" else _tensors(result):
                if (is_work or pins) and not one.is_meta and self.find(one) is None:
                    self.contexts.add(self.index_of(device))
                    self.add(one, self.current_stream(device) if is_work else None)
            if not func.is_view:
                stream = self.current_stream() if is_work or moves else None
                self._use_arguments(func, args, kwargs=kwargs, made=result if moves else (), stream=stream)
            if waits:
                self.wait(f"copy by {name}" if moves else name, self.current_stream().done)
            elif moves and not (here[0] if name == "copy_" else is_work):
                self.copies_to_host += 1
        return result

    def _use_arguments(
        self, func: Any, args: Any, *, kwargs: dict[str, Any], made: Any, stream: Stream | None
    ) -> None:
        if stream is not None:
            stream.enqueue()
        name, written = func.overloadpacket.__name__, set[int]()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= {id(one) for one in _tensors(found)}
        for one in _tensors((args, kwargs)):
            self.use(one, name, writes=id(one) in written, stream=stream)
        for one in _tensors(made):
            self.use(one, name, writes=True, stream=stream)

    def _is_asynchronous(self, args: Any, kwargs: Any, *, given: list[Tensor]) -> bool:
        """Returns whether a copy returns at once: if asked to, and the host's memory is pinned."""
        asked = kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
        return bool(asked) and all(self.is_on_device(one) or self.is_pinned(one) for one in given)


class _Dispatch(TorchDispatchMode):
    """Sees a thread's operations."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(_FAKE_MODE) is not None:
            return func(*args, **kwargs or {})  # a mode of fake tensors comes after all others
        if any(one not in _PLAIN for one in types):
            return NotImplemented  # so that the operations into which it divides itself come here
        return self._cuda.run(func, args, kwargs=kwargs or {})


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _check_devices(name: str, others: list[Tensor]) -> None:
    """Raises for tensors of the host among those of the device. Most kernels take single numbers."""
    takes_any = name in _INDEXED or name.startswith("_foreach_")
    found = [one for one in others if name.startswith("_fused_") or (one.ndim and not takes_any)]
    if any(not one.is_meta for one in found):
        raise RuntimeError(f"Expected all tensors to be on the same device, in {name}, {place()}")


def _is_in_collective() -> bool:
    """Returns whether gloo copies to or from memory of its own, as NCCL would not."""
    frame: Any = sys._getframe(3)
    files = [frame.f_code.co_filename for _ in range(4) if (frame := frame.f_back) is not None]
    return any(one.endswith("distributed_c10d.py") for one in files)


# What takes the place of torch's own #
def _of_torch(cuda: FakeCuda) -> Iterator[tuple[Any, str, Any]]:
    class CudaStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            super().__init__(cuda, torch.device("cuda", cuda.index_of(device)))
            cuda.contexts.add(self.device.index)

    class CudaEvent(Event):
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            super().__init__(cuda)

        def wait(self, stream: Stream | None = None) -> None:
            (stream or cuda.current_stream()).wait_event(self)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, _flags: _register(cuda, pointer, size=size),
        cudaHostUnregister=cuda.unregister,
    )
    functions: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda: True),
        **dict.fromkeys(("_lazy_init", "empty_cache"), lambda: None),
        **dict.fromkeys(("set_device", "_exchange_device", "_maybe_exchange_device"), cuda.set_device),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda _device=None: 0),
        **dict.fromkeys(("current_stream", "default_stream"), cuda.current_stream),
        **{"Stream": CudaStream, "Event": CudaEvent, "set_stream": cuda.set_stream},
        "device_count": lambda: cuda.devices,
        "current_device": cuda.index_of,
        "synchronize": lambda _device=None: cuda.wait(
            "synchronize", {one: one.count for one in cuda.streams}
        ),
        "cudart": lambda: runtime,
        "memory_stats": lambda _device=None: defaultdict[str, int](int),
        "memory_stats_as_nested_dict": lambda _device=None: {},
        "reset_peak_memory_stats": lambda _device=None: None,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_name": lambda _device=None: "NVIDIA H100 80GB HBM3",
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in functions.items():
        yield torch.cuda, name, value
    for name, value in (("current_stream", cuda.current_stream), ("current_device_index", cuda.index_of)):
        yield torch.accelerator, name, value
    for name in ("tensor", "as_tensor"):
        yield torch, name, _made_on_host(getattr(torch, name))
    yield torch._C, _GROUP.__name__, _group_by_device_and_dtype
    yield threading.Thread, "run", _run_with_dispatch(cuda, threading.Thread.run)
    resize = torch.UntypedStorage.resize_
    yield torch.UntypedStorage, "resize_", lambda one, size: cuda.resize(one, lambda: resize(one, size))


def _of_tensors(cuda: FakeCuda) -> Iterator[tuple[Any, str, Any]]:
    def device(tensor: Tensor) -> torch.device:
        memory = cuda.find(tensor)
        on_host = memory is None or memory.stream is None
        return _BASE.device.__get__(tensor) if on_host else memory.stream.device

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        memory = cuda.find(tensor)
        assert memory is not None, "memory of the host is not recorded"
        memory.recorded.add(stream)

    def pin_memory(tensor: Tensor) -> Tensor:
        return tensor if cuda.is_pinned(tensor) else torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    methods: dict[str, Any] = {
        "device": property(device),
        "is_cuda": property(cuda.is_on_device),
        "is_cpu": property(lambda one: _BASE.is_cpu.__get__(one) and not cuda.is_on_device(one)),
        "to": _to,
        "cpu": lambda one, **options: _to(one, "cpu", **options),
        "cuda": lambda one, target="cuda", **options: _to(one, target, **options),
        "is_pinned": lambda one: cuda.is_pinned(one),
        **{"pin_memory": pin_memory, "record_stream": record_stream, **_of_elements(cuda)},
    }
    for name, value in methods.items():
        yield Tensor, name, value


def _of_elements(cuda: FakeCuda) -> dict[str, Callable[..., Any]]:
    def set_item(tensor: Tensor, index: Any, value: Any) -> None:
        if isinstance(value, int | float) and tensor.is_cuda:  # for the CPU, torch makes it on the host
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        _BASE.__setitem__(tensor, index, value)

    def tolist(tensor: Tensor) -> Any:
        if cuda.is_on_device(tensor):
            cuda.wait("tolist", cuda.current_stream().done)
        else:
            cuda.use(tensor, "tolist", writes=False, stream=None)
        return _BASE.tolist(tensor)

    def numpy(tensor: Tensor, **options: Any) -> Any:
        if cuda.is_on_device(tensor):
            raise TypeError("can't convert cuda device type tensor to numpy.")
        cuda.use(tensor, "numpy", writes=True, stream=None)
        return _BASE.numpy(tensor, **options)

    return {"__setitem__": set_item, "tolist": tolist, "numpy": numpy}


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy, own = kwargs.pop("copy", False), tensor.device
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and "meta" in (own.type, device.type):
        return _BASE.to(tensor, device, dtype or tensor.dtype, copy=copy)
    if device is None or device == own:
        layout = layout or torch.preserve_format
        return _BASE.to(tensor, dtype or tensor.dtype, copy=copy, memory_format=layout)
    move = torch.ops.aten._to_copy.default
    return move(tensor, dtype=dtype or tensor.dtype, device=device, non_blocking=non_blocking)


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_and_move(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        made = make(data, *args, **options)
        return made if device is None else made.detach().to(device).requires_grad_(made.requires_grad)

    return make_and_move


def _group_by_device_and_dtype(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """Returns the groups of C++, which takes all tensors for the CPU's, by the device of their first."""
    groups = _GROUP(lists, with_indices)
    return {(group[0][0][0].device, dtype): group for (_, dtype), group in groups.items()}


def _register(cuda: FakeCuda, pointer: int, *, size: int) -> int:
    if any(pointer < at + other and at < pointer + size for at, other in cuda.registered.items()):
        return 712  # cudaErrorHostMemoryAlreadyRegistered
    cuda.registered[pointer] = size
    return 0


def _run_with_dispatch(cuda: FakeCuda, run: Callable[[threading.Thread], None]) -> Any:
    def run_with_dispatch(thread: threading.Thread) -> None:
        with _Dispatch(cuda) if _active else contextlib.nullcontext():
            run(thread)

    return run_with_dispatch

"""The order that streams, events and the host's waits give to the uses of a device's memory."""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clock = dict["Stream", int]  # by stream, how many of its works are done before


def place() -> str:
    """Returns the line of the package that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "/fullshard/" in code.co_filename:
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "a test"


class Stream:
    """Stream of a device. `done`: what is done when its last work is; `freed`: uses of memory freed to it."""

    def __init__(self, order: "DeviceOrder", device: torch.device) -> None:
        self.order, self.device, self.priority = order, device, 0
        self.stream_id, self.device_index, self.device_type = len(order.streams), device.index, 1
        self.count, self.done, self.freed = 0, Clock(), list[Use]()
        order.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        _merge(self.done, event.done)

    def wait_stream(self, stream: "Stream") -> None:
        _merge(self.done, stream.done)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.order.wait("Stream.synchronize", self.done)

    def enqueue(self) -> int:
        """Enqueues a work, which comes after what the host has waited for. Returns its number."""
        _merge(self.done, self.order.done)
        self.count += 1
        self.done[self] = self.count
        return self.count


class Event:
    """Event of a device; `copies` counts the copies to the host before it."""

    def __init__(self, order: "DeviceOrder") -> None:
        self.order, self.done, self.copies = order, Clock(), 0

    def record(self, stream: Stream | None = None) -> "Event":
        stream = stream or torch.cuda.current_stream()  # pyright: ignore[reportAssignmentType]
        assert isinstance(stream, Stream)
        stream.enqueue()
        self.done, self.copies = {**stream.done}, self.order.copies_to_host
        return self

    def query(self) -> bool:
        return all(self.order.done.get(stream, 0) >= count for stream, count in self.done.items())

    def synchronize(self) -> None:
        """Waits. If figures were copied to the host again since, the device has another step to do."""
        idles = self.copies == self.order.copies_to_host
        self.order.wait("Event.synchronize", self.done, idles=idles)

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Use(NamedTuple):
    stream: Stream
    number: int  # of the stream's work
    name: str


@dataclass(eq=False)
class Memory:
    """Device memory, or host memory that the device may use.

    stream: on which it was allocated; None for host memory
    address: of host memory that cudaHostRegister has registered; None for other memory
    uses: the newest work of each kind: {(stream, first byte, end, whether it writes): (number, name)}
    recorded: streams of `record_stream`
    """

    stream: Stream | None
    address: int | None = None
    nbytes: int = 0
    uses: dict[tuple[Stream, int, int, bool], tuple[int, str]] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def unordered(self, begin: int, end: int, *, writes: bool, done: Clock) -> Iterator[Use]:
        """Yields the earlier uses of these bytes that may still run when `done` is done."""
        for (stream, first, last, wrote), (number, name) in self.uses.items():
            if (writes or wrote) and begin < last and first < end and number > done.get(stream, 0):
                yield Use(stream, number, f"{'write' if wrote else 'read'} by {name}")


class DeviceOrder:
    """Notes every use of a device's memory, and which of them nothing orders.

    faults: uses of the same memory that nothing orders
    waits: waits of the host during which the device may idle
    registered: size of each range that cudaHostRegister has registered, by its address
    """

    def __init__(self) -> None:
        self.faults, self.waits, self.registered = list[str](), list[str](), dict[int, int]()
        self.done, self.copies_to_host, self.streams = Clock(), 0, list[Stream]()
        self._memory: dict[int, Memory] = {}  # by the storage's identity
        self._uses_of_dropped = dict[int, list[Use]]()  # by the address of registered memory

    def wait(self, what: str, done: Clock, *, idles: bool = True) -> None:
        """Makes the host wait until `done` is done."""
        if idles and any(self.done.get(stream, 0) < count for stream, count in done.items()):
            self.waits.append(f"{what} in {place()}")
        _merge(self.done, done)

    def find(self, tensor: Tensor) -> Memory | None:
        """Returns a tensor's memory, or None if the device cannot use it."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # of a tensor that has none
            return None
        if (found := self._memory.get(storage._cdata)) is None and self.registered and not tensor.is_meta:
            begin = storage.data_ptr()
            for address, size in self.registered.items():
                if address <= begin < address + size:
                    return self.add(tensor, None, address=address)
        return found

    def is_on_device(self, tensor: Tensor) -> bool:
        return (memory := self.find(tensor)) is not None and memory.stream is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return (memory := self.find(tensor)) is not None and memory.stream is None

    def add(self, tensor: Tensor, stream: Stream | None, *, address: int | None = None) -> Memory:
        """Notes that a tensor's memory was allocated on a stream, or is pinned if that is None."""
        storage = tensor.untyped_storage()
        memory = self._memory[storage._cdata] = Memory(stream, address)
        weakref.finalize(storage, self._forget, storage._cdata, memory).atexit = False
        self._allocate(memory, storage.nbytes())
        return memory

    def resize(self, storage: Any, resize: Any) -> Any:
        """Notes that `resize` gives a storage other memory, as FSDP2 does."""
        if (memory := self._memory.get(storage._cdata)) is not None:
            self._free(memory)
        result = resize()
        if memory is not None:
            current: Any = torch.cuda.current_stream()
            memory.stream = current if memory.stream is not None else None
            self._allocate(memory, storage.nbytes())
        return result

    def use(self, tensor: Tensor, name: str, *, writes: bool, stream: Stream | None) -> None:
        """Notes that a stream's newest work uses a tensor, or the host at once if that is None."""
        memory = self.find(tensor)
        if memory is None or not tensor.numel():
            return
        begin = tensor.storage_offset() * tensor.itemsize
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        end = begin + (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.itemsize
        for use in memory.unordered(begin, end, writes=writes, done=self._done_before(stream)):
            kind = "write" if writes else "read"
            self.faults.append(f"{kind} by {name} in {place()}, which does not wait for: {use.name}")
        if stream is not None:
            memory.uses[stream, begin, end, writes] = (stream.count, f"{name} in {place()}")

    def unregister(self, address: int) -> int:
        """Unregisters host memory, which no work may use any more, and which must still be mapped."""
        if (size := self.registered.pop(address, None)) is None:
            return 713  # cudaErrorHostMemoryNotRegistered
        for use in self._uses_of_dropped.pop(address, ()):
            if use.number > self.done.get(use.stream, 0):
                self.faults.append(f"host memory unregistered without waiting for: {use.name}")
        with open("/proc/self/maps") as lines:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        if not any(begin <= address and address + size <= end for begin, end in ranges):
            self.faults.append("host memory was unmapped before it was unregistered")
        return 0

    def _allocate(self, memory: Memory, nbytes: int) -> None:
        memory.nbytes = nbytes
        if (stream := memory.stream) is None or not nbytes:
            return
        done = self._done_before(stream)
        for use in stream.freed:
            if use.number > done.get(use.stream, 0):
                self.faults.append(f"memory allocated in {place()} may be freed memory still in {use.name}")
        stream.freed.clear()
        memory.uses = {(stream, 0, nbytes, True): (stream.enqueue(), "earlier work there")}

    def _free(self, memory: Memory) -> None:
        """Gives memory back to its stream. Torch itself waits for its pinned memory."""
        streams = (memory.stream, *memory.recorded) if memory.stream is not None else ()
        done = self.done | {one: one.count for one in streams}
        uses = memory.unordered(0, memory.nbytes, writes=True, done=done)
        if memory.stream is not None:
            memory.stream.freed += uses
        elif memory.address is not None:
            self._uses_of_dropped.setdefault(memory.address, []).extend(uses)
        memory.uses, memory.recorded = {}, set()

    def _forget(self, key: int, memory: Memory) -> None:
        self._free(memory)
        if self._memory.get(key) is memory:
            del self._memory[key]

    def _done_before(self, stream: Stream | None) -> Clock:
        done = {**self.done}
        if stream is not None:
            _merge(done, stream.done)
        return done


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in [*other.items()]:
        clock[stream] = max(clock.get(stream, 0), count)

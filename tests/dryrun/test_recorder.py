"""What the recorder sees of storages, streams and the engine's own acts."""

import torch
import torch.distributed.fsdp  # the engine's own operations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function

from fullshard.dryrun.events import AllocateEvent, FreeEvent, live_block_sizes_after
from fullshard.dryrun.recorder import StorageEventRecorder


def recorded(act, device="cpu") -> StorageEventRecorder:
    recorder = StorageEventRecorder(device)
    with FakeTensorMode(), recorder.record_resizes_and_random_states(), recorder:
        act(recorder)
    return recorder


def changes(recorder: StorageEventRecorder) -> list[int]:
    sizes = {e.block: e.size for e in recorder.events if isinstance(e, AllocateEvent)}
    return [e.size if isinstance(e, AllocateEvent) else -sizes[e.block] for e in recorder.events]


def test_a_storage_lives_as_long_as_a_tensor_on_it():
    def act(_recorder):
        tensor = torch.empty(10)
        view = tensor[2:]
        del tensor
        other = view + 1
        del view, other

    assert changes(recorded(act)) == [40, 32, -40, -32]


def test_resizing_a_storage_frees_it_and_brings_it_back():
    def act(_recorder):
        tensor = torch.empty(10)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(40)

    resize = torch.UntypedStorage.resize_
    assert changes(recorded(act)) == [40, -40, 40, -40]
    assert torch.UntypedStorage.resize_ is resize


def test_what_is_allocated_within_the_engines_ranges_is_its_own():
    kept = []

    def act(_recorder):
        with record_function("FSDP::pre_forward (blocks.0)"):
            with record_function("FSDP::all_gather (blocks.1)"):
                kept.append(torch.empty(1))
            with record_function("FSDP::cast_forward_inputs"):
                kept.append(torch.empty(2))
        kept.append(torch.empty(3))

    recorder = recorded(act)
    sizes = live_block_sizes_after(recorder.events)
    assert [sizes[block] for block in recorder.fsdp_blocks] == [4]
    assert [name for _, name in recorder.moments] == [", pre forward of blocks.0"]


def test_an_allocation_is_for_the_stream_that_the_engine_is_on():
    def act(_recorder):
        side = torch.cpu.Stream()
        torch.empty(1)
        with torch.cpu.stream(side):
            torch.empty(2)
        torch.empty(3)
        with torch.cpu.stream(side):
            torch.empty(4)

    streams = [event.stream for event in recorded(act).events if isinstance(event, AllocateEvent)]
    assert streams == [0, 1, 0, 1]


def test_random_states_lie_on_the_host():
    size = torch.get_rng_state().nbytes
    assert changes(recorded(lambda _: torch.get_rng_state())) == [size, -size]
    assert changes(recorded(lambda _: torch.get_rng_state(), device="cuda")) == []


def test_on_the_cpu_uneven_gradients_are_padded_before_they_are_copied():
    """Rows of 3 over 2 ranks become 4; those of 4 are copied as they are."""

    def act(_recorder):
        gradients, buffer = [torch.empty(3, 5), torch.empty(4, 5)], torch.empty(2, 20)
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=2, out=buffer)
        del gradients, buffer

    for device, padded in (("cpu", [80, -80]), ("cuda", [])):
        assert changes(recorded(act, device))[3:-3] == padded


def test_whoever_asks_for_a_value_gets_one():
    asked = []
    recorded(lambda _: asked.extend([torch.zeros(()).item(), torch.zeros((), dtype=torch.int64).item()]))
    recorded(lambda _: asked.append(bool(torch.zeros(2).any())))
    assert asked == [1.0, 1, True]


def test_noted_tensors_are_counted_once():
    def act(recorder):
        tensor = torch.empty(10)
        assert recorder.track_and_get_blocks([tensor, tensor[1:]]) == recorder.track_and_get_blocks([tensor])

    recorder = recorded(act)
    assert [type(event) for event in recorder.events] == [AllocateEvent, FreeEvent]

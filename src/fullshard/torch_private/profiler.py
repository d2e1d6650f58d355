"""Private names of torch's profiler and of the CUDA allocator's history."""

from collections.abc import Iterator
from typing import Any

from torch.autograd.profiler import profile

from fullshard.torch_private.names import PrivateName, require

_RESULT = "torch._C._autograd._ProfilerResult"
_EVENT = "torch._C._autograd._KinetoEvent"
_MEMORY = "torch.cuda.memory"

NAMES = require(
    PrivateName(f"{_RESULT}.events", "reads the events of a profile"),
    PrivateName(f"{_RESULT}.experimental_event_tree", "reads the allocations of a profile"),
    *(
        PrivateName(f"{_EVENT}.{name}", "reads the events of a profile")
        for name in (
            *(
                "name",
                "start_ns",
                "duration_ns",
                "start_thread_id",
                "correlation_id",
                "linked_correlation_id",
            ),
            *("device_type", "is_async", "is_user_annotation"),
        )
    ),
)


def profile_events(profiler: profile) -> Iterator[Any]:
    """Yields the events of a profile that has ended, with times in ns."""
    assert profiler.kineto_results is not None, "the profiler has ended"
    return iter(profiler.kineto_results.events())


def profile_event_tree(profiler: profile) -> list[Any]:
    """Returns the outermost events of a profile that has ended; those inside are their `children`."""
    assert profiler.kineto_results is not None, "the profiler has ended"
    return profiler.kineto_results.experimental_event_tree()

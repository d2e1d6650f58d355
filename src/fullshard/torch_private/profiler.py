"""Private names of torch's profiler."""

from typing import Any

from torch.autograd.profiler import profile

from fullshard.torch_private.names import PrivateName, require

_RESULT = "torch._C._autograd._ProfilerResult"

NAMES = require(
    PrivateName(f"{_RESULT}.experimental_event_tree", "reads the allocations of a profile"),
)


def profile_event_tree(profiler: profile) -> list[Any]:
    """Returns the outermost events of a profile that has ended; those inside are their `children`."""
    assert profiler.kineto_results is not None, "the profiler has ended"
    return profiler.kineto_results.experimental_event_tree()

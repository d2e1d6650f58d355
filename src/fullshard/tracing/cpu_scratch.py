"""Bytes that a CPU kernel allocates besides its results, measured by running the kernel once.

oneDNN computes matmuls in half precision from copies of blocks of its operands. It chooses the blocks by
shape, layout, threads and the instructions of the processor, and torch does not report their bytes. Attention
has buffers for blocks of scores, and copies of its operands. So an operation with the same shapes runs once
on zeros, and its allocations are read from torch's profiler, which takes less than a millisecond for small
shapes. Each distinct operation runs once per process, on one thread. With more threads, both allocate more.
"""

import os
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fullshard.torch_private.fake_tensors import disable_current_modes
from fullshard.torch_private.profiler import is_profiling
from fullshard.torch_private.tensors import tree_map_only

_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_MOST_ROWS = 1024  # of a matrix that is multiplied here; oneDNN's blocks hardly grow beyond
_MOST_BATCH = 2  # matrices of a batched matmul, which share their blocks
_MOST_SCORES = 1 << 24  # scores of an attention that is computed here


class _Layout(NamedTuple):
    """Shape, strides and dtype of a tensor, on which the allocations of a kernel depend."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> Tensor:
        """Returns a tensor of zeros with this layout."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return torch.zeros(last + 1, dtype=self.dtype).as_strided(self.shape, self.stride)

    def limited(self) -> "_Layout":
        """Returns the layout of a dense matrix, or of a batch, of at most `_MOST_ROWS` rows and columns."""
        batch = [min(size, _MOST_BATCH) for size in self.shape[:-2]]
        shape = (*batch, *(min(size, _MOST_ROWS) for size in self.shape[-2:]))
        inner_first = sorted(range(len(shape)), key=lambda dim: (self.stride[dim], -dim))
        stride, step = [0] * len(shape), 1
        for dim in inner_first:
            if self.stride[dim] or shape[dim] == 1:  # else it is expanded
                stride[dim], step = step, step * shape[dim]
        return _Layout(shape, tuple(stride), self.dtype)


def cpu_scratch_bytes(func: Any, args: tuple[Any, ...], *, name: str, kwargs: dict[str, Any]) -> int:
    """Returns the bytes that a matmul in half precision or an attention allocates and frees at its end.

    name: of the operation, without its namespace

    It is at least 1, because traces of two microbatch sizes must have the same changes. It is 0 for other
    operations, for attention over many positions, and while torch's profiler runs.
    """
    is_matmul = name in _MATMULS and args[0].dtype in (torch.bfloat16, torch.float16)
    if not is_matmul and not name.startswith(_ATTENTION) or is_profiling():
        return 0
    layouts = tree_map_only(Tensor, lambda one: _Layout(tuple(one.shape), one.stride(), one.dtype), args)
    if is_matmul:
        layouts = tuple(one.limited() if isinstance(one, _Layout) else one for one in layouts)
    elif _score_count(layouts, is_backward=name.endswith("backward")) > _MOST_SCORES:
        return 0
    return max(1, _measure_scratch_bytes(func, layouts, named=tuple(sorted(kwargs.items()))))


def _score_count(layouts: tuple[Any, ...], *, is_backward: bool) -> int:
    query, key = layouts[is_backward : is_backward + 2]
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


@cache
def _measure_scratch_bytes(func: Any, layouts: tuple[Any, ...], *, named: tuple[tuple[str, Any], ...]) -> int:
    # Kineto prints each start on stderr. It reads this variable once, before the first start in a process.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    threads = torch.get_num_threads()
    with disable_current_modes(), torch.no_grad():
        tensors = [one.zeros() if isinstance(one, _Layout) else one for one in layouts]
        torch.set_num_threads(1)
        try:
            with profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiler:
                result = func(*tensors, **dict(named))
        finally:
            torch.set_num_threads(threads)
    assert profiler is not None, "it is enabled"
    assert profiler.kineto_results is not None, "it has ended"
    events: list[Any] = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    del result  # it was alive until here, so that its release is no event
    return max(accumulate(changes), default=0) - sum(changes)

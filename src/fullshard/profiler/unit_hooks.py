"""Records what FSDP2 does for each unit, by wrapping the methods of its parameter groups.

On CUDA, the collectives are wrapped, too; those that run on gloo have ranges of their own. The wrapped names
with a leading underscore are private ones of FSDP2; a group that lacks a method keeps its others recorded.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.ranges import TimedRange
from fullshard.profiler.recorded_step import COPY_OUT, ENDS, FINISH, STARTS, UNSHARD
from fullshard.profiler.step_recorder import StepRecorder

_METHODS = (*STARTS, *ENDS, UNSHARD, COPY_OUT, FINISH)
_COMMUNICATION = {"_all_gather_comm": "all_gather", "_reduce_scatter_comm": "reduce_scatter"}
_REDUCE_SCATTER, _ALL_REDUCE, _POST_BACKWARD = "reduce_scatter", "all_reduce", "post_backward"


@contextmanager
def record_units(model: nn.Module, recorder: StepRecorder) -> Generator[None]:
    """Context in which `recorder` gets the methods of all units of `model`, and a device's collectives."""
    undo: list[Callable[[], object]] = []
    try:
        for name, group in _parameter_groups(model):
            # First, so that the all-reduce lies within the range of the method.
            if not recorder.clock.on_device and _has_replicas(group):
                undo.append(_wrap_replica_sums(group, recorder, unit=name))
            for method in _METHODS:
                if hasattr(group, method):
                    undo.append(_wrap(group, method, recorder=recorder, unit=name))
            for attribute, kind in _COMMUNICATION.items() if recorder.clock.on_device else ():
                if (inner := getattr(group, attribute, None)) is not None:
                    setattr(group, attribute, _TimedCollective(inner, kind))
                    undo.append(_restorer(group, attribute, before=inner))
        yield
    finally:
        for one in reversed(undo):
            one()


class _TimedCollective:
    """A collective of FSDP2 whose calls are ranges, on the stream on which it runs."""

    def __init__(self, inner: Any, kind: str) -> None:
        self._inner, self._kind = inner, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # signature: the wrapped collective's
        with TimedRange(self._kind):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _parameter_groups(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns (name of the unit, parameter group) for all units. The names are those of the plan."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    found: dict[int, tuple[str, Any]] = {}
    for module in names:
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            several = getattr(state, "_fsdp_param_groups", None)
            unit = "+".join(names[one] for one in state._modules) or "(root)"
            for group in several if several is not None else [state._fsdp_param_group]:
                if group is not None:
                    found[id(group)] = (unit, group)
    return list(found.values())


def _wrap(group: Any, method: str, *, recorder: StepRecorder, unit: str) -> Callable[[], object]:
    """Wraps a method of `group` on the instance. Returns a function that undoes it."""
    inner = getattr(group, method)
    own = vars(group).get(method)

    @wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:  # signature: the wrapped method's
        outer, recorder.unit = recorder.unit, unit
        begin = recorder.mark()
        try:
            return inner(*args, **kwargs)
        finally:
            recorder.add(method, unit, begin=begin)
            recorder.unit = outer

    setattr(group, method, timed)
    return _restorer(group, method, before=own)


def _wrap_replica_sums(group: Any, recorder: StepRecorder, *, unit: str) -> Callable[[], object]:
    """Records the all-reduce over replicas, which follows the reduce-scatter within `post_backward`."""
    inner, own = getattr(group, _POST_BACKWARD), vars(group).get(_POST_BACKWARD)

    @wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:  # signature: the wrapped method's
        begin = recorder.mark()
        result = inner(*args, **kwargs)
        scattered = recorder.last_range(_REDUCE_SCATTER, after=begin)
        if scattered is not None and group.all_reduce_grads:
            recorder.add(_ALL_REDUCE, unit, begin=scattered.end)
        return result

    setattr(group, _POST_BACKWARD, timed)
    return _restorer(group, _POST_BACKWARD, before=own)


def _has_replicas(group: Any) -> bool:
    """Returns whether FSDP2 sums the gradients of sharded units over replicas."""
    kind = group.mesh_info
    return hasattr(kind, "replicate_process_group") and hasattr(kind, "shard_process_group")


def _restorer(group: Any, name: str, *, before: Any) -> Callable[[], object]:
    """Returns a function that sets an attribute of the instance back to `before`; None for none."""
    return (lambda: delattr(group, name)) if before is None else (lambda: setattr(group, name, before))

"""Records what FSDP2 does for each unit, by wrapping the methods of its parameter groups.

On CUDA, the collectives are wrapped, too; those that run on gloo have ranges of their own. A group that
lacks a method keeps its others recorded.

The methods in which a rank waits for others are wrapped for as long as steps are recorded, because its own
seconds leave out waiting. All others are wrapped for detailed steps alone; other steps do not pay for them.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.ranges import TimedRange
from fullshard.profiler.recorded_step import COPY_OUT, DEVICE_WAITS, ENDS, FINISH, STARTS, UNSHARD
from fullshard.profiler.step_recorder import StepRecorder
from fullshard.torch_private.fsdp import parameter_groups, unit_modules

_METHODS = (*STARTS, *ENDS, UNSHARD, COPY_OUT, FINISH)
_COMMUNICATION = {"_all_gather_comm": "all_gather", "_reduce_scatter_comm": "reduce_scatter"}
_REDUCE_SCATTER, _ALL_REDUCE, _POST_BACKWARD = "reduce_scatter", "all_reduce", "post_backward"


class UnitHooks:
    """The wrapped methods of all units of a model."""

    def __init__(self, model: nn.Module, recorder: StepRecorder) -> None:
        self._groups, self._recorder = _parameter_groups(model), recorder
        self._waits: list[Callable[[], object]] = []  # functions that restore a method
        self._details: list[Callable[[], object]] = []
        on_device = recorder.clock.on_device
        self._waiting_methods = DEVICE_WAITS if on_device else ()
        for name, group in self._groups:
            if not on_device and _has_replicas(group):
                self._waits.append(_wrap_replica_sums(group, recorder, unit=name))
            self._waits += self._wrap_methods(group, self._waiting_methods, unit=name)

    def set_detailed(self, is_detailed: bool) -> None:
        """Lets the next steps have ranges of all methods, or only of those that wait."""
        if is_detailed and not self._details:
            methods = [method for method in _METHODS if method not in self._waiting_methods]
            for name, group in self._groups:
                # Around the sum over replicas, which lies within the range of its method.
                self._details += self._wrap_methods(group, methods, unit=name)
                for attribute, kind in _COMMUNICATION.items() if self._recorder.clock.on_device else ():
                    if (inner := getattr(group, attribute, None)) is not None:
                        setattr(group, attribute, _TimedCollective(inner, kind))
                        self._details.append(_restorer(group, attribute, before=inner))
        elif not is_detailed:
            _undo(self._details)

    def restore(self) -> None:
        """Restores all methods."""
        _undo(self._details)
        _undo(self._waits)

    def _wrap_methods(self, group: Any, methods: Sequence[str], *, unit: str) -> list[Callable[[], object]]:
        return [
            _wrap(group, method, recorder=self._recorder, unit=unit)
            for method in methods
            if hasattr(group, method)
        ]


@contextmanager
def record_units(model: nn.Module, recorder: StepRecorder) -> Generator[UnitHooks]:
    """Context in which `recorder` gets the methods of all units of `model`, and a device's collectives.

    Steps are detailed until `UnitHooks.set_detailed`.
    """
    hooks = UnitHooks(model, recorder)
    try:
        hooks.set_detailed(True)
        yield hooks
    finally:
        hooks.restore()


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
            unit = "+".join(names[one] for one in unit_modules(module)) or "(root)"
            found |= {id(group): (unit, group) for group in parameter_groups(module)}
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
        if group.all_reduce_grads:  # over one rank there is no reduce-scatter, and its copies count too
            recorder.add(_ALL_REDUCE, unit, begin=begin if scattered is None else scattered.end)
        return result

    setattr(group, _POST_BACKWARD, timed)
    return _restorer(group, _POST_BACKWARD, before=own)


def _has_replicas(group: Any) -> bool:
    """Returns whether FSDP2 sums the gradients of a unit over replicas."""
    kind = group.mesh_info
    return hasattr(kind, "replicate_process_group") and hasattr(kind, "shard_process_group")


def _undo(restorers: list[Callable[[], object]]) -> None:
    while restorers:
        restorers.pop()()


def _restorer(group: Any, name: str, *, before: Any) -> Callable[[], object]:
    """Returns a function that sets an attribute of the instance back to `before`; None for none."""
    return (lambda: delattr(group, name)) if before is None else (lambda: setattr(group, name, before))

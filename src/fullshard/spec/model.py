"""ModelSpec: the planner's description of a model. It has shapes and bytes, but no weights and no torch."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, Self

from fullshard.errors import PlanError
from fullshard.spec.plan import DeviceType, Dtype, Precision
from fullshard.spec.run import RecomputeSection, UnitOverride
from fullshard.spec.value import FrozenModel

Event = Literal[
    "start",
    "pre_forward",
    "post_forward",
    "end_forward",
    "pre_backward",
    "post_backward",
    "end_backward",
]


class ParamSpec(FrozenModel):
    """One parameter.

    name: its first name
    shape: its whole (unsharded) shape
    itemsize: bytes per element in the module. Trained parameters are nevertheless sharded in the plan's
        master dtype and computed with in its param dtype.
    aliases: the other names of a tied parameter
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    is_floating: bool = True
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


class UnitSpec(FrozenModel):
    """One communication unit: parameters that are gathered, used and freed together.

    position: its index among the units by registration of their modules, the root first
    kept: stays gathered between forward and backward: the root, and the unit whose backward comes right after
        its forward
    """

    name: str
    position: int
    parameters: tuple[ParamSpec, ...]
    is_block: bool = False
    kept: bool = False
    override: UnitOverride | None = None

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


class Line(NamedTuple):
    """A linear function of the microbatch: fixed + per_sequence * microbatch. Either term may be negative."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def at(self, microbatch: int) -> float:
        return self.fixed + self.per_sequence * microbatch


class Moment(NamedTuple):
    """Bytes of live tensors that the model's own computation allocated, by origin.

    activations: the units' forward passes
    loss: computation between the last unit's forward and the first unit's backward
    backward: backward passes, including recomputation
    gradients: whole gradients of parameters, as autograd produces them
    """

    activations: Line = Line()
    loss: Line = Line()
    backward: Line = Line()
    gradients: Line = Line()


class Kernel(FrozenModel):
    """One kind of launch: the same operation on the same shapes.

    flops: FLOP of one launch. `attention` counts only pairs of positions that are computed: about half of all
        if it is `causal`.
    bytes: bytes that one launch reads and writes in device memory
    """

    kind: Literal["matmul", "attention", "attention_backward", "elementwise"]
    dtype: Dtype
    flops: Line = Line()
    bytes: Line = Line()
    causal: bool = False


class Launches(NamedTuple):
    """A number (`times`) of launches of `ModelSpec.kernels[kernel]`."""

    kernel: int
    times: int


class Phase(FrozenModel):
    """The computation of a microbatch between two points at which FSDP2 acts.

    event: the point of unit `unit` that opens the phase
    unit: an index; -1 for the run itself
    peaks: moments of which one is the highest of the phase, for any microbatch
    end: live tensors at its end. Gradients that a `post_backward` passes to FSDP2 are already excluded from
        the phase that it opens.
    work: launches in eager mode
    fused: launches if runs of elementwise operations are one kernel, as after compilation
    out: storages whose copies to the host begin when the phase's unit ends its forward
    back: storages whose copies from the host begin when its backward begins, beside later launches
    waits: compute first waits for the copies that began earlier
    """

    event: Event
    unit: int = -1
    peaks: tuple[Moment, ...]
    end: Moment
    work: tuple[Launches, ...] = ()
    fused: tuple[Launches, ...] = ()
    out: tuple[Line, ...] = ()
    back: tuple[Line, ...] = ()
    waits: bool = False


class Repeat(FrozenModel):
    """Units that the trace contains once, but the model `times` times.

    The units `first` to `first + units - 1` of the trace form one period, which occurs `times` in a row in
    the model. The trace contains at least one identical period before them and one after.
    """

    first: int
    units: int
    times: int


class Trace(FrozenModel):
    """One microbatch, forward and backward, under one recompute setting.

    microbatch: the only microbatch size that it is valid for; None for any
    phases: phases of the model, without the units that `repeats` leaves out; `Phase.unit` counts the trace's
        units
    accumulating: phases on top of whole gradients of earlier microbatches, if those are accumulated in place
        (accumulation without sync, gradients computed in the dtype that they are reduced in)
    """

    recompute: RecomputeSection
    microbatch: int | None = None
    batch_bytes: Line
    phases: tuple[Phase, ...]
    accumulating: tuple[Phase, ...] = ()
    repeats: tuple[Repeat, ...] = ()

    def holds_for(self, recompute: RecomputeSection, microbatch: int) -> bool:
        asked, own = recompute, self.recompute
        same = asked.mode == own.mode and (
            asked.period == own.period
            and (asked.mode != "offload" or asked.offload_min_fraction == own.offload_min_fraction)
            and (asked.mode != "selective" or asked.save_matmuls == own.save_matmuls)
        )
        return same and self.microbatch in (None, microbatch)


class ModelSpec(FrozenModel):
    """A model: its units in order of use, its buffers, and the allocations and kernels of a microbatch.

    device_type: the device whose kernels the traces contain
    scalars: number of parameters without a dimension to shard; they are whole on every rank and in no unit
    flops_per_token: see `fullshard.spec.measurement.model_flops_per_token`. It is counted from the traced
        matmuls, so a mixture of experts counts only the experts that a token reaches.
    active_numel: number of parameters that a token is multiplied with
    """

    name: str
    device_type: DeviceType = "cpu"
    sequence_length: int
    precision: Precision
    units: tuple[UnitSpec, ...]
    scalars: int = 0
    buffer_bytes: int
    kernels: tuple[Kernel, ...] = ()
    traces: tuple[Trace, ...]
    flops_per_token: float | None = None
    active_numel: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters; a tied one counts once."""
        return sum(unit.numel for unit in self.units) + self.scalars

    @cached_property
    def kept(self) -> dict[Hashable, object]:
        """Cache of values derived from this spec. It is not part of the spec's value."""
        return {}

    @cached_property
    def unit_kinds(self) -> tuple[int, ...]:
        """For each unit, the index of the first unit with the same shapes, override and `kept`."""
        first: dict[Hashable, int] = {}
        kinds: list[int] = []
        for index, unit in enumerate(self.units):
            shapes = tuple((p.shape, p.itemsize, p.is_floating, p.requires_grad) for p in unit.parameters)
            override = None if unit.override is None else unit.override.model_copy(update={"match": ""})
            kinds.append(first.setdefault((shapes, override, unit.kept), index))
        return tuple(kinds)

    def trace(self, recompute: RecomputeSection, microbatch: int) -> Trace:
        """Returns the trace for these settings, or for any microbatch. Raises PlanError if there is none."""
        fitting = [trace for trace in self.traces if trace.holds_for(recompute, microbatch)]
        if not fitting:
            raise PlanError(
                f"the spec of {self.name} was not traced under these settings.",
                got=f"recompute {recompute.mode}, microbatch {microbatch}",
                why=f"it knows {_settings(self.traces)}, and what a microbatch allocates follows from them",
                fix="describe(model, plan) with this plan",
            )
        return min(fitting, key=lambda trace: trace.microbatch is None)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a spec that `save` wrote. Raises SpecError for any other file."""
        return cls.read_json(path, what="a saved model spec")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json() + "\n", encoding="utf-8")


def _settings(traces: Sequence[Trace]) -> str:
    return "; ".join(
        f"recompute {trace.recompute.mode}"
        + (f", microbatch {trace.microbatch}" if trace.microbatch is not None else "")
        for trace in traces
    )

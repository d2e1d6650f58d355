"""ModelSpec: what the planner knows of a model. Shapes and bytes; no weights, no torch."""

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
    """One parameter: its first name, its whole shape, and the other names that it is reached by (tied).

    `itemsize`: bytes of an element as the module holds it; trained ones are sharded in the plan's master
    dtype and computed with in its param dtype, whatever this says.
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
    """One communication unit: the parameters that are gathered together, used, and freed together.

    `kept`: the root, and the unit whose backward comes right after its forward; it stays gathered between.
    `position`: its place among the units by registration of their modules, the root first.
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
    """A figure that grows with the microbatch: fixed + per_sequence * microbatch. Negative parts are fine."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def at(self, microbatch: int) -> float:
        return self.fixed + self.per_sequence * microbatch


class Moment(NamedTuple):
    """Bytes of live tensors that the model's own computation made, by what made them.

    `activations`: the units' forward passes. `loss`: what runs between the last unit's forward and the first
    unit's backward. `backward`: backward passes, with what they compute again. `gradients`: whole gradients
    of parameters, as autograd leaves them.
    """

    activations: Line = Line()
    loss: Line = Line()
    backward: Line = Line()
    gradients: Line = Line()


class Kernel(FrozenModel):
    """One kind of launch: the same operation on the same shapes.

    `flops`, `bytes` (read and written in device memory) are of one launch. `attention` counts
    the FLOP of the pairs of positions that are computed: about half of all where it is `causal`.
    """

    kind: Literal["matmul", "attention", "attention_backward", "elementwise"]
    dtype: Dtype
    flops: Line = Line()
    bytes: Line = Line()
    causal: bool = False


class Launches(NamedTuple):
    """`times` launches of `ModelSpec.kernels[kernel]`."""

    kernel: int
    times: int


class Phase(FrozenModel):
    """What a microbatch computes from one point at which the engine acts to the next.

    `event` of unit `unit` (an index; -1 for the run itself) opens the phase. `peaks` are the moments of which
    one is the highest in it, whatever the microbatch; `end` is what lives at its end. Gradients that a
    `post_backward` hands to the engine are gone from the phase that it opens. `work`: what it launches,
    eager;
    `fused`: what it launches where runs of elementwise operations are one kernel, as the compiler makes them.
    `out`, `back`: storages whose copies to the host, and from it, begin as its forward ends or its backward
    begins, beside what is launched later. `waits`: before that, computing waits for those that began earlier.
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
    """Units that the trace shows once, and that the model has `times` times.

    The units `first` to `first + units - 1` of the trace, one period, stand there `times` in a row in the
    model. At least one period alike stands before them in the trace, and one behind.
    """

    first: int
    units: int
    times: int


class Trace(FrozenModel):
    """One microbatch, forward and backward, under one recompute setting.

    `phases` are those of the model without what `repeats` leaves out; `Phase.unit` counts among its units.
    `microbatch`: the only one that it holds for; None: any.
    `accumulating`: the same on top of whole gradients of earlier microbatches, where these are added to in
    place (accumulation without sync, gradients computed in the dtype that they are reduced in).
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
    """A model: its units in order of use, its buffers, and what a microbatch of it allocates and computes.

    `kernels_for`: the device whose kernels the traces show. `flops_per_token`: see
    `fullshard.spec.measurement.model_flops_per_token`; from the traced matmuls, so a mixture of experts
    counts those that a token reaches. `active_numel`: parameters that a token is multiplied with.
    `scalars`: parameters without a dimension to shard, whole on every rank, and in no unit.
    """

    name: str
    kernels_for: DeviceType = "cpu"
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
        """Parameters; a tied one counts once."""
        return sum(unit.numel for unit in self.units) + self.scalars

    @cached_property
    def kept(self) -> dict[Hashable, object]:
        """What was worked out from this spec, for who asks again. No part of the value."""
        return {}

    @cached_property
    def unit_kinds(self) -> tuple[int, ...]:
        """For each unit the index of the first that is sharded alike: the same shapes, override and
        keeping.
        """
        first: dict[Hashable, int] = {}
        kinds: list[int] = []
        for index, unit in enumerate(self.units):
            shapes = tuple((p.shape, p.itemsize, p.is_floating, p.requires_grad) for p in unit.parameters)
            override = None if unit.override is None else unit.override.model_copy(update={"match": ""})
            kinds.append(first.setdefault((shapes, override, unit.kept), index))
        return tuple(kinds)

    def trace(self, recompute: RecomputeSection, microbatch: int) -> Trace:
        """The trace for these settings. Raises PlanError if there is none.

        One that was made for this very microbatch goes before one for any.
        """
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
        """Reads what `save` wrote. Raises SpecError for anything else."""
        return cls.read_json(path, what="a saved model spec")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json() + "\n", encoding="utf-8")


def _settings(traces: Sequence[Trace]) -> str:
    return "; ".join(
        f"recompute {trace.recompute.mode}"
        + (f", microbatch {trace.microbatch}" if trace.microbatch is not None else "")
        for trace in traces
    )

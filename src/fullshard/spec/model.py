"""ModelSpec: what the planner knows of a model. Shapes and bytes; no weights, no torch."""

from math import prod
from typing import Literal

from fullshard.spec.plan import Precision
from fullshard.spec.run import RecomputeSection, UnitOverride
from fullshard.spec.value import Value

Event = Literal[
    "start",
    "pre_forward",
    "post_forward",
    "end_forward",
    "pre_backward",
    "post_backward",
    "end_backward",
]


class ParamSpec(Value):
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


class UnitSpec(Value):
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


class LiveBytes(Value):
    """Bytes of live tensors that the model's own computation made, by what made them.

    `activations`: the units' forward passes. `loss`: what runs between the last unit's forward and the first
    unit's backward. `backward`: backward passes, with what they compute again. `gradients`: whole gradients
    of parameters, as autograd leaves them.
    """

    activations: int = 0
    loss: int = 0
    backward: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.loss + self.backward + self.gradients


class Phase(Value):
    """What a microbatch computes from one point at which the engine acts to the next.

    `event` of unit `unit` (an index; -1 for the run itself) opens the phase. `peak` is what was alive at the
    highest moment in it, `end` at its end. Gradients that a `post_backward` hands to the engine are gone from
    the phase that it opens.
    """

    event: Event
    unit: int = -1
    peak: LiveBytes
    end: LiveBytes


class Trace(Value):
    """One microbatch, forward and backward, and the settings that it was traced with.

    `accumulating`: the same on top of whole gradients of earlier microbatches, where these are added to in
    place (accumulation without sync, gradients computed in the dtype that they are reduced in).
    """

    microbatch: int
    sequence_length: int
    precision: Precision
    recompute: RecomputeSection
    batch_bytes: int
    phases: tuple[Phase, ...]
    accumulating: tuple[Phase, ...] = ()

    def saved_bytes(self, unit: int) -> int:
        """Bytes of activations that the forward of `unit` leaves behind for backward."""
        before = saved = 0
        for i, phase in enumerate(self.phases):
            if phase.unit == unit and phase.event == "pre_forward":
                before = self.phases[i - 1].end.activations
            if phase.unit == unit and phase.event == "post_forward":
                saved = self.phases[i - 1].end.activations - before
                break
        return saved


class ModelSpec(Value):
    """A model: its units in order of use, its buffers, and what a microbatch of it allocates."""

    name: str
    units: tuple[UnitSpec, ...]
    buffer_bytes: int
    trace: Trace

    @property
    def numel(self) -> int:
        """Parameters; a tied one counts once."""
        return sum(unit.numel for unit in self.units)

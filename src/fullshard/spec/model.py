"""ModelSpec: the planner's description of a model by shapes, bytes and kernels, without weights and torch."""

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast

from fullshard.errors import PlanError
from fullshard.quantities import format_count
from fullshard.spec.plan import DeviceType, Dtype, Plan, Precision
from fullshard.spec.run import UnitOverride
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.spec.value import Count, FrozenModel, NonNegativeFloat, NonNegativeInt, Parts


class Fp8MatrixGroup(FrozenModel):
    """Matrices of a model that are multiplied in fp8, or in bf16 for one reason.

    reason: why they stay in bf16; empty if they are in fp8
    matrices: number of parameters of two or more dimensions
    numel: number of their elements
    """

    reason: str = ""
    matrices: int
    numel: int


def fp8_summary_text(shares: Sequence[Fp8MatrixGroup]) -> str:
    """Returns `14 of 16 matrices (87 % of their 1.2 M elements); in bf16: 2 embedding or head`."""
    inside = [share for share in shares if not share.reason]
    matrices, numel = sum(share.matrices for share in shares), sum(share.numel for share in shares)
    part = sum(share.numel for share in inside) / max(numel, 1)
    text = (
        f"{sum(share.matrices for share in inside)} of {matrices} matrices "
        f"({100 * part:.0f} % of their {format_count(numel)} elements)"
    )
    others = ", ".join(f"{share.matrices} {share.reason}" for share in shares if share.reason)
    return f"{text}; in bf16: {others}" if others else text


Event = Literal[
    "start", "pre_forward", "post_forward", "end_forward", "pre_backward", "post_backward", "end_backward"
]


ComputeKind = Literal["matmul", "attention", "attention_backward", "elementwise"]
KernelKind = ComputeKind | Literal["all_gather", "reduce_scatter", "all_reduce", "row_exchange"]
SharedAxis = Literal["context", "tensor", "expert"]
"""The ranks of a collective in the middle of computation: those that share sequences, matmuls or experts."""


class ParamSpec(FrozenModel):
    """The name, shape and dtype size of one parameter of a model.

    shape: unsharded shape
    itemsize: bytes per element in the module. Under a plan, shards of trained parameters have its master
        dtype, and computation its param dtype.
    is_gathered_in_fp8: True if it is gathered in fp8, one byte per element
    is_hidden_matrix: True if Muon or SOAP updates it by default: see `parallel.hidden_matrices`
    aliases: other names of a tied parameter
    divided_dim: the dim that ranks divide which share matmuls or experts; None if each of them has all of it
    packed_columns: columns of a weight that is packed, whose last dim counts bytes; else None
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    is_floating: bool = True
    requires_grad: bool = True
    is_gathered_in_fp8: bool = False
    is_hidden_matrix: bool = False
    aliases: tuple[str, ...] = ()
    divided_dim: int | None = None
    packed_columns: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements; of a packed weight, those of the matrix."""
        return prod(self.shape if self.packed_columns is None else (*self.shape[:-1], self.packed_columns))

    def tensor_parallel_shape(self, ranks: int) -> tuple[int, ...]:
        """Returns the shape of the largest part if `ranks` ranks share matmuls; that of the first rank."""
        divided = self.divided_dim
        return tuple(-(-size // ranks) if dim == divided else size for dim, size in enumerate(self.shape))


class UnitSpec(FrozenModel):
    """A communication unit: parameters that are gathered, used and freed together.

    position: index of the unit in the order in which modules are registered, the root first
    is_block: True for one of the model's repeated blocks
    is_embedding: True if it only looks up rows, so that its backward does not need its parameters
    has_experts: True if its parameters are experts of a mixture, whose dim 0 is the expert
    kept: True if the unit stays gathered between forward and backward: the root, and the unit whose backward
        comes right after its forward
    """

    name: str
    position: int
    parameters: tuple[ParamSpec, ...]
    is_block: bool = False
    kept: bool = False
    override: UnitOverride | None = None
    is_embedding: bool = False
    has_experts: bool = False

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


class LinearInMicrobatch(NamedTuple):
    """A linear function of the microbatch: fixed + per_sequence * microbatch. Either term may be negative."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def value_at(self, microbatch: int) -> float:
        return self.fixed + self.per_sequence * microbatch


class LiveTensorBytes(NamedTuple):
    """Bytes of live tensors at one moment of a microbatch, by the computation that allocated them.

    activations: tensors from the units' forward passes
    loss: tensors from between the last unit's forward and the first unit's backward
    backward: tensors from backward passes, including recomputation
    gradients: whole gradients of parameters, as autograd produces them
    """

    activations: LinearInMicrobatch = LinearInMicrobatch()
    loss: LinearInMicrobatch = LinearInMicrobatch()
    backward: LinearInMicrobatch = LinearInMicrobatch()
    gradients: LinearInMicrobatch = LinearInMicrobatch()


class Kernel(FrozenModel):
    """A kind of kernel launch: one operation on fixed shapes.

    kind: `all_gather` and later: collectives in the middle of computation
    flops: FLOP of one launch. `attention` counts only pairs of positions that are computed: about half of all
        if it is `causal`.
    bytes: bytes that one launch reads and writes in device memory; of a collective, those of the tensor of
        all ranks, or for `row_exchange`, of one rank
    backward: True if it computes a gradient during forward, as a chunked loss does
    unaligned: True for a matmul in half precision with a matrix whose rows are no multiple of 16 bytes
    axis: the ranks of a collective; None for other kernels
    head_dim: width of the queries of one head, elements; 0 for kernels other than attention
    by_flash: True for attention that runs by flash attention also where torch prefers another kernel
    pieces: number of launches among which the FLOP and bytes of one are divided: the matrices of a grouped
        matmul, where the device multiplies them in turn, and on the CPU chunks of the loss and documents
    rows: rows that each matrix of a grouped matmul multiplies, on average; 0 for other kernels
    received: True if it works on rows that ranks sent to this rank's experts, or is that exchange
    waits: True if the host waits for its result
    """

    kind: KernelKind
    dtype: Dtype | Literal["fp8"]
    flops: LinearInMicrobatch = LinearInMicrobatch()
    bytes: LinearInMicrobatch = LinearInMicrobatch()
    causal: bool = False
    backward: bool = False
    unaligned: bool = False
    axis: SharedAxis | None = None
    head_dim: NonNegativeInt = 0
    by_flash: bool = False
    pieces: LinearInMicrobatch = LinearInMicrobatch(1.0)
    rows: LinearInMicrobatch = LinearInMicrobatch()
    received: bool = False
    waits: bool = False


class KernelIndexAndCount(NamedTuple):
    """The number of launches (`times`) of the kernel with index `kernel` in `ModelSpec.kernels`."""

    kernel: int
    times: int


class TracePhase(FrozenModel):
    """The computation of a microbatch between two hooks of FSDP2.

    event: the hook that opens the phase
    unit: index of the hook's unit; -1 for the whole model
    peaks: moments of the phase; for any microbatch, one of them is the moment with the most bytes
    end: live tensors at the end of the phase. A phase that opens with `post_backward` excludes the gradients
        that the hook passes to FSDP2.
    work: launches; in a compiled block, consecutive elementwise operations are one launch
    out: storages whose copies to the host start when the unit's forward ends
    back: storages whose copies from the host start when the unit's backward starts, beside later launches
    waits: True if compute first waits for the copies that started earlier
    """

    event: Event
    unit: int = -1
    peaks: tuple[LiveTensorBytes, ...]
    end: LiveTensorBytes
    work: tuple[KernelIndexAndCount, ...] = ()
    out: tuple[LinearInMicrobatch, ...] = ()
    back: tuple[LinearInMicrobatch, ...] = ()
    waits: bool = False


class RepeatedUnits(FrozenModel):
    """A period of units that the trace contains once, and the model `times` times in a row.

    The period consists of the units `first` to `first + units - 1` of the trace, which contains a period
    before them, and at least one identical period after.

    blocks: number of blocks in the period
    """

    first: Count
    units: Count
    times: Parts
    blocks: NonNegativeInt = 1


class MicrobatchTrace(FrozenModel):
    """The phases of one microbatch, forward and backward, under one recompute setting, eager or compiled.

    compiled: whether `torch.compile` runs the blocks: what they save, recompute and launch follows from it
    microbatch: the only microbatch size for which the trace is valid; None if it is valid for any
    phases: phases of the trace's units, which `TracePhase.unit` counts; `repeats` lists units to repeat
    accumulating: phases of a microbatch that adds to whole gradients of earlier microbatches in place
        (accumulation without sync, gradients computed in the dtype that they are reduced in)
    blocks: number of the model's blocks
    border: index in `repeats` of periods that recompute, before periods of the same blocks that do not. It
        makes the trace valid for all `recomputed_block_counts`. None if there is no such border.
    """

    recompute: RecomputeSection
    compiled: bool = False
    microbatch: int | None = None
    batch_bytes: LinearInMicrobatch
    phases: tuple[TracePhase, ...]
    accumulating: tuple[TracePhase, ...] = ()
    repeats: tuple[RepeatedUnits, ...] = ()
    blocks: NonNegativeInt = 0
    border: NonNegativeInt | None = None

    def recomputed_block_counts(self) -> range:
        """Returns the values of `recompute.blocks` that the trace is valid for; none if that is unset."""
        own = self.recompute.blocks
        if own is None:
            return range(0)
        if self.border is None:
            return range(own, own + 1)
        some, others = self.repeats[self.border : self.border + 2]
        most = own + (others.times - 1) * some.blocks
        return range(own - (some.times - 1) * some.blocks, most + 1, some.blocks)

    def with_recomputed_blocks(self, blocks: int) -> Self:
        """Returns the trace if the first `blocks` blocks recompute: one of `recomputed_block_counts`."""
        own = self.recompute.blocks
        if own is None or blocks == own:
            return self
        assert self.border is not None, "other traces stand for themselves"
        some, others = self.repeats[self.border : self.border + 2]
        more = (blocks - own) // some.blocks
        moved = (
            some.model_copy(update={"times": some.times + more}),
            others.model_copy(update={"times": others.times - more}),
        )
        repeats = (*self.repeats[: self.border], *moved, *self.repeats[self.border + 2 :])
        section = self.recompute.model_copy(update={"blocks": blocks})
        return self.model_copy(update={"recompute": section, "repeats": repeats})

    def is_valid_for(self, recompute: RecomputeSection, microbatch: int, *, compiled: bool = False) -> bool:
        asked, own = recompute, self.recompute
        return (
            self.microbatch in (None, microbatch)
            and self.compiled == compiled
            and (asked.mode, asked.inputs) == (own.mode, own.inputs)
            and (asked.blocks == own.blocks or asked.blocks in self.recomputed_block_counts())
            and (asked.mode != "selective" or asked.save_matmuls == own.save_matmuls)
        )


class UntraceableSettings(FrozenModel):
    """A recompute setting, eager or compiled, under which a model cannot be traced, so it is not planned."""

    recompute: RecomputeSection
    compiled: bool = False
    reason: str

    def __str__(self) -> str:
        compiled = ", compiled," if self.compiled else ""
        first = self.recompute.blocks
        blocks = f", recompute.blocks = {first}," if first is not None else ""
        return f"recompute.mode = {self.recompute.mode}{blocks}{compiled} is left out: {self.reason}"


class ModelSpec(FrozenModel):
    """A model's units in order of use, its buffers, and the allocations and kernels of a microbatch.

    device_type: type of device whose kernels the traces contain
    scalars: number of parameters without dimensions, which are replicated and in no unit
    flops_per_token: see `spec.records.measurement.model_flops_per_token`. It is counted from the traced
        matmuls, so a mixture of experts counts only the experts that a token reaches.
    active_numel: number of parameters that a token is multiplied with; None if it is unknown
    untraced: settings that were to be traced, and cannot be
    loss_chunk: rows of logits that the traced loss computes at once; 0 for all
    context_parallel: number of ranks that share each traced sequence
    tensor_parallel: number of ranks that share the traced matmuls
    expert_parallel: number of ranks that divide the experts; the traced rank's experts get as many rows as it
        sends. Parameters in `units` are whole.
    routing_spread: standard deviation of the rows of one expert over their mean, where ranks divide experts;
        0 for forced balance. The default is the mean of three published routers.
    fp8: summary of which matrices are multiplied in fp8; empty if none are
    """

    name: str
    device_type: DeviceType = "cpu"
    sequence_length: int
    precision: Precision
    units: tuple[UnitSpec, ...]
    scalars: int = 0
    buffer_bytes: int
    loss_chunk: int = 0
    context_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    kernels: tuple[Kernel, ...] = ()
    traces: tuple[MicrobatchTrace, ...]
    untraced: tuple[UntraceableSettings, ...] = ()
    flops_per_token: float | None = None
    active_numel: int | None = None
    routing_spread: NonNegativeFloat = 0.19
    fp8: tuple[Fp8MatrixGroup, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of all parameters; tied parameters count once."""
        return sum(unit.numel for unit in self.units) + self.scalars

    @property
    def frozen_numel(self) -> int:
        return sum(p.numel for unit in self.units for p in unit.parameters if not p.requires_grad)

    @property
    def packed_numel(self) -> int:
        return sum(p.numel for unit in self.units for p in unit.parameters if p.packed_columns is not None)

    @property
    def expert_count_gcd(self) -> int:
        """Greatest common divisor of the layers' experts; 0 if experts are no units of their own."""
        counts = [p.shape[0] for unit in self.units if unit.has_experts for p in unit.parameters]
        return math.gcd(*counts) if counts else 0

    @property
    def is_mixture(self) -> bool:
        """True if a layer has experts, also if they are no units of their own."""
        return self.expert_count_gcd > 0 or any(
            kernel.rows != LinearInMicrobatch() for kernel in self.kernels
        )

    @cached_property
    def derived_value_cache(self) -> dict[Hashable, object]:
        """Cache in which the planner stores values that it derives from this spec."""
        return {}

    @cached_property
    def first_identical_unit_indices(self) -> tuple[int, ...]:
        """For each unit, the index of the first with equal parameters (except names), override and traits."""
        first: dict[Hashable, int] = {}
        kinds: list[int] = []
        for index, unit in enumerate(self.units):
            shapes = tuple(
                (p.shape, p.divided_dim, p.itemsize, p.is_floating, p.requires_grad, p.is_gathered_in_fp8)
                for p in unit.parameters
            )
            override = None if unit.override is None else unit.override.model_copy(update={"match": ""})
            traits = (unit.kept, unit.is_embedding, unit.has_experts)
            kinds.append(first.setdefault((shapes, override, *traits), index))
        return tuple(kinds)

    def choose_trace(
        self, recompute: RecomputeSection, microbatch: int, *, compiled: bool = False
    ) -> MicrobatchTrace:
        """Returns the valid trace, preferably for just this microbatch. Raises PlanError if none is valid."""
        fitting = [one for one in self.traces if one.is_valid_for(recompute, microbatch, compiled=compiled)]
        if not fitting:
            raise PlanError(
                f"the spec of {self.name} was not traced under these settings.",
                got=f"recompute {recompute.mode}, microbatch {microbatch}{', compiled' if compiled else ''}",
                why=f"it knows {_traced_settings_text(self.traces)}, and allocations follow from them",
                fix="describe(model, plan) with this plan",
            )
        found, blocks = min(fitting, key=lambda trace: trace.microbatch is None), recompute.blocks
        if blocks is None:
            return found
        key = ("recomputed blocks", id(found), blocks)
        if key not in self.derived_value_cache:  # one object, since the planner caches by its id
            self.derived_value_cache[key] = found.with_recomputed_blocks(blocks)
        return cast(MicrobatchTrace, self.derived_value_cache[key])

    def trace_for_plan(self, plan: Plan) -> MicrobatchTrace:
        """Returns the plan's trace. Raises PlanError if the spec has no such trace, or has other degrees."""
        divisions = {
            "matmuls": ("tensor_parallel", plan.tensor_parallel, self.tensor_parallel),
            "sequences": ("context_parallel", plan.context_parallel, self.context_parallel),
            "experts": ("expert_parallel", plan.expert_parallel, self.expert_parallel),
        }
        for divided, (key, asked, traced) in divisions.items():
            if asked != traced:
                raise PlanError(
                    f"the spec of {self.name} was traced with another division of {divided}.",
                    got=f"sharding.{key} = {asked}, and a spec for {traced}",
                    fix="describe(model, plan) with this plan",
                )
        run = plan.run
        return self.choose_trace(run.recompute, plan.microbatch, compiled=run.run.compile is True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a spec that `save` wrote. Raises SpecError for any other file."""
        return cls.read_json(path, what="a saved model spec", ignores_unknown=True)

    def save(self, path: str | Path) -> None:
        """Writes a file that `load` reads. Raises OSError."""
        self.write_json(path)


def _traced_settings_text(traces: Sequence[MicrobatchTrace]) -> str:
    return "; ".join(
        f"recompute {trace.recompute.mode}"
        + (" of some blocks" if trace.recompute.blocks is not None else "")
        + (f", microbatch {trace.microbatch}" if trace.microbatch is not None else "")
        + (", compiled" if trace.compiled else "")
        for trace in traces
    )

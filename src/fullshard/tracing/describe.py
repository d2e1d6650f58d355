"""describe(model, plan): the ModelSpec of any nn.Module, without its weights.

Microbatches run forward and backward on fake tensors (shapes without data). Every storage is counted from its
creation to its release, as the allocator would count it. The FLOP and bytes of every operation are recorded.
The record is cut into phases at the points where FSDP2 acts (a unit's forward and backward begin and end).

- Parameters have the dtype in which units are gathered.
- FSDP2's own allocations are not in the trace; `fullshard.planner.memory` adds them.
- A tensor moved to the host is no longer counted if the device is a GPU. On the CPU, device memory is host
  memory, and the copy counts.

Only a few of the repeated blocks are traced (`fullshard.tracing.repeated_blocks`), and traces of two
microbatch sizes predict all others (`fullshard.tracing.phases`). A model whose trace changes structure
between them is traced whole, for the plan's own microbatch. Compiled blocks run as the graphs that the
compiler would make of them (`fullshard.tracing.compiled_blocks`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import lcm
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from fullshard.distributed.sequence_parts import SequencePart
from fullshard.distributed.stacked_experts import is_experts
from fullshard.distributed.tensors import is_wrapper_class
from fullshard.errors import ShardError
from fullshard.models.model_parallel import divide_model
from fullshard.sharding.fp8 import Fp8Choice, choose_fp8_linears, convert_linears_to_fp8, fake_fp8_weight
from fullshard.sharding.host_copy import CpuHostCopier, FakeReportingCopier
from fullshard.sharding.precision import TORCH_DTYPE, cast_buffers
from fullshard.sharding.recompute import apply_recompute
from fullshard.sharding.units import (
    Predicate,
    Unit,
    find_blocks_with_units_inside,
    find_recompute_blocks,
    find_units,
)
from fullshard.spec.hardware import AttentionKernel
from fullshard.spec.model import (
    Kernel,
    LinearInMicrobatch,
    MicrobatchTrace,
    ModelSpec,
    RepeatedUnits,
    TracePhase,
    UntracedSettings,
)
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import RecomputeSection, Run, Strategy
from fullshard.tracing.allocations import PhaseRecord
from fullshard.tracing.compiled_blocks import CompiledBlocks
from fullshard.tracing.cuda_kernels import emulate_cuda_kernels
from fullshard.tracing.example_batch import (
    disable_packing_detection,
    has_integer_values,
    has_microbatch_dim,
    make_fake_batch,
)
from fullshard.tracing.failures import NEEDS_VALUES, TRACE_FAILURES, error_text, trace_error
from fullshard.tracing.kernels import distinct_storage_bytes, list_tensors
from fullshard.tracing.phases import (
    KernelIndex,
    can_extrapolate_to_smaller,
    has_same_structure,
    merge_recordings,
)
from fullshard.tracing.recurrent_layers import fold_time_of_recurrent_layers
from fullshard.tracing.repeated_blocks import BlockTruncation, truncate_repeated_blocks
from fullshard.tracing.trace import LossFunction, MicrobatchTracer, training_mode
from fullshard.tracing.unit_specs import parameters_gathered_in_fp8, unit_and_parameter_specs

# Recompute settings traced for a Run that leaves recompute to the planner.
RECOMPUTES = (
    RecomputeSection(mode="none"),
    RecomputeSection(mode="selective"),
    RecomputeSection(mode="every", every=2),
    RecomputeSection(mode="full"),
)


def describe(
    model: nn.Module,
    plan: Plan | Run,
    *,
    loss: LossFunction,
    batch: Any = None,
    units: Predicate | None = None,
    device_type: DeviceType | None = None,
    attention_kernel: AttentionKernel = "flash",
) -> ModelSpec:
    """Returns the spec of `model` as `plan` runs it on one rank.

    The spec holds for every plan with the same units, sequence length and precision, for any ranks, strategy,
    microbatch and accumulation, and a traced recompute: the plan's, or all for a Run whose recompute is auto.
    On a GPU, a Run whose `run.compile` is auto is traced eager and compiled.

    model: on the meta device or real; it is traced in training mode (dropout is active), and is not changed.
    loss: `loss(model, batch)`, the training loss.
    batch: one microbatch, any nest of tensors with the microbatch in dim 0; only shapes and dtypes matter.
        Unset: int64 `tokens` and `labels` of (microbatch, sequence_length).
    units: `units(name, module)` overrides the plan's unit policy, as in `shard`.
    device_type: the device of the kernels; unset, the plan's.
    attention_kernel: `Hardware.attention_kernel`, which decides what masked attention saves.

    Recompute settings that cannot be traced are left out, and listed in `ModelSpec.untraced`. Raises
    ShardError for a sharded model, and TraceError for one that cannot run on a batch without values.
    """
    plan, device, settings = _one_rank_plan_and_settings(plan, device_type)
    _check_not_sharded(model)
    given = find_units(model, plan.run.sharding.units, predicate=units)
    blocks = find_recompute_blocks(model, plan.run.sharding.units, units=given)
    divided = _divided_dims(model, given, plan=plan, device=device)
    fp8 = choose_fp8_linears(model, given, plan=plan, blocks=blocks, divided=divided)
    study = _RecomputeTracer(model, plan, loss=loss, batch=batch, predicate=units, device=device, fp8=fp8)
    with ExitStack() as stack, disable_packing_detection(), fold_time_of_recurrent_layers():
        stack.enter_context(training_mode(model))
        if device == "cuda":
            stack.enter_context(emulate_cuda_kernels(attention_kernel))
        traces, untraced = _trace_all_settings(study, settings, given=given)
    flops, active = _flops_and_parameters_per_token(traces[0], study.table.kernels, plan=plan)
    return ModelSpec(
        name=type(model).__name__,
        device_type=device,
        sequence_length=plan.run.data.sequence_length,
        precision=plan.precision,
        units=tuple(unit_and_parameter_specs(given, model, fp8=fp8, divided=divided)),
        scalars=sum(parameter.ndim == 0 for parameter in model.parameters()),
        buffer_bytes=study.buffer_bytes,
        loss_chunk=study.loss_chunk,
        context_parallel=plan.context_parallel,
        context_method=plan.run.sharding.context_method,
        tensor_parallel=plan.tensor_parallel,
        expert_parallel=plan.expert_parallel,
        kernels=study.table.kernels,
        traces=tuple(traces),
        untraced=tuple(untraced),
        flops_per_token=flops,
        active_numel=active,
        fp8=() if fp8 is None else fp8.shares,
    )


def _check_not_sharded(model: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ShardError(
            f"{type(model).__name__} is sharded already.",
            why="each rank has only a part of it",
            fix="describe the model before shard(model, plan)",
        )


def _trace_all_settings(
    study: "_RecomputeTracer", settings: Sequence[tuple[RecomputeSection, bool]], *, given: Sequence[Unit]
) -> tuple[list[MicrobatchTrace], list[UntracedSettings]]:
    """Returns the traces of all (recompute, compiled), and those that cannot be traced.

    Raises TraceError if the first cannot: the others run the same forward.
    """
    traces, untraced = list[MicrobatchTrace](), list[UntracedSettings]()
    for recompute, compiled in settings:
        try:
            traces += study.trace_settings(recompute, given, compiled=compiled)
        except TRACE_FAILURES as error:
            if not traces:
                raise trace_error(study.model, error, given_batch=study.batch is not None) from error
            untraced.append(
                UntracedSettings(recompute=recompute, compiled=compiled, reason=error_text(error))
            )
    return traces, untraced


def _one_rank_plan_and_settings(
    plan: Plan | Run, device_type: DeviceType | None
) -> tuple[Plan, DeviceType, list[tuple[RecomputeSection, bool]]]:
    """Returns a plan with the settings that a trace depends on, its device, and (recompute, compiled) pairs.

    The plan is the given one, or of one rank for a Run.
    """
    if isinstance(plan, Plan):
        device = device_type or plan.device
        return plan, device, [(plan.run.recompute, plan.run.run.compile is True)]
    run, device = plan, device_type or ("cuda" if plan.run.device == "cuda" else "cpu")
    microbatch = run.train.microbatch or 1
    train = run.train.model_copy(update={"microbatch": microbatch, "global_batch": microbatch})
    unset = {"shard_degree": None, "reshard_after_forward": None}
    sharding = run.sharding.model_copy(update={"strategy": Strategy.FULL_SHARD, **unset})
    # A trace covers the whole model on one device, unless ranks share its sequences or matmuls. Offload is
    # derived from it.
    offload = run.offload.model_copy(update={"tier": "none"})
    alone = run.model_copy(update={"train": train, "sharding": sharding, "offload": offload})
    recomputes = RECOMPUTES if run.recompute.mode == "auto" else (run.recompute,)
    settings = list(product(recomputes, run.compile_choices(device)))
    experts = 1 if sharding.expert_parallel == "auto" else sharding.expert_parallel
    ranks = lcm(sharding.ranks_per_sequence, experts)
    groups = microbatch * (ranks // sharding.ranks_per_sequence)
    alone = alone.model_copy(update={"train": train.model_copy(update={"global_batch": groups})})
    return Plan.from_run(alone, world_size=ranks, device=device), device, settings


@dataclass
class _MicrobatchRecording:
    """Recordings of one microbatch size."""

    recording: list[PhaseRecord]  # phases without earlier gradients
    accumulating: list[PhaseRecord]  # with earlier gradients; empty if FSDP2 accumulates them itself
    batch_bytes: int  # bytes of the microbatch's storages
    compiled_units: frozenset[int] = frozenset()  # indices of units inside compiled blocks

    @property
    def all_phases(self) -> list[PhaseRecord]:
        return [*self.recording, *self.accumulating]


@dataclass
class _RecomputeTracer:
    """Traces one model under each recompute setting in turn."""

    model: nn.Module
    plan: Plan
    loss: LossFunction
    batch: Any
    predicate: Predicate | None
    device: DeviceType
    fp8: Fp8Choice | None
    table: KernelIndex = field(default_factory=KernelIndex)
    buffer_bytes: int = 0
    loss_chunk: int = 0
    keep_integers: bool = False  # whether integers of the batch keep their values
    # whether a single sequence differs, eager and compiled; unknown before the first trace
    _single_differs: dict[bool, bool] = field(default_factory=dict[bool, bool])

    def trace_settings(
        self, recompute: RecomputeSection, given: Sequence[Unit], *, compiled: bool
    ) -> list[MicrobatchTrace]:
        """Returns the traces under one recompute setting, eager or compiled.

        Integers of the batch keep their values if the model's flow or shapes depend on these.
        """
        try:
            return self._trace_settings(recompute, given, compiled=compiled)
        except NEEDS_VALUES:
            if self.keep_integers or not has_integer_values(self.batch):
                raise
        self.keep_integers = True
        return self._trace_settings(recompute, given, compiled=compiled)

    def _trace_settings(
        self, recompute: RecomputeSection, given: Sequence[Unit], *, compiled: bool
    ) -> list[MicrobatchTrace]:
        """Returns the traces under one recompute setting, eager or compiled: one for any microbatch, or two.

        The second is for a single sequence, if that differs. For a model whose trace changes structure with
        the microbatch, the only trace is for the plan's own microbatch.
        """
        place = self.plan.run.run.model_copy(update={"compile": compiled})
        run = self.plan.run.model_copy(update={"recompute": recompute, "run": place})
        plan = self.plan.model_copy(update={"run": run})
        for short in (True, False):
            record, shortened = self._make_microbatch_recorder(plan, given, short=short)
            if record is None:
                continue
            build = partial(self._build_trace, plan=plan, repeats=shortened.repeats)
            if self.batch is None or has_microbatch_dim(self.batch, plan.microbatch):
                low, high = record(2), record(3)
                # Modules may keep states of one microbatch, which the next one frees.
                same = has_same_structure(low.all_phases, high.all_phases)
                if same and _has_equal_periods(low.recording, shortened.repeats):
                    traces = [build(low, high)]
                    if self._single_differs.get(compiled, True):
                        single = record(1)
                        self._single_differs[compiled] = not can_extrapolate_to_smaller(
                            single.recording, low=low.recording, high=high.recording
                        )
                        alone = build(single, single, microbatch=1)
                        traces += [alone] if self._single_differs[compiled] else []
                    return traces
            own = record(plan.microbatch)
            if _has_equal_periods(own.recording, shortened.repeats):
                return [build(own, own, microbatch=plan.microbatch)]
        raise AssertionError("a whole model is always traced")

    def _make_microbatch_recorder(
        self, plan: Plan, given: Sequence[Unit], *, short: bool
    ) -> tuple[Callable[[int], _MicrobatchRecording] | None, BlockTruncation]:
        """Returns a function that records a microbatch of a given size on a fake copy of the model.

        It is None if the model should be truncated (`short`) and cannot be.
        """
        section = plan.run.sharding.units
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        twin = _copy_model_as_fake(
            self.model, given, plan=plan, fakes=fakes, fp8=self.fp8, device=self.device
        )
        with fakes:
            divided = divide_model(twin, plan, rank=0, group_name=str)
        self.buffer_bytes = distinct_storage_bytes(twin.buffers())
        found = find_units(twin, section, predicate=self.predicate)
        shortened = BlockTruncation()
        if short:
            blocks = find_recompute_blocks(twin, section, units=found)
            shortened = truncate_repeated_blocks(twin, found, blocks=blocks, plan=plan)
            if not shortened.repeats:
                return None, shortened
            found = find_units(twin, section, predicate=self.predicate)
            kept = [unit.name for unit in given if unit.name not in shortened.removed_units]
            if [unit.name for unit in found] != kept:
                return None, shortened
        _keep_parts_of_parameters(twin, divided, plan=plan)
        graphs = CompiledBlocks()
        copier = FakeReportingCopier() if self.device == "cuda" else CpuHostCopier()
        repeated = find_recompute_blocks(twin, section, units=found)
        recompute = partial(apply_recompute, repeated, plan.run.recompute, device=self.device, copier=copier)
        if plan.run.run.compile is True:
            pieces = find_blocks_with_units_inside(repeated, found)
            graphs.replace_forwards(repeated, plan.run.recompute, pieces=pieces, recompute=recompute)
        else:
            recompute()

        def record_microbatch(microbatch: int) -> _MicrobatchRecording:
            tracer = MicrobatchTracer(
                twin, found, plan=plan, fakes=fakes, device=self.device, has_integers=self.keep_integers
            )
            graphs.fuse = lambda: tracer.allocations.count_as_compiled()
            if isinstance(copier, FakeReportingCopier):
                copier.report = lambda way, size: tracer.allocations.record_host_copy(way, size)
            batch = self._make_fake_part(plan, microbatch=microbatch, fakes=fakes)
            recording, accumulating = tracer.trace_microbatch(self.loss, batch), list[PhaseRecord]()
            self.loss_chunk = tracer.allocations.loss_chunk
            # If gradients are reduced in another dtype, FSDP2 takes them from autograd and accumulates them
            # itself.
            if plan.precision.param == plan.precision.reduce:
                tracer.allocate_gradients()
                accumulating = tracer.trace_microbatch(self.loss, batch)
                twin.zero_grad(set_to_none=True)
            fused = set(repeated) - graphs.failed if plan.run.run.compile is True else set[nn.Module]()
            inside = {module for block in fused for module in block.modules()}
            units = frozenset(i for i, unit in enumerate(found) if inside.issuperset(unit.modules))
            size = distinct_storage_bytes(list_tensors(batch))
            return _MicrobatchRecording(recording, accumulating, size, units)

        return record_microbatch, shortened

    def _make_fake_part(self, plan: Plan, *, microbatch: int, fakes: FakeTensorMode) -> Any:
        """Returns the traced rank's fake batch, with its part of each sequence if ranks share sequences."""
        whole = make_fake_batch(
            self.batch, plan, microbatch=microbatch, fakes=fakes, keep_integers=self.keep_integers
        )
        with fakes:
            return whole if plan.context_parallel == 1 else SequencePart.from_plan(plan, 0).cut_batch(whole)

    def _build_trace(
        self,
        low: _MicrobatchRecording,
        high: _MicrobatchRecording,
        *,
        plan: Plan,
        repeats: tuple[RepeatedUnits, ...],
        microbatch: int | None = None,
    ) -> MicrobatchTrace:
        first = microbatch or 2
        grows = high.batch_bytes - low.batch_bytes
        merge = partial(
            merge_recordings, microbatch=first, table=self.table, compiled_units=low.compiled_units
        )
        return MicrobatchTrace(
            recompute=plan.run.recompute,
            compiled=plan.run.run.compile is True,
            microbatch=microbatch,
            batch_bytes=LinearInMicrobatch(low.batch_bytes - grows * first, grows),
            phases=merge(low.recording, high.recording),
            accumulating=merge(low.accumulating, high.accumulating),
            repeats=repeats,
        )


def _has_equal_periods(recording: Sequence[PhaseRecord], repeats: Sequence[RepeatedUnits]) -> bool:
    """Returns whether each period of blocks that represents removed ones did the same as the next period."""

    def records_of(first: int, count: int) -> list[tuple[object, ...]]:
        return [
            (one.event, one.unit - first, one.event_change_count, one.changes, one.work, one.copies)
            for one in recording
            if first <= one.unit < first + count
        ]

    return all(
        records_of(repeat.first, repeat.units) == records_of(repeat.first + repeat.units, repeat.units)
        for repeat in repeats
    )


def _flops_and_parameters_per_token(
    trace: MicrobatchTrace, kernels: Sequence[Kernel], *, plan: Plan
) -> tuple[float, int]:
    """Returns (FLOP of forward and backward, active parameters) per token: see `model_flops_per_token`."""
    sequence_length = plan.run.data.sequence_length
    microbatch = trace.microbatch or 1
    matmul = attention = 0.0
    for phase, times in _forward_phases_with_counts(trace):
        for kernel, count in ((kernels[launch.kernel], launch.times) for launch in phase.work):
            if kernel.backward:
                continue
            flops = count * times * kernel.flops.value_at(microbatch)
            if kernel.kind == "attention":
                # Causal attention computes S (S + 1) / 2 of S² pairs.
                attention += flops * (2 * sequence_length / (sequence_length + 1) if kernel.causal else 1)
            elif kernel.kind == "matmul":
                matmul += flops
    # The traced rank computes its part of the tokens, or of each token's matmuls.
    tokens = microbatch * sequence_length / (plan.context_parallel * plan.tensor_parallel)
    return 3 * (matmul + attention) / tokens, round(matmul / tokens / 2)


def _forward_phases_with_counts(trace: MicrobatchTrace) -> Iterator[tuple[TracePhase, int]]:
    """Yields each phase of forward with the number of times it occurs in the model."""
    for phase in trace.phases:
        if phase.event in ("end_forward", "pre_backward"):
            return
        inside = (r.times for r in trace.repeats if r.first <= phase.unit < r.first + r.units)
        yield phase, next(inside, 1)


def _copy_model_as_fake(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    plan: Plan,
    fakes: FakeTensorMode,
    fp8: Fp8Choice | None,
    device: DeviceType,
) -> nn.Module:
    """Copies the module tree on fake tensors, with parameters in the dtype in which they are gathered."""
    gathered = {
        id(parameter): TORCH_DTYPE[unit.settings(plan).precision.param]
        for unit in units
        for parameter in unit.parameters.values()
        if parameter.is_floating_point()
    }
    in_fp8, memo = parameters_gathered_in_fp8(fp8), dict[int, Any]()
    with fakes:
        for tensor in [*model.parameters(), *model.buffers()]:
            dtype = gathered.get(id(tensor), tensor.dtype)
            if id(tensor) in in_fp8:
                memo[id(tensor)] = fake_fp8_weight(tensor.shape, device=device, dtype=dtype)
                continue
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
        twin = copy.deepcopy(model, memo)
        cast_buffers(twin, plan.precision)
    if fp8 is not None:
        linears = {name: cast(nn.Linear, twin.get_submodule(name)) for name in fp8.linears}
        convert_linears_to_fp8(replace(fp8, linears=linears), device=device)
    return twin


def _divided_dims(
    model: nn.Module, units: Sequence[Unit], *, plan: Plan, device: DeviceType
) -> dict[str, int | None]:
    """Returns the dim in which ranks divide each parameter, by name; empty if they divide none."""
    if not plan.has_expert_mesh and plan.tensor_parallel == 1:
        return {}
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _copy_model_as_fake(model, units, plan=plan, fakes=fakes, fp8=None, device=device)
    with fakes:
        return divide_model(twin, plan, rank=0, group_name=str)


def _keep_parts_of_parameters(twin: nn.Module, divided: Mapping[str, int | None], *, plan: Plan) -> None:
    """Replaces divided parameters by the first rank's part."""
    for holder, module in twin.named_modules():
        ranks = plan.expert_parallel if is_experts(module) else plan.tensor_parallel
        for key, parameter in module.named_parameters(recurse=False):
            if (dim := divided.get(f"{holder}.{key}" if holder else key)) is not None:
                part = parameter.data.chunk(ranks, dim)[0].clone()
                if is_wrapper_class(type(part)):  # `data` would leave the wrapper's shape as it is
                    setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
                else:  # of all modules that share it
                    parameter.data = part

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

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import ShardError
from fullshard.sharding.fp8 import choose_fp8_linears
from fullshard.sharding.recompute import check_recomputed_blocks
from fullshard.sharding.units import Predicate, find_recompute_blocks, find_units
from fullshard.spec.hardware import AttentionKernel
from fullshard.spec.model import Kernel, MicrobatchTrace, ModelSpec, TracePhase, UntracedSettings
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.recompute_section import RecomputeSection
from fullshard.spec.run import Run, Strategy
from fullshard.tracing.compiled_blocks import CompiledPrograms
from fullshard.tracing.cuda_kernels import emulate_cuda_kernels
from fullshard.tracing.example_batch import disable_packing_detection
from fullshard.tracing.expert_degrees import ModelRecordings, derive_recordings
from fullshard.tracing.failures import TRACE_FAILURES, error_text, trace_error
from fullshard.tracing.phases import KernelIndex, has_same_structure
from fullshard.tracing.recordings import MicrobatchRecording, SettingRecording, SettingsRecorder, divided_dims
from fullshard.tracing.recurrent_layers import fold_time_of_recurrent_layers
from fullshard.tracing.trace import LossFunction, training_mode
from fullshard.tracing.unit_specs import unit_and_parameter_specs


def _recomputes_to_trace(blocks: int) -> tuple[RecomputeSection, ...]:
    """Returns the settings to trace for a Run that leaves recompute to the planner.

    blocks: number of the model's blocks. The trace of half of them tells what other numbers do: see
        `MicrobatchTrace.border`.
    """
    some = (RecomputeSection(mode="full", blocks=blocks // 2),) if blocks > 1 else ()
    none, selective = RecomputeSection(mode="none"), RecomputeSection(mode="selective")
    return (none, selective, *some, RecomputeSection(mode="full"))


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
    ShardError for a sharded model and for more `recompute.blocks` than it has, and TraceError for one that
    cannot run on a batch without values.
    """
    study = _Study(model, loss=loss, batch=batch, units=units, kernel=attention_kernel)
    return study.build_spec(study.record(plan, device_type))


def describe_expert_degrees(
    model: nn.Module,
    run: Run,
    *,
    degrees: Sequence[int],
    loss: LossFunction,
    batch: Any = None,
    device_type: DeviceType | None = None,
    attention_kernel: AttentionKernel = "flash",
) -> dict[int, ModelSpec]:
    """Returns the specs of `model`, a mixture, by the number of ranks over 1 that divide its experts.

    Only the least and the most of `degrees` are traced, all others derived: see `tracing.expert_degrees`.
    A model for which this is not possible is traced for each of them.

    The other arguments are those of `describe`. Raises what it does.
    """
    study = _Study(model, loss=loss, batch=batch, units=None, kernel=attention_kernel)
    section = run.sharding
    runs = {
        one: run.model_copy(update={"sharding": section.model_copy(update={"expert_parallel": one})})
        for one in degrees
    }
    few, most = min(degrees), max(degrees)
    first = study.record(runs[few], device_type)
    last = study.record_again(first, runs[most]) if len(runs) > 2 else None
    specs: dict[int, ModelSpec] = {}
    for degree, own in runs.items():
        known = first if degree == few else None
        if last is not None and known is None:
            plan, _ = _one_rank_plan(own, device_type)
            known = derive_recordings(first, last, plan=plan)
        specs[degree] = study.build_spec(known or study.record(own, device_type))
    return specs


@dataclass(frozen=True)
class _Study:
    """A model to describe, with its loss and batch. `kernel`: `Hardware.attention_kernel`."""

    model: nn.Module
    loss: LossFunction
    batch: Any
    units: Predicate | None
    kernel: AttentionKernel
    programs: CompiledPrograms = field(default_factory=CompiledPrograms)

    def record(self, plan: Plan | Run, device_type: DeviceType | None) -> ModelRecordings:
        """Returns recordings under the settings of `plan`."""
        given = plan
        plan, device = _one_rank_plan(plan, device_type)
        _check_not_sharded(self.model)
        recorder = self._make_recorder(plan, device)
        check_recomputed_blocks(plan.run.recompute, recorder.blocks)
        settings = _settings_to_trace(given, device, blocks=recorder.blocks)
        with self._tracing(device):
            found, untraced = _record_all_settings(recorder, settings)
        return ModelRecordings(recorder, tuple(found), tuple(untraced))

    def record_again(self, other: ModelRecordings, run: Run) -> ModelRecordings | None:
        """Returns what `other` is under the settings of `run`, of the smaller microbatches only.

        None if it has another structure, or cannot be recorded.
        """
        device = other.recorder.device
        plan, _ = _one_rank_plan(run, device)
        recorder = self._make_recorder(plan, device)
        recorder.keep_integers = other.recorder.keep_integers
        found = list[SettingRecording]()
        known = dict[int, MicrobatchRecording | None]()  # eager and compiled may share one
        with self._tracing(device):
            for one in (setting for setting in other.settings if setting.kept):
                key = id(one.low.recording)
                try:
                    low = known[key] if key in known else recorder.record_again(one)
                except TRACE_FAILURES:
                    return None
                if low is None or not has_same_structure(low.all_phases, one.low.all_phases):
                    return None
                known[key] = low
                found.append(replace(one, low=low, high=low))
        return ModelRecordings(recorder, tuple(found), other.untraced)

    def build_spec(self, recordings: ModelRecordings) -> ModelSpec:
        recorder, model, plan = recordings.recorder, self.model, recordings.plan
        table = KernelIndex()
        traces = [(one.build_trace(table), one.kept) for one in recordings.settings]
        flops, active = _flops_and_parameters_per_token(traces[0][0], table.kernels, plan=plan)
        fp8 = recorder.fp8
        return ModelSpec(
            name=type(model).__name__,
            device_type=recorder.device,
            sequence_length=plan.run.data.sequence_length,
            precision=plan.precision,
            units=tuple(unit_and_parameter_specs(recorder.given, model, fp8=fp8, divided=recorder.divided)),
            scalars=sum(parameter.ndim == 0 for parameter in model.parameters()),
            buffer_bytes=recorder.buffer_bytes,
            loss_chunk=recorder.loss_chunk,
            context_parallel=plan.context_parallel,
            context_method=plan.run.sharding.context_method,
            tensor_parallel=plan.tensor_parallel,
            expert_parallel=plan.expert_parallel,
            kernels=table.kernels,
            traces=tuple(trace for trace, kept in traces if kept),
            untraced=recordings.untraced,
            flops_per_token=flops,
            active_numel=active,
            fp8=() if fp8 is None else fp8.shares,
        )

    def _make_recorder(self, plan: Plan, device: DeviceType) -> SettingsRecorder:
        model, section = self.model, plan.run.sharding.units
        given = find_units(model, section, predicate=self.units)
        blocks = find_recompute_blocks(model, section, units=given)
        divided = divided_dims(model, given, plan=plan, device=device)
        fp8 = choose_fp8_linears(model, given, plan=plan, blocks=blocks, divided=divided)
        loss, batch, units = self.loss, self.batch, self.units
        count, programs = len(blocks), self.programs
        return SettingsRecorder(model, plan, loss, batch, units, device, fp8, given, divided, count, programs)

    @contextmanager
    def _tracing(self, device: DeviceType) -> Generator[None]:
        kernels = emulate_cuda_kernels(self.kernel) if device == "cuda" else nullcontext()
        with disable_packing_detection(), fold_time_of_recurrent_layers(), training_mode(self.model), kernels:
            yield


def _check_not_sharded(model: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ShardError(
            f"{type(model).__name__} is sharded already.",
            why="each rank has only a part of it",
            fix="describe the model before shard(model, plan)",
        )


def _record_all_settings(
    recorder: SettingsRecorder, settings: Sequence[tuple[RecomputeSection, bool]]
) -> tuple[list[SettingRecording], list[UntracedSettings]]:
    """Returns the recordings of all (recompute, compiled), and those that cannot be traced.

    Raises TraceError if the first cannot: the others run the same forward.
    """
    found, untraced = list[SettingRecording](), list[UntracedSettings]()
    for recompute, compiled in settings:
        try:
            found += recorder.record_setting(recompute, compiled=compiled)
        except TRACE_FAILURES as error:
            if not found:
                raise trace_error(recorder.model, error, given_batch=recorder.batch is not None) from error
            untraced.append(
                UntracedSettings(recompute=recompute, compiled=compiled, reason=error_text(error))
            )
    return found, untraced


def _settings_to_trace(
    plan: Plan | Run, device: DeviceType, *, blocks: int
) -> list[tuple[RecomputeSection, bool]]:
    """Returns (recompute, compiled): those of a plan, or all that a run leaves open."""
    if isinstance(plan, Plan):
        return [(plan.run.recompute, plan.run.run.compile is True)]
    asked = plan.recompute
    recomputes = _recomputes_to_trace(blocks) if asked.mode == "auto" else (asked,)
    return list(product(recomputes, plan.compile_choices(device)))


def _one_rank_plan(plan: Plan | Run, device_type: DeviceType | None) -> tuple[Plan, DeviceType]:
    """Returns a plan with the settings that a trace depends on, and its device.

    The plan is the given one, or of one rank for a Run.
    """
    if isinstance(plan, Plan):
        return plan, device_type or plan.device
    run, device = plan, device_type or ("cuda" if plan.run.device == "cuda" else "cpu")
    microbatch = run.train.microbatch or 1
    train = run.train.model_copy(update={"microbatch": microbatch, "global_batch": microbatch})
    unset = {"shard_degree": None, "reshard_after_forward": None}
    sharding = run.sharding.model_copy(update={"strategy": Strategy.FULL_SHARD, **unset})
    # A trace covers the whole model on one device, unless ranks share its sequences or matmuls. Offload is
    # derived from it.
    offload = run.offload.model_copy(update={"tier": "none"})
    alone = run.model_copy(update={"train": train, "sharding": sharding, "offload": offload})
    experts = 1 if sharding.expert_parallel == "auto" else sharding.expert_parallel
    ranks = lcm(sharding.ranks_per_sequence, experts)
    groups = microbatch * (ranks // sharding.ranks_per_sequence)
    alone = alone.model_copy(update={"train": train.model_copy(update={"global_batch": groups})})
    return Plan.from_run(alone, world_size=ranks, device=device), device


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

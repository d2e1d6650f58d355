"""describe(model, plan): the ModelSpec of any nn.Module, without its weights.

Microbatches run forward and backward on fake tensors (shapes without data). Every storage is counted from its
creation to its release, as the allocator would count it. The FLOP and bytes of every operation are recorded.
The record is cut into phases at the points where FSDP2 acts (a unit's forward and backward begin and end).

- Parameters have the dtype in which units are gathered.
- FSDP2's own allocations are not in the trace; `fullshard.planner.predict.memory` adds them.
- A tensor moved to the host is no longer counted if the device is a GPU. On the CPU, device memory is host
  memory, and the copy counts.

Only a few of the repeated blocks are traced (`planner.describe.extrapolation`), and traces of two microbatch
sizes predict all others (`planner.describe.extrapolation`). A model whose trace changes structure between
them is traced for the plan's own microbatch, and one whose repeated blocks differ in the trace is traced
whole. Compiled blocks run as the graphs that the compiler would make of them (`planner.describe.emulation`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import ShardError, TraceError
from fullshard.models.build import attention_flop_per_token, attention_window_share, gradient_shares
from fullshard.models.packed_weights import find_packed_weights
from fullshard.parallel.fp8 import Fp8Choice, choose_fp8_linears
from fullshard.parallel.hidden_matrices import find_hidden_matrices
from fullshard.parallel.recompute import check_recomputed_block_count
from fullshard.parallel.units import Predicate, Unit, find_recompute_and_compile_blocks, find_units
from fullshard.planner.describe import recordings
from fullshard.planner.describe.emulation import CompiledPrograms, emulate_cuda_kernels
from fullshard.planner.describe.expert_degrees import RunRecording
from fullshard.planner.describe.extrapolation import KernelIndex
from fullshard.planner.describe.trace import LossFunction, disable_packing_detection, training_mode
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import (
    Kernel,
    MicrobatchTrace,
    ModelSpec,
    ParamSpec,
    TracePhase,
    UnitSpec,
    UntraceableSettings,
)
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.records.measurement import GradientShares
from fullshard.spec.run import Run, Strategy
from fullshard.spec.settings.train_section import RecomputeSection

# Raised by models and torch on tensors without values.
_TRACE_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


def _recomputes_to_trace(blocks: int) -> tuple[RecomputeSection, ...]:
    """Returns the settings to trace for a Run that leaves recompute to the planner.

    blocks: number of the model's blocks. If there are several, one setting recomputes half of them; its trace
        predicts other numbers: see `MicrobatchTrace.border`.
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
    batch: any nest of tensors with rows in dim 0, as many as you like; only shapes and dtypes matter. If its
        tensors differ in dim 0, it must be one microbatch. Unset: int64 `tokens` and `labels` of
        (microbatch, sequence_length).
    units: `units(name, module)` overrides the plan's unit policy, as in `shard`.
    device_type: the device of the kernels; unset, the plan's.
    attention_kernel: `Hardware.attention_kernel`, which decides what masked attention saves.

    Recompute settings that cannot be traced are left out, and listed in `ModelSpec.untraced`. Raises
    ShardError for a sharded model and for more `recompute.blocks` than it has, and TraceError if the first
    setting cannot be traced.

    >>> with torch.device("meta"):  # nothing is allocated
    ...     model = fs.DecoderModel(run.decoder_config)
    >>> spec = fs.describe(model, run, loss=fs.next_token_loss, device_type="cpu")
    >>> spec.numel == sum(parameter.numel() for parameter in model.parameters())
    True
    """
    recorder = build_recorder(model, plan, loss=loss, batch=batch, units=units, device_type=device_type)
    return build_spec(recorder, record_all_settings(recorder, plan, attention_kernel=attention_kernel))


def build_recorder(
    model: nn.Module,
    plan: Plan | Run,
    *,
    loss: LossFunction,
    batch: Any = None,
    units: Predicate | None = None,
    device_type: DeviceType | None = None,
) -> recordings.SettingsRecorder:
    """Returns the recorder of a model, with the arguments and errors of `describe`. Nothing is traced."""
    traced_plan, device = _plan_and_device_to_trace(plan, device_type)
    _check_not_sharded(model)
    section = traced_plan.run.sharding.units
    given = find_units(model, section, predicate=units)
    blocks = find_recompute_and_compile_blocks(model, units=given)
    divided = recordings.divided_dims(model, given, plan=traced_plan, device=device)
    fp8 = choose_fp8_linears(model, given, plan=traced_plan, blocks=blocks, divided=divided)
    check_recomputed_block_count(traced_plan.run.recompute, len(blocks))
    count, programs = len(blocks), CompiledPrograms()
    return recordings.SettingsRecorder(
        model, traced_plan, loss, batch, units, device, fp8, given, divided, count, programs
    )


def build_spec(
    recorder: recordings.SettingsRecorder, found: RunRecording, *, keep_all: bool = False
) -> ModelSpec:
    """Returns the spec of the recorder's model with the traces of `found`.

    keep_all: whether to keep each launch, also equal ones, and each moment of memory, also lower ones
    """
    model, plan, fp8 = recorder.model, recorder.plan, recorder.fp8
    table = KernelIndex(keep_all=keep_all)
    traces = [one.build_trace(table) for one in found.settings]
    buffers = (  # as in the traced copy, where each has a storage of its own
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        for one in model.buffers()
    )
    flops, active = _flops_and_parameters_per_token(
        traces[0],
        table.kernels,
        plan=plan,
        gradients=gradient_shares(model),
        attended=attention_window_share(model, sequence_length=plan.run.data.row_length),
        written_out=attention_flop_per_token(model, sequence_length=plan.run.data.row_length),
    )
    return ModelSpec(
        name=type(model).__name__,
        device_type=recorder.device,
        sequence_length=plan.run.data.sequence_length,
        precision=plan.precision,
        units=tuple(_unit_and_parameter_specs(recorder.given, model, fp8=fp8, divided=recorder.divided)),
        scalars=sum(parameter.ndim == 0 for parameter in model.parameters()),
        buffer_bytes=sum(one.untyped_storage().nbytes() for one in buffers),
        loss_chunk=found.loss_chunk,
        context_parallel=plan.context_parallel,
        tensor_parallel=plan.tensor_parallel,
        expert_parallel=plan.expert_parallel,
        kernels=table.kernels,
        traces=tuple(traces),
        untraced=tuple(found.untraced),
        flops_per_token=flops,
        active_numel=active,
        fp8=() if fp8 is None else fp8.shares,
    )


def _unit_and_parameter_specs(
    units: Sequence[Unit], model: nn.Module, *, fp8: Fp8Choice | None, divided: Mapping[str, int | None]
) -> Iterator[UnitSpec]:
    """Yields the spec of each unit. `divided`: the dim in which ranks divide each parameter, if any."""
    in_fp8 = recordings.ids_of_parameters_gathered_in_fp8(fp8)
    hidden, packed = set(map(id, find_hidden_matrices(model).values())), find_packed_weights(model)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    registered = [module for module in model.modules() if any(module is unit.modules[0] for unit in units)]
    for unit in units:
        yield UnitSpec(
            name=unit.name,
            position=next(i for i, module in enumerate(registered) if module is unit.modules[0]),
            parameters=tuple(
                ParamSpec(
                    name=name,
                    shape=tuple(parameter.shape),
                    itemsize=parameter.itemsize,
                    is_floating=parameter.is_floating_point(),
                    requires_grad=parameter.requires_grad,
                    is_gathered_in_fp8=id(parameter) in in_fp8,
                    is_hidden_matrix=id(parameter) in hidden,
                    aliases=tuple(alias for alias in names[id(parameter)] if alias != name),
                    divided_dim=divided.get(name),
                    packed_columns=packed[name].shape[-1] if name in packed else None,
                )
                for name, parameter in unit.parameters.items()
            ),
            is_block=unit.is_block,
            kept=unit.is_root or unit.keep_until_backward,
            override=unit.override,
            is_embedding=unit.is_embedding,
            has_experts=unit.has_experts,
        )


def _check_not_sharded(model: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ShardError(
            f"{type(model).__name__} is sharded already.",
            why="each rank has only a part of it",
            fix="describe the model before shard(model, plan)",
        )


def record_all_settings(
    recorder: recordings.SettingsRecorder, plan: Plan | Run, *, attention_kernel: AttentionKernel
) -> RunRecording:
    """Returns the recordings under all (recompute, compiled), and the settings that cannot be traced.

    Raises TraceError if the first cannot be traced: the others run the same forward.
    """
    settings = _settings_to_trace(plan, recorder.device, blocks=recorder.blocks)
    kernels = emulate_cuda_kernels(attention_kernel) if recorder.device == "cuda" else nullcontext()
    found, untraced = list[recordings.SettingRecording](), list[UntraceableSettings]()
    with disable_packing_detection(), training_mode(recorder.model), kernels:
        for recompute, compiled in settings:
            try:
                found += recorder.record_setting(recompute, compiled=compiled)
            except _TRACE_FAILURES as error:
                if not found:
                    raise _trace_error(
                        recorder.model, error, given_batch=recorder.batch is not None
                    ) from error
                reason = _error_text(error)
                untraced.append(UntraceableSettings(recompute=recompute, compiled=compiled, reason=reason))
    return RunRecording(found, untraced, recorder.loss_chunk)


def _trace_error(model: nn.Module, error: Exception, *, given_batch: bool) -> TraceError:
    """Returns the error for a model that cannot be traced. `given_batch`: whether the user gave the batch."""
    name = type(model).__name__
    if isinstance(error, recordings.NEEDS_VALUES):
        return TraceError(
            f"{name} cannot be described on tensors without values.",
            got=_error_text(error),
            why="its shapes, or the operations that it runs, depend on the values of tensors",
            fix="describe(..., batch=one of your microbatches, with values)",
        )
    if given_batch:
        return TraceError(f"{name} cannot be described on the given batch.", got=_error_text(error))
    return TraceError(
        f"{name} cannot be described on a batch of int64 tokens and labels.",
        got=_error_text(error),
        why="no batch was given, so one was made up",
        fix="describe(..., batch=one of your microbatches), and loss=your_loss if it takes more",
    )


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _settings_to_trace(
    plan: Plan | Run, device: DeviceType, *, blocks: int
) -> list[tuple[RecomputeSection, bool]]:
    """Returns (recompute, compiled): a plan's; of a run, those that it sets, or all if they are auto."""
    if isinstance(plan, Plan):
        return [(plan.run.recompute, plan.run.run.compile is True)]
    asked = plan.recompute
    recomputes = _recomputes_to_trace(blocks) if asked.mode == "auto" else (asked,)
    return list(product(recomputes, plan.compile_choices(device)))


def _plan_and_device_to_trace(plan: Plan | Run, device_type: DeviceType | None) -> tuple[Plan, DeviceType]:
    """Returns a plan with the settings that a trace depends on, and its device.

    The plan is the given one. For a Run, it is of as few ranks as can share its sequences, matmuls and
    experts, with one microbatch per step and without offload.
    """
    if isinstance(plan, Plan):
        return plan, device_type or plan.device
    run, device = plan, device_type or ("cuda" if plan.run.device == "cuda" else "cpu")
    microbatch, sharding = run.train.microbatch or 1, run.sharding
    experts = 1 if sharding.expert_parallel == "auto" else sharding.expert_parallel
    ranks = lcm(sharding.ranks_per_sequence, experts)
    batch = microbatch * (ranks // sharding.ranks_per_sequence)
    # A trace covers the whole model on one device, unless ranks share its sequences or matmuls. Offload is
    # derived from it.
    sections = {
        "train": {"microbatch": microbatch, "global_batch": batch},
        "sharding": {"strategy": Strategy.FULL_SHARD, "shard_degree": None},
        "offload": {"tier": "none"},
    }
    return Plan.from_run(run.with_settings(sections), world_size=ranks, device=device), device


def _flops_and_parameters_per_token(
    trace: MicrobatchTrace,
    kernels: Sequence[Kernel],
    *,
    plan: Plan,
    gradients: GradientShares,
    attended: float,
    written_out: float,
) -> tuple[float, int | None]:
    """Returns (FLOP of forward and backward, active parameters) per token: see `model_flops_per_token`.

    The parameters are None if attention may be among the matmuls, in unknown part.

    attended: see `attention_window_share`
    written_out: FLOP per token of attention that is written out in matmuls, if no kernel computes it
    """
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
    is_known = bool(attention or written_out)
    if not attention:
        attention = min(matmul, written_out * tokens)
        matmul -= attention
    total = gradients.forward_and_backward_flop(matmul=matmul, attention=attended * attention)
    return total / tokens, round(matmul / tokens / 2) if is_known else None


def _forward_phases_with_counts(trace: MicrobatchTrace) -> Iterator[tuple[TracePhase, int]]:
    for phase in trace.phases:
        if phase.event in ("end_forward", "pre_backward"):
            return
        inside = (r.times for r in trace.repeats if r.first <= phase.unit < r.first + r.units)
        yield phase, next(inside, 1)

"""Recordings of a model's microbatches on fake tensors, under each setting that a spec has a trace of."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fullshard.distributed.sequence_parts import SequencePart
from fullshard.distributed.tensors import is_experts, is_tensor_wrapper_subclass
from fullshard.parallel.activation_offload import CpuHostCopier, FakeReportingCopier
from fullshard.parallel.fp8 import Fp8Choice, convert_linears_to_fp8, fake_fp8_weight
from fullshard.parallel.model_parallel import divide_model_and_return_split_dims
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.parallel.recompute import apply_activation_offload, apply_recompute
from fullshard.parallel.units import (
    Predicate,
    Unit,
    find_blocks_with_units_inside,
    find_recompute_and_compile_blocks,
    find_units,
)
from fullshard.planner.describe import extrapolation, trace
from fullshard.planner.describe.emulation import CompiledBlocks, CompiledPrograms
from fullshard.planner.describe.operations import (
    PhaseRecord,
    distinct_storage_bytes,
    list_tensors,
)
from fullshard.spec.model import LinearInMicrobatch, MicrobatchTrace, RepeatedUnits
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.torch_private import fake_tensors

LOW = 2
"""Sequences of the smaller of the two microbatches that are recorded."""
NEEDS_VALUES = (fake_tensors.DataDependentOutputException, fake_tensors.DynamicOutputShapeException)
"""Raised by fake tensors where a shape or a number depends on values."""


@dataclass
class MicrobatchRecording:
    """Recordings of one microbatch size."""

    recording: list[PhaseRecord]  # phases without earlier gradients
    accumulating: list[PhaseRecord]  # with earlier gradients; empty if FSDP2 adds them, or if not recorded
    batch_bytes: int  # bytes of the microbatch's storages
    compiled_units: frozenset[int] = frozenset()  # indices of units inside compiled blocks
    # these indices if the run were compiled; None if compiled blocks would do other work than the eager ones
    units_if_compiled: frozenset[int] | None = None

    @property
    def all_phases(self) -> list[PhaseRecord]:
        return [*self.recording, *self.accumulating]


@dataclass(frozen=True)
class SettingRecording:
    """Recordings of a recompute setting, eager or compiled.

    plan: the plan with the setting
    shortened: blocks that were removed before the recording
    blocks: number of the model's blocks
    low, high: at 2 and 3 sequences; the same one if it is valid for `microbatch` only (else None)
    """

    plan: Plan
    shortened: extrapolation.BlockTruncation
    blocks: int
    low: MicrobatchRecording
    high: MicrobatchRecording
    microbatch: int | None = None

    def as_compiled(self, plan: Plan) -> "SettingRecording | None":
        """Returns these recordings of eager blocks as those of compiled ones; None if those do other work."""
        low, high = self.low.units_if_compiled, self.high.units_if_compiled
        if low is None or high is None:
            return None
        return replace(
            self,
            plan=plan,
            low=replace(self.low, compiled_units=low),
            high=replace(self.high, compiled_units=high),
        )

    def build_trace(self, table: extrapolation.KernelIndex) -> MicrobatchTrace:
        """Returns the trace, whose kernels are counted in `table`."""
        low, high, first = self.low, self.high, self.microbatch or LOW
        grows = high.batch_bytes - low.batch_bytes
        merge = partial(
            extrapolation.merge_recordings,
            low_microbatch=first,
            table=table,
            compiled_units=low.compiled_units,
        )
        return MicrobatchTrace(
            recompute=self.plan.run.recompute,
            compiled=self.plan.run.run.compile is True,
            microbatch=self.microbatch,
            batch_bytes=LinearInMicrobatch(low.batch_bytes - grows * first, grows),
            phases=merge(low.recording, high.recording),
            accumulating=merge(low.accumulating, high.accumulating),
            repeats=self.shortened.repeats,
            blocks=self.blocks,
            border=self.shortened.border,
        )


@dataclass
class SettingsRecorder:
    """Records microbatches of one model under each recompute setting in turn."""

    model: nn.Module
    plan: Plan
    loss: trace.LossFunction
    batch: Any
    predicate: Predicate | None
    device: DeviceType
    fp8: Fp8Choice | None
    given: Sequence[Unit]
    divided: Mapping[str, int | None]  # the dim in which ranks divide each parameter, as of `divided_dims`
    blocks: int  # number of the model's blocks
    programs: CompiledPrograms
    loss_chunk: int = 0
    keep_integers: bool = False  # whether integers of the batch keep their values
    # for eager and compiled: whether 2 and 3 sequences fail to predict 1; unknown before the first trace
    _single_differs: dict[bool, bool] = field(default_factory=dict[bool, bool])
    # the model without repeated blocks, by `recompute.blocks`
    _short: dict[int | None, Any] = field(default_factory=dict[int | None, Any])
    _eager: dict[RecomputeSection, list[SettingRecording]] = field(
        default_factory=dict[RecomputeSection, list[SettingRecording]]
    )

    def record_setting(self, recompute: RecomputeSection, *, compiled: bool) -> list[SettingRecording]:
        """Returns the recordings under one recompute setting, eager or compiled.

        Integers of the batch keep their values if the model's flow or shapes depend on these.
        """
        try:
            found = self._record_setting(recompute, compiled=compiled)
        except NEEDS_VALUES:
            if self.keep_integers or not any(map(trace.is_integer_with_values, list_tensors(self.batch))):
                raise
            self.keep_integers = True
            found = self._record_setting(recompute, compiled=compiled)
        if not compiled:
            self._eager[recompute] = found
        return found

    def _record_setting(self, recompute: RecomputeSection, *, compiled: bool) -> list[SettingRecording]:
        """Returns the recordings under one setting: one for any microbatch, or two.

        The second is of a single sequence, if the first does not predict it. If the trace changes structure
        with the microbatch, or the batch lacks this dim, the only one is of the plan's own microbatch.
        Compiled blocks may have the eager recordings.
        """
        run = self.plan.run.with_settings({"run": {"compile": compiled}})
        plan = self.plan.model_copy(update={"run": run.model_copy(update={"recompute": recompute})})
        eager = self._eager.get(recompute, []) if compiled else []
        equal = [one for one in (own.as_compiled(plan) for own in eager) if one is not None]
        if equal and len(equal) == len(eager):
            return equal
        for short in (True, False):
            record, shortened = self._make_microbatch_recorder(plan, short=short)
            if record is None:
                continue
            keep = partial(SettingRecording, plan, shortened, self.blocks)
            if self.batch is None or trace.count_batch_rows(self.batch, plan) is not None:
                low, high = record(LOW), record(LOW + 1)
                # Modules may keep states of one microbatch, which the next one frees.
                same = extrapolation.has_same_structure(low.all_phases, high.all_phases)
                if same and _has_equal_periods(low.recording, shortened.repeats):
                    found = [keep(low, high)]
                    if self._single_differs.get(compiled, True):
                        single = record(1, accumulates=False)
                        self._single_differs[compiled] = not extrapolation.can_extrapolate_to_smaller(
                            single.recording, low=low.recording, high=high.recording
                        )
                        if self._single_differs[compiled]:
                            single = record(1) if low.accumulating else single
                            found.append(keep(single, single, 1))
                    return found
            own = record(plan.microbatch)
            if _has_equal_periods(own.recording, shortened.repeats):
                return [keep(own, own, plan.microbatch)]
        raise AssertionError("a whole model is always traced")

    def _make_microbatch_recorder(
        self, plan: Plan, *, short: bool
    ) -> tuple[Callable[..., MicrobatchRecording] | None, extrapolation.BlockTruncation]:
        """Returns a function that records a microbatch of a given size on a fake copy of the model.

        It is None if the model should be truncated (`short`) and cannot be. With `accumulates=False`, it does
        not record the microbatch with earlier gradients.
        """
        model, shortened = self.model, extrapolation.BlockTruncation()
        if short:
            model, shortened = self._remove_repeated_blocks(plan)
        if short and not shortened.repeats:
            return None, shortened
        fakes = self.programs.fakes
        twin = _copy_as_fake_in_gather_dtypes(
            model, self.given, plan=plan, fakes=fakes, fp8=self.fp8, device=self.device
        )
        with fakes:
            divided = divide_model_and_return_split_dims(twin, plan, rank=0, group_name=str)
        found = find_units(twin, plan.run.sharding.units, predicate=self.predicate)
        _replace_parameters_by_parts(twin, divided, plan=plan)
        graphs = CompiledBlocks(self.programs)
        copier = FakeReportingCopier() if self.device == "cuda" else CpuHostCopier()
        repeated = find_recompute_and_compile_blocks(twin, units=found)
        of_blocks = plan.run.recompute
        if shortened.recomputed is not None:
            of_blocks = of_blocks.model_copy(update={"blocks": shortened.recomputed})
        pieces = find_blocks_with_units_inside(repeated, found)
        eager = pieces if of_blocks.mode == "selective" else set[nn.Module]()  # also if compiled
        if plan.run.run.compile is True:
            graphs.replace_forwards(repeated, of_blocks, pieces=pieces)
        else:
            apply_recompute(repeated, of_blocks)
        apply_activation_offload(repeated, of_blocks, device=self.device, copier=copier)

        def record_microbatch(microbatch: int, *, accumulates: bool = True) -> MicrobatchRecording:
            tracer = trace.MicrobatchTracer(
                twin, found, plan=plan, fakes=fakes, device=self.device, has_integers=self.keep_integers
            )
            self.programs.fuse = lambda: tracer.allocations.count_memory_as_compiled()
            if isinstance(copier, FakeReportingCopier):
                copier.report = lambda way, size: tracer.allocations.recorded[-1].copies.append((way, size))
            batch = self._make_rank_batch(plan, microbatch=microbatch, fakes=fakes)
            recording, accumulating = tracer.trace_microbatch(self.loss, batch), list[PhaseRecord]()
            self.loss_chunk = tracer.allocations.loss_chunk
            # If gradients are reduced in another dtype, FSDP2 takes them from autograd and adds them itself.
            if accumulates and plan.precision.param == plan.precision.reduce:
                tracer.allocate_gradients()
                accumulating = tracer.trace_microbatch(self.loss, batch)
                twin.zero_grad(set_to_none=True)
            size = distinct_storage_bytes(list_tensors(batch))
            inside = _find_units_inside(found, set(repeated) - graphs.failed - eager)
            if plan.run.run.compile is True:
                return MicrobatchRecording(recording, accumulating, size, inside)
            compiled = inside if set(repeated) == pieces else None
            return MicrobatchRecording(recording, accumulating, size, units_if_compiled=compiled)

        return record_microbatch, shortened

    def _remove_repeated_blocks(self, plan: Plan) -> tuple[nn.Module, extrapolation.BlockTruncation]:
        """Returns a copy of the model without repeated blocks, on the same tensors, and what was removed.

        There are no `repeats` if the model cannot be truncated.
        """
        limit = plan.run.recompute.blocks  # all else is equal for all settings
        if limit not in self._short:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
            section = plan.run.sharding.units
            units = find_units(model, section, predicate=self.predicate)
            blocks = find_recompute_and_compile_blocks(model, units=units)
            removed = extrapolation.truncate_repeated_blocks(model, units, blocks=blocks, plan=plan)
            left = [unit.name for unit in find_units(model, section, predicate=self.predicate)]
            kept = [unit.name for unit in self.given if unit.name not in removed.removed_units]
            self._short[limit] = model, removed if left == kept else extrapolation.BlockTruncation()
        return self._short[limit]

    def _make_rank_batch(self, plan: Plan, *, microbatch: int, fakes: fake_tensors.FakeTensorMode) -> Any:
        """Returns the traced rank's fake batch, with its part of each sequence if ranks share sequences."""
        whole = trace.make_fake_batch(
            self.batch, plan, microbatch=microbatch, fakes=fakes, keep_integers=self.keep_integers
        )
        with fakes:
            return whole if plan.context_parallel == 1 else SequencePart.from_plan(plan, 0).cut_batch(whole)


def _find_units_inside(units: Sequence[Unit], blocks: Collection[nn.Module]) -> frozenset[int]:
    inside = {module for block in blocks for module in block.modules()}
    return frozenset(i for i, unit in enumerate(units) if inside.issuperset(unit.modules))


def _has_equal_periods(recording: Sequence[PhaseRecord], repeats: Sequence[RepeatedUnits]) -> bool:
    """Returns whether each period of blocks that represents removed ones did the same as the next period."""

    def records_of_units(first: int, count: int) -> list[tuple[object, ...]]:
        return [
            (one.event, one.unit - first, one.event_change_count, one.changes, one.work, one.copies)
            for one in recording
            if first <= one.unit < first + count
        ]

    return all(
        records_of_units(repeat.first, repeat.units)
        == records_of_units(repeat.first + repeat.units, repeat.units)
        for repeat in repeats
    )


def _copy_as_fake_in_gather_dtypes(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    plan: Plan,
    fakes: fake_tensors.FakeTensorMode,
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
    in_fp8, memo = ids_of_parameters_gathered_in_fp8(fp8), dict[int, Any]()
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
    if fp8 is not None:
        modules = dict(twin.named_modules())
        linears = {name: cast(nn.Linear, modules[name]) for name in fp8.linears if name in modules}
        convert_linears_to_fp8(replace(fp8, linears=linears), device=device)
    return twin


def divided_dims(
    model: nn.Module, units: Sequence[Unit], *, plan: Plan, device: DeviceType
) -> dict[str, int | None]:
    """Returns the dim in which ranks divide each parameter, by name; empty if they divide none."""
    if not plan.has_expert_mesh and plan.tensor_parallel == 1:
        return {}
    fakes = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    twin = _copy_as_fake_in_gather_dtypes(model, units, plan=plan, fakes=fakes, fp8=None, device=device)
    with fakes:
        return divide_model_and_return_split_dims(twin, plan, rank=0, group_name=str)


def _replace_parameters_by_parts(twin: nn.Module, divided: Mapping[str, int | None], *, plan: Plan) -> None:
    for holder, module in twin.named_modules():
        ranks = plan.expert_parallel if is_experts(module) else plan.tensor_parallel
        for key, parameter in module.named_parameters(recurse=False):
            if (dim := divided.get(f"{holder}.{key}" if holder else key)) is not None:
                part = parameter.data.chunk(ranks, dim)[0].clone()
                if is_tensor_wrapper_subclass(type(part)):  # `data` would leave the wrapper's shape as it is
                    setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
                else:  # of all modules that share it
                    parameter.data = part


def ids_of_parameters_gathered_in_fp8(fp8: Fp8Choice | None) -> set[int]:
    if fp8 is None or fp8.scaling != "tensorwise":
        return set()
    return {id(module.weight) for module in fp8.linears.values()}

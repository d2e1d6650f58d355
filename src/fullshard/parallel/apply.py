"""The steps by which `fullshard.shard` applies a Plan to a module, in the order that must hold.

fp8 matmuls, then recompute, then compile (both per block), then `fully_shard` from the innermost unit to the
root, then values, then what is gathered in fp8.
The optimizer is built afterwards: one built earlier would hold parameters that the model no longer has.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from fullshard.distributed.agreement import rank, world_size
from fullshard.distributed.collectives import replace_gloo_collectives
from fullshard.distributed.compression import UnitCommunication
from fullshard.distributed.tensors import local_tensor
from fullshard.distributed.unit_order import (
    UnitAndParameterNames,
    UnitOrderRecorder,
    attach_unit_order_recorder,
)
from fullshard.errors import ShardError
from fullshard.parallel import compile as block_compiler
from fullshard.parallel.communication import install_hook, set_hooks, settle_ranks_per_node
from fullshard.parallel.fp8 import Fp8Choice, check_fp8_device, choose_fp8_linears, convert_linears_to_fp8
from fullshard.parallel.materialize import replace_parameters_by_meta
from fullshard.parallel.mesh import build_mesh, split_inner_axis
from fullshard.parallel.model_parallel import SplitDims, split_over_inner_axis
from fullshard.parallel.model_parameters import TORCH_DTYPE, persistent_buffers
from fullshard.parallel.recompute import apply_activation_offload, apply_recompute
from fullshard.parallel.unit_events import install_unit_recording_and_checks
from fullshard.parallel.units import (
    Predicate,
    Unit,
    check_adapters_are_with_their_base,
    check_experts_are_separate,
    find_blocks_with_units_inside,
    find_recompute_and_compile_blocks,
    find_units,
)
from fullshard.quantities import join_names
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.settings.model_section import expert_shard_dim
from fullshard.spec.settings.run_checks import check_settings_work_together
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.torch_private import fsdp
from fullshard.torch_private.fsdp import list_units
from fullshard.torch_private.tensors import BatchNorm, tree_leaves, version

logger = logging.getLogger("fullshard")


class _MeshKind(NamedTuple):
    of_experts: bool
    is_sharded: bool

    @classmethod
    def of_unit(cls, unit: Unit, plan: Plan) -> Self:
        return cls(unit.has_experts and plan.has_expert_mesh, unit.is_sharded)


@dataclass(frozen=True)
class PreparedSharding:
    """The choices with which a model is sharded by a plan."""

    plan: Plan
    device: DeviceType  # whose kernels run: the plan's, except in a test on fake tensors
    methods: Sequence[str]  # names of methods that compute with the parameters, besides `forward`
    units: list[Unit]
    blocks: Sequence[nn.Module]  # the modules that recompute and the compiler apply to
    meshes: Mapping[_MeshKind, DeviceMesh]
    fp8: Fp8Choice | None  # the modules that are multiplied in fp8; None if the precision is without fp8
    split: SplitDims  # of all parameters over `tp`, or of experts over `ep`; empty if the mesh has neither

    def mesh_of_unit(self, unit: Unit) -> DeviceMesh:
        return self.meshes[_MeshKind.of_unit(unit, self.plan)]


def choose_sharding(
    model: nn.Module,
    plan: Plan,
    *,
    units: Predicate | None = None,
    methods: Sequence[str] = (),
    split: SplitDims | None = None,
) -> PreparedSharding:
    """Chooses units, blocks and meshes, without changing the model. Raises like `fullshard.shard`."""
    check_settings_work_together(plan.run)
    _check_not_sharded(model)
    plan = settle_ranks_per_node(plan)
    is_split = plan.tensor_parallel > 1 or plan.expert_parallel > 1
    assert is_split == bool(split), "matmuls or experts are divided, or no parameter is"
    for method in methods:
        if not callable(getattr(model, method, None)):
            name = type(model).__name__
            raise ShardError(f"{name} has no method {method!r}.", got=f"methods = {list(methods)}")
    section = plan.run.sharding.units
    found = find_units(model, section, predicate=units)
    repeated = find_recompute_and_compile_blocks(model, units=found)
    check_adapters_are_with_their_base(found, model)
    if plan.has_expert_mesh:
        check_experts_are_separate(found, model)
    kinds = sorted({_MeshKind.of_unit(unit, plan) for unit in found})  # all ranks build them in one order
    meshes = {one: build_mesh(plan, of_experts=one.of_experts, is_sharded=one.is_sharded) for one in kinds}
    check_fp8_device(plan)
    _check_batch_norm_dtypes_on_cpu(model, found, plan=plan)
    fp8 = choose_fp8_linears(model, found, plan=plan, blocks=repeated, divided=split or {})
    return PreparedSharding(plan, plan.device, methods, found, repeated, meshes, fp8, split or {})


def apply_recompute_and_fsdp_on_meta(model: nn.Module, prepared: PreparedSharding) -> UnitOrderRecorder:
    """Applies fp8 matmuls, recompute, compilation and FSDP2 to `model`. Returns the order of its units.

    All shards are on the meta device.
    """
    plan, units, device = prepared.plan, prepared.units, prepared.device
    replace_parameters_by_meta(model, units, plan=plan)
    for unit in units:
        mesh = prepared.mesh_of_unit(unit)
        if split_inner_axis(mesh)[1] is not None:
            split_over_inner_axis(model, unit, split=prepared.split, mesh=mesh)
    if prepared.fp8 is not None:
        convert_linears_to_fp8(prepared.fp8, device=device)
    compiled = _apply_recompute_and_compile(prepared.blocks, units, plan=plan, device=device)
    block_compiler.store_compiled_forwards(model, compiled)
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    names, hooks = list[UnitAndParameterNames](), dict[str, UnitCommunication]()
    order = UnitOrderRecorder(names)
    for unit in units:
        mesh, _ = split_inner_axis(prepared.mesh_of_unit(unit))
        _fully_shard_unit(unit, plan, mesh=mesh, scalars=scalars)
        engine_module, settings = cast(FSDPModule, unit.modules[0]), unit.settings(plan)
        if (hook := install_hook(engine_module, plan, settings=settings, number=len(names))) is not None:
            hooks[unit.name] = hook
        names.append(
            install_unit_recording_and_checks(unit.modules, unit=len(names), name=unit.name, order=order)
        )
        _reduce_unreached_experts_as_zeros(unit)
    names.append(
        UnitAndParameterNames("scalars", [key for key, one in model.named_parameters() if one.ndim == 0])
    )
    attach_unit_order_recorder(model, order)
    set_hooks(model, hooks)
    model.forward = _wrap_forward_to_explain_ungathered(_log_changed_buffers_once(model, model.forward))
    for method in prepared.methods:
        register_fsdp_forward_method(model, method)
    return order


def _check_not_sharded(model: nn.Module) -> None:
    name = type(model).__name__
    if list_units(model):
        raise ShardError(f"{name} is sharded already.", fix="shard a model once")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ShardError(
            f"{name} holds DTensors already.",
            why="sharding.tensor_parallel makes them itself",
            fix="shard a model of plain parameters",
        )


def _check_batch_norm_dtypes_on_cpu(model: nn.Module, units: Sequence[Unit], *, plan: Plan) -> None:
    """Raises ShardError for a batch norm whose parameters are gathered in a dtype that CPUs do not take."""
    norms = {
        module.weight: module.running_mean.dtype
        for module in model.modules()
        if isinstance(module, BatchNorm) and isinstance(module.running_mean, Tensor)
    }
    for unit in units if plan.device == "cpu" else ():
        dtype = unit.settings(plan).precision.param
        same = TORCH_DTYPE[dtype]
        name = next((n for n, p in unit.parameters.items() if norms.get(p, same) != same), None)
        if dtype != "fp32" and name is not None:
            raise ShardError(
                f"torch cannot compute the batch norm of {name} in {dtype} on a CPU.",
                why="its running statistics stay in fp32, and the CPU takes parameters of their dtype alone",
                fix=f'precision.mode = "fp32", or precision = "fp32" for the unit {unit.name} in '
                "sharding.units.overrides",
            )


def _apply_recompute_and_compile(
    blocks: Sequence[nn.Module], units: Sequence[Unit], *, plan: Plan, device: DeviceType
) -> list[block_compiler.CompiledForward]:
    section, compiled = plan.run.recompute, list[block_compiler.CompiledForward]()
    if plan.run.run.compile is True:
        compiled = _recompute_and_compile(blocks, units, section=section)
    else:
        apply_recompute(blocks, section)
    apply_activation_offload(blocks, section, device=device)
    return compiled


def _recompute_and_compile(
    blocks: Sequence[nn.Module], units: Sequence[Unit], *, section: RecomputeSection
) -> list[block_compiler.CompiledForward]:
    pieces = find_blocks_with_units_inside(blocks, units)
    whole = [block for block in blocks if block not in pieces]
    # The compiler recomputes a whole graph or none. So a block in pieces is compiled first, and recomputed
    # around them; others are compiled with recompute. Selective recompute must see operations, which compiled
    # pieces hide.
    compiled = list[block_compiler.CompiledForward]()
    if section.mode != "selective":
        compiled = block_compiler.compile_blocks([one for one in blocks if one in pieces], pieces=pieces)
    elif pieces:
        kinds = ", ".join(sorted({type(block).__name__ for block in pieces}))
        warnings.warn(
            f"{kinds} runs eagerly: it holds units of its own, and is recomputed selectively. The compiler "
            'takes a recomputed block whole or not at all: recompute.mode = "full" or "none" compiles it in '
            "pieces.",
            block_compiler.EagerBlockWarning,
            stacklevel=2,
        )
    apply_recompute(blocks, section, compiled=set(whole))
    return compiled + block_compiler.compile_blocks(whole, pieces=pieces)


@fsdp.cut_own_chunks()
def _fully_shard_unit(unit: Unit, plan: Plan, *, mesh: DeviceMesh, scalars: set[nn.Parameter]) -> None:
    settings = unit.settings(plan)
    dtypes, modules = settings.precision, list(unit.modules)
    engine = cast(Callable[..., Any], fully_shard)  # its type allows a list of modules only in an overload

    def place(parameter: nn.Parameter) -> Shard:
        shape, is_packed = tuple(local_tensor(parameter).shape), parameter.dtype == torch.uint8
        return Shard(expert_shard_dim(shape, settings.shard_degree, keeps_rows=is_packed))

    try:
        engine(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPE[dtypes.param],
                reduce_dtype=TORCH_DTYPE[dtypes.reduce],
                cast_forward_inputs=dtypes.cast_inputs,
            ),
            ignored_params=scalars or None,
            shard_placement_fn=place if settings.shards_any_dim else None,
        )
    except RuntimeError as error:
        integers = {one.dtype for m in modules for one in m.parameters() if not one.is_floating_point()}
        if not integers:
            raise
        raise ShardError(
            f"torch {torch.__version__} cannot shard the integer parameters of {unit.name}.",
            got=", ".join(map(str, integers)),
            why=str(error),
            fix="a newer torch, or register them as buffers",
        ) from error
    gather_before_backward_of_each_module(modules)
    engine_module = cast(FSDPModule, modules[0])
    if dtypes.cast_inputs:
        fsdp.cast_recomputed_inputs(modules, TORCH_DTYPE[dtypes.param])
    if plan.tensor_parallel > 1 or (plan.expert_parallel > 1 and unit.has_experts):
        for parameter in fsdp.engine_parameters(engine_module):  # See [Note: DTensors are storage]
            fsdp.compute_with_plain_tensor(parameter)
    if not settings.gathers_in_backward:
        engine_module.set_unshard_in_backward(False)
    if plan.device == "cpu":
        replace_gloo_collectives(engine_module)


def _reduce_unreached_experts_as_zeros(unit: Unit) -> None:
    """Makes each rank reduce the gradients of experts that none of its tokens reached, as zeros."""
    if not unit.may_lack_gradients:
        return
    engine_module = cast(FSDPModule, unit.modules[0])
    if hasattr(engine_module, "set_reduce_scatter_unused_params"):
        engine_module.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        fsdp.reduce_missing_gradients_as_zeros(engine_module)


_UNGATHERED = ("mixed torch.Tensor and DTensor", "storage of size 0", "its data is not allocated yet")


@contextmanager
def explain_ungathered_parameters(what: str, *, why: str, fix: str) -> Generator[None]:
    """Context that raises ShardError where torch meets a parameter that is not gathered (a shard, freed)."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNGATHERED):
            raise
        raise ShardError(what, got=str(error).splitlines()[0], why=why, fix=fix) from error


def _wrap_forward_to_explain_ungathered(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_explaining_ungathered(*args: Any, **kwargs: Any) -> Any:  # signature: the model's own
        with explain_ungathered_parameters(
            "the model computes with a parameter that is not gathered at the time.",
            why="a unit is gathered while its modules run; the line above reads a weight elsewhere",
            fix="call the module that holds it, or keep its unit gathered after forward: sharding.units."
            'overrides = [{match = "<the unit>", reshard_after_forward = false}]',
        ):
            return forward(*args, **kwargs)

    return forward_explaining_ungathered


def _log_changed_buffers_once(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` so that the first one in training mode logs the buffers that it changes.

    Each rank changes them by its own batch, and a checkpoint has those of one rank.
    """
    is_first = world_size() > 1 and rank() == 0

    @wraps(forward)
    def forward_logging_changed_buffers(*args: Any, **kwargs: Any) -> Any:  # signature: the model's own
        nonlocal is_first
        if not (is_first and model.training):
            return forward(*args, **kwargs)
        is_first = False
        own = persistent_buffers(model)  # kept alive, so that no id is used twice
        before = {name: (id(one), version(one)) for name, one in own.items()}
        result = forward(*args, **kwargs)
        now = persistent_buffers(model).items()
        if changed := [name for name, one in now if before.get(name) != (id(one), version(one))]:
            logger.warning(
                "forward changes %d buffers, on each rank by its own batch, and a checkpoint has one rank's: "
                "%s. All-reduce what they follow; torch.nn.SyncBatchNorm does so on GPUs",
                len(changed),
                join_names(changed),
            )
        return result

    return forward_logging_changed_buffers


def sort_units_by_registration(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Sorts units in order of registration, the root first, since its pre-forward runs before all others."""
    by_module = {unit.modules[0]: unit for unit in units}
    return [by_module[module] for module in model.modules() if module in by_module]


def gather_before_backward_of_each_module(modules: Sequence[nn.Module]) -> None:
    """Makes one FSDP2 unit of several modules gather before the backward of whichever comes first.

    FSDP2 watches only the outputs of the module that ran last. If these need no gradient (a frozen embedding
    of positions), or the loss does not depend on them (a pooler), the other modules would run their backward
    on parameters that were freed after forward.
    """
    unit = cast(FSDPModule, modules[0])
    if len(modules) == 1 or not fsdp.parameter_groups(unit):
        return
    gather_if_freed = partial(fsdp.gather_now_for_backward, unit)

    def watch_outputs(_module: nn.Module, _args: Any, output: Any) -> None:  # signature: torch's forward hook
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(gather_if_freed)

    for module in modules:
        module.register_forward_hook(watch_outputs)

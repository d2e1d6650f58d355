"""Gradients after backward (norms, scaling, averaging of scalars), and the update by the optimizer.

[Note: decided on the device]
torch's fused Adam and AdamW take two tensors, made for `torch.amp`: they divide the gradient by `grad_scale`,
and change nothing, not even their step counts, where `found_inf` is 1. So the host can launch the update
before anyone knows whether the step is skipped, and by how much the gradient is clipped. So do the
`StochasticAdamW` of bf16_pure, `MuonAdamW` and `Adafactor`. No other optimizer takes both: its host waits for
the decision. See `host_waits_before_each_update`.

[Note: local tensors]
Over DTensors, an operation on a list of parameters costs the host tens of microseconds for each of them, and
leaks memory on some releases of torch. The update is independent for each element, so torch's fused Adam and
AdamW run on this rank's part of each parameter. `optimizer.state` stays keyed by parameter, with DTensors.
An optimizer with hooks of the user's steps over DTensors, since a hook may compute with whole parameters.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.distributed.agreement import rank, world_size
from fullshard.distributed.collectives import all_reduce_together
from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.tensors import dtensor_from_local_part, local_tensor
from fullshard.distributed.unit_order import find_unit_order_recorder
from fullshard.errors import TrainError
from fullshard.models.loss import Loss, loss_sum_and_count
from fullshard.offload.adamw import StreamingAdamW
from fullshard.parallel.mesh import TENSOR_AXIS
from fullshard.quantities import join_names
from fullshard.spec.plan import Plan
from fullshard.torch_private.fsdp import engine_parameters, list_units, unsharded_parameter_or_none
from fullshard.torch_private.tensors import foreach_multiply, foreach_norm, step_hooks
from fullshard.training.adafactor import Adafactor
from fullshard.training.figures import StepDecision, copy_to_device
from fullshard.training.low_bit_adamw import StochasticAdamW, local_part_of
from fullshard.training.muon import MuonAdamW

_OWN = (StochasticAdamW, MuonAdamW, Adafactor)  # of this package; they can skip on the device
_ALONE_BYTES = 1 << 20  # gradients that are summed in place; a copy of smaller ones takes little memory


def list_gradients(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the gradients of `parameters` that have one, including those of offloaded parameters."""
    if isinstance(optimizer, StreamingAdamW):
        return [gradient for gradient in map(optimizer.find_gradient, parameters) if gradient is not None]
    return [p.grad for p in parameters if p.grad is not None]


def refuse_parameters_outside_model(loss: Loss, model: nn.Module) -> Loss:
    """Returns `loss`; its first call raises TrainError if it depends on trained parameters outside `model`.

    No step would update or save these, such as those of a loss that is a module, or of a head beside it.
    """
    is_checked = False

    def checked(of_model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | int]:
        nonlocal is_checked
        value = loss(of_model, batch)
        if not is_checked:
            is_checked = True
            _raise_for_other_parameters(loss_sum_and_count(value)[0], model, loss=loss)
        return value

    return checked


def _raise_for_other_parameters(total: Tensor, model: nn.Module, *, loss: Loss) -> None:
    own = {
        id(unsharded_parameter_or_none(one)) for unit in list_units(model) for one in engine_parameters(unit)
    }
    own |= {id(one) for one in model.parameters()}
    if others := [one for one in _list_parameters_in_graph(total) if id(one) not in own]:
        known = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        names = {id(one): f"{type(loss).__name__}.{name}" for name, one in known}
        raise TrainError(
            "the loss depends on trained parameters that are not the model's.",
            got=join_names([names.get(id(one), f"one of shape {list(one.shape)}") for one in others]),
            why="only the model's parameters are sharded, updated and saved",
            fix="before fullshard.shard, register their module in the model, whose forward then calls it; "
            "or requires_grad_(False), if they are not to be trained",
        )


def _list_parameters_in_graph(total: Tensor) -> list[nn.Parameter]:
    """Returns the parameters to which the backward of `total` would bring a gradient."""
    nodes: list[Any] = [total.grad_fn]
    seen, found = {None, total.grad_fn}, list[nn.Parameter]()
    while nodes:
        node = nodes.pop()
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            found.append(leaf)
        following = {one for one, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following
    return found


@torch.no_grad()
def average_scalar_gradients(model: nn.Module) -> None:
    """Averages gradients of scalars (not sharded by FSDP2) over ranks in place. A missing one counts as 0."""
    scalars = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    if world_size() == 1 or not any(one.requires_grad for one in scalars):
        return
    if (order := find_unit_order_recorder(model)) is not None:
        order.note_scalar_reduction(without=[i for i, one in enumerate(scalars) if one.grad is None])
    none = torch.zeros((), device=scalars[0].device)
    flat = torch.stack([none if one.grad is None else one.grad.float() for one in scalars])
    with TimedRange("all_reduce"):
        dist.all_reduce(flat)
    for scalar, total in zip(scalars, flat.unbind(), strict=True):
        if scalar.grad is not None:
            scalar.grad.copy_(total / world_size())


@torch.no_grad()
def sum_gradients_over_tensor_axis(gradients: Sequence[Tensor]) -> None:
    """Sums the gradients of parameters that all ranks of the `tp` axis have whole. In place.

    Each of these ranks computes with them for its own tokens or heads alone. Small ones share one all-reduce
    per dtype.
    """
    groups = defaultdict[tuple[torch.dtype, dist.ProcessGroup], list[Tensor]](list)
    for one in gradients:
        if not isinstance(one, DTensor) or TENSOR_AXIS not in (one.device_mesh.mesh_dim_names or ()):
            continue
        if one.placements[-1].is_replicate():  # `tp` is the last axis
            vars(one).pop("norm_on_device", None)
            part, group = one.to_local(), one.device_mesh.get_group(TENSOR_AXIS)
            if part.nbytes >= _ALONE_BYTES and part.is_contiguous():
                dist.all_reduce(part, group=group)
            else:
                groups[part.dtype, group].append(part)
    for (_, group), parts in groups.items():
        all_reduce_together(parts, group)


@torch.no_grad()
def local_gradient_norms(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the L2 norm of this rank's part of each gradient, in fp32 even for bf16 gradients.

    The norm of an offloaded gradient is known, and on the device: see `HostGradients`.
    """
    known = [getattr(gradient, "norm_on_device", None) for gradient in gradients]
    others = [local_tensor(one) for one, norm in zip(gradients, known, strict=True) if norm is None]
    computed = iter(foreach_norm(others, 2, dtype=torch.float32) if others else ())
    return [next(computed) if norm is None else norm for norm in known]


def select_tensors_counted_on_this_rank(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns those of `tensors` (gradients, or parameters that have one) whose norms this rank counts.

    If several ranks have the same part of a tensor, one of them counts it. Such ranks share their tensors, so
    that each reads about the same number of elements.
    """
    by_replicas = defaultdict[tuple[int, int], list[Tensor]](list)
    for tensor in tensors:
        is_dtensor = isinstance(tensor, DTensor)
        key = _replica_place(tensor.device_mesh, tensor.placements) if is_dtensor else (rank(), world_size())
        by_replicas[key].append(tensor)
    counted = list[Tensor]()
    for (index, replicas), same in by_replicas.items():
        sizes = [tensor.numel() for tensor in same]
        middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
        total = sum(sizes) or 1
        counted += [one for one, at in zip(same, middles, strict=True) if int(replicas * at / total) == index]
    return counted


@torch.no_grad()
def local_share_of_squared_norm(norms_counted_here: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns this rank's share of the squared global norm, which is the sum of all ranks' shares.

    norms_counted_here: L2 norm of this rank's part of each of `select_tensors_counted_on_this_rank`
    device: the result's; some norms may be on the host
    """
    share = torch.zeros((), dtype=torch.float64, device=device)
    by_device = defaultdict[torch.device, list[Tensor]](list)
    for norm in norms_counted_here:
        by_device[norm.device].append(norm)
    for norms in by_device.values():
        share += copy_to_device(torch.stack(norms).double().square().sum(), device)
    return share


@lru_cache(maxsize=64)  # a step asks for each parameter
def _replica_place(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, int]:
    """Returns this rank's number among the ranks with the same part, and how many these are."""
    assert mesh.size() == world_size(), "all our meshes are over all ranks"
    coordinate, index, replicas = mesh.get_coordinate(), 0, 1
    assert coordinate is not None, "every rank has a place in the mesh"
    for axis, placement in enumerate(placements):
        # See [Note: the order of two splits] in `fullshard.parallel.model_parallel`.
        if placement.is_replicate():
            index, replicas = index * mesh.size(axis) + coordinate[axis], replicas * mesh.size(axis)
    return index, replicas


# The update #
def host_waits_before_each_update(optimizer: torch.optim.Optimizer, plan: Plan) -> bool:
    """Returns whether the host waits for each step's decision before the update (the strict order).

    It does wherever the next launch depends on the decision:

    - optimizers that cannot skip on the device: all but torch's fused Adam and AdamW, and those of `_OWN`
    - `fault_tolerance.on_spike = "rollback"`: no step may follow a spike
    - fp16, whose loss scale follows from the step before
    """
    next_step_depends = plan.run.fault_tolerance.on_spike == "rollback" or plan.precision.loss_scaling
    return next_step_depends or not _is_decided_on_device(optimizer)


@torch.no_grad()
def update_parameters(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], *, factor: float
) -> None:
    """Steps `optimizer` with `gradients`, those of its parameters, multiplied by `factor`.

    Raises TrainError for an operation that sharded parameters do not have.
    """
    if isinstance(optimizer, StreamingAdamW):
        optimizer.gradient_factor = factor
        optimizer.step()
    elif gradients and _is_decided_on_device(optimizer):
        # Given a scale, the fused kernel also writes the scaled gradients.
        scale = torch.full((), 1 / factor, dtype=torch.float32, device=gradients[0].device)
        _step_with_scale(optimizer, grad_scale=None if factor == 1 else scale)
    else:
        if gradients and factor != 1.0:
            foreach_multiply([local_tensor(gradient) for gradient in gradients], factor)
        try:
            optimizer.step()
        except RuntimeError as error:
            if "aten." not in str(error):
                raise
            raise TrainError(
                f"{type(optimizer).__name__} cannot update sharded parameters.",
                got=str(error).partition("\n")[0],
                why="its step uses an operation that torch's DTensors lack",
                fix="an optimizer that updates each element by itself, such as AdamW",
            ) from error


@torch.no_grad()
def update_as_device_decides(optimizer: torch.optim.Optimizer, decision: StepDecision) -> None:
    """Steps an optimizer that takes decisions as `decision` says, which the host does not know."""
    assert _is_decided_on_device(optimizer), "other optimizers wait for each step"
    _step_with_scale(optimizer, grad_scale=decision.grad_scale, found_inf=decision.found_inf)


def _step_with_scale(
    optimizer: torch.optim.Optimizer, *, grad_scale: Tensor | None, found_inf: Tensor | None = None
) -> None:
    is_own = isinstance(optimizer, _OWN)  # which take local parts themselves
    adam = cast(Any, optimizer)
    adam.grad_scale, adam.found_inf = grad_scale, found_inf
    try:
        with nullcontext() if is_own else _local_parameters_and_state(optimizer):
            optimizer.step()
    finally:
        del adam.grad_scale, adam.found_inf


def _is_decided_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether this is one of `_OWN`, or torch's fused Adam or AdamW, and nothing is hooked on."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and is_fused
    hooked = any(not hook.__module__.startswith("fullshard.") for hook in step_hooks(optimizer))
    return (is_adam or isinstance(optimizer, _OWN)) and _has_own_step(optimizer) and not hooked


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step` is that of the class, or the wrapper by which torch's schedulers count steps."""
    step = vars(optimizer).get("step")
    wrapped, module = getattr(step, "__wrapped__", None), getattr(step, "__globals__", {}).get("__name__")
    is_counted = wrapped is type(optimizer).step and module == torch.optim.lr_scheduler.__name__
    return step is None or is_counted


@contextmanager
def _local_parameters_and_state(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Context in which `optimizer` has this rank's part of parameters with a gradient. Keeps new state."""
    groups, states = optimizer.param_groups, optimizer.state
    local_states = defaultdict[Tensor, dict[str, Any]](dict)
    pairs: list[tuple[Tensor, Tensor]] = []
    local_groups: list[dict[str, Any]] = []
    for group in groups:
        own: list[Tensor] = []
        for parameter in cast(list[Tensor], group["params"]):
            if parameter.grad is None:
                continue
            local = local_part_of(parameter).detach()
            local.grad = local_part_of(parameter.grad)
            if state := states.get(parameter):
                local_states[local] = {key: local_part_of(value) for key, value in state.items()}
            own.append(local)
            pairs.append((parameter, local))
        local_groups.append({**group, "params": own})
    optimizer.param_groups, optimizer.state = local_groups, local_states
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    for parameter, local in pairs:
        if not states.get(parameter) and (new := local_states.get(local)):
            states[parameter] = {key: _state_as_dtensor(value, parameter) for key, value in new.items()}


def _state_as_dtensor(value: Any, parameter: Tensor) -> Any:
    """Returns optimizer state of this rank's part as a DTensor like `parameter`; counts stay unchanged."""
    is_moment = isinstance(value, Tensor) and value.ndim == parameter.ndim
    return (
        dtensor_from_local_part(parameter, value) if is_moment and isinstance(parameter, DTensor) else value
    )

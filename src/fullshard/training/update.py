"""The update of the parameters by the optimizer, with what the step decided about it.

[Note: decided on the device]
torch's fused Adam and AdamW take two tensors, made for `torch.amp`: they divide the gradient by `grad_scale`,
and change nothing, not even their step counts, where `found_inf` is 1. So the host can launch the update
before anyone knows whether the step is skipped, and by how much the gradient is clipped. No other optimizer
takes both: its host waits for the decision. See `waits_each_step`.

[Note: local tensors]
Over DTensors, an operation on a list of parameters costs the host tens of microseconds for each of them, and
leaks memory on some releases of torch. The update is independent for each element, so torch's fused Adam and
AdamW run on this rank's part of each parameter. `optimizer.state` stays keyed by parameter, with DTensors.
An optimizer with hooks of the user's steps over DTensors, since a hook may compute with whole parameters.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import dtensor_from_local_part
from fullshard.offload.adamw import StreamingAdamW
from fullshard.spec.plan import Plan
from fullshard.torch_private.tensors import local_part, step_hooks
from fullshard.training.figures import StepDecision
from fullshard.training.gradients import scale_gradients


def waits_each_step(optimizer: torch.optim.Optimizer, plan: Plan) -> bool:
    """Returns whether the host waits for each step's decision before the update (the strict order).

    It does wherever the next launch depends on the decision:

    - optimizers that cannot skip on the device: all but torch's fused Adam and AdamW
    - `fault_tolerance.on_spike = "rollback"`: no step may follow a spike
    - fp16, whose loss scale follows from the step before
    """
    run = plan.run
    return (
        run.fault_tolerance.on_spike == "rollback"
        or plan.precision.loss_scaling
        or not _is_fused_adam(optimizer)
    )


@torch.no_grad()
def update_parameters(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], *, factor: float
) -> None:
    """Steps `optimizer` with `gradients`, those of its parameters, multiplied by `factor`."""
    if isinstance(optimizer, StreamingAdamW):
        optimizer.gradient_factor = factor
        optimizer.step()
    elif gradients and _is_fused_adam(optimizer):
        # Given a scale, the fused kernel also writes the scaled gradients.
        scale = torch.full((), 1 / factor, dtype=torch.float32, device=gradients[0].device)
        _step_fused_adam(optimizer, grad_scale=None if factor == 1 else scale)
    else:
        scale_gradients(gradients, factor)
        optimizer.step()


@torch.no_grad()
def update_as_device_decides(optimizer: torch.optim.Optimizer, decision: StepDecision) -> None:
    """Steps torch's fused Adam or AdamW as `decision` says, which the host does not know."""
    assert _is_fused_adam(optimizer), "other optimizers wait for each step"
    _step_fused_adam(optimizer, grad_scale=decision.grad_scale, found_inf=decision.found_inf)


def _step_fused_adam(
    optimizer: torch.optim.Optimizer, *, grad_scale: Tensor | None, found_inf: Tensor | None = None
) -> None:
    adam = cast(Any, optimizer)
    adam.grad_scale, adam.found_inf = grad_scale, found_inf
    try:
        with _local_parameters_and_state(optimizer):
            optimizer.step()
    finally:
        del adam.grad_scale, adam.found_inf


def _is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether this is torch's Adam or AdamW with the fused kernel, its own `step`, and no hooks."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and "step" not in vars(optimizer)
    hooked = any(not hook.__module__.startswith("fullshard.") for hook in step_hooks(optimizer))
    return is_adam and not hooked and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def _local_parameters_and_state(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Context in which `optimizer` holds this rank's part of each parameter that has a gradient."""
    groups, states = optimizer.param_groups, optimizer.state
    local_states = defaultdict[Tensor, dict[str, Any]](dict)
    pairs: list[tuple[Tensor, Tensor]] = []
    local_groups: list[dict[str, Any]] = []
    for group in groups:
        own: list[Tensor] = []
        for parameter in cast(list[Tensor], group["params"]):
            if parameter.grad is None:
                continue
            local = _local_part(parameter).detach()
            local.grad = _local_part(parameter.grad)
            if state := states.get(parameter):
                local_states[local] = {key: _local_part(value) for key, value in state.items()}
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
            states[parameter] = {key: _state_like_parameter(value, parameter) for key, value in new.items()}


def _local_part(value: Any) -> Any:
    """Returns this rank's part of a DTensor, as `local_tensor` does in more time; other values unchanged."""
    return local_part(value) if isinstance(value, DTensor) else value


def _state_like_parameter(value: Any, parameter: Tensor) -> Any:
    """Returns optimizer state of this rank's part as a DTensor like `parameter`; counts stay unchanged."""
    is_moment = isinstance(value, Tensor) and value.ndim == parameter.ndim
    return (
        dtensor_from_local_part(parameter, value) if is_moment and isinstance(parameter, DTensor) else value
    )

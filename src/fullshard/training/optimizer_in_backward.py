"""The optimizer in backward: updates each unit once its gradient is reduced, and frees the gradient.

[Note: what comes before backward]
Everything must be decided before the first unit is updated. So the ranks agree on the loss and the count of
valid tokens between forward and backward (one all-reduce of a few numbers, for which the host waits). If the
loss is not finite, all ranks skip the step, and backward only measures norms. Decisions that depend on the
norm of all gradients are not available: no clipping, no loss scale, no skipping of spikes in the norm. A norm
that is not finite is found after the update, and ends the run.

[Note: one optimizer, a unit at a time]
During a unit's update the optimizer's groups are replaced by copies that hold only the unit's parameters.
Hooks, schedulers and checkpoints see one optimizer, and a counter that a class keeps in its groups increases
once per step. The optimizer must update each parameter independently, as all of `torch.optim` do.

[Note: the gradient's memory]
The gradients of a unit are views of one reduced chunk. FSDP2 holds a reference to the chunk until the next
unit is reduced (with replicas, until the end of backward), so the storage is freed despite the reference. On
a GPU, FSDP2 calls the hooks on the stream of the reduction. If another stream allocated the chunk,
`record_stream` informs the allocator.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import TrainError
from fullshard.torch_private.fsdp import parameter_groups
from fullshard.training.gradients import local_gradient_norms, sum_gradients_over_tensor_axis
from fullshard.training.update import update_parameters


class OptimizerInBackward:
    """Updates the parameters of `model` unit by unit while backward runs inside `update_during_backward`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._norms: dict[Tensor, Tensor] = {}
        self._unit_of: dict[Tensor, int] = {}
        self._left = Counter[int]()  # number of gradients that are not reduced yet, by unit
        self._waiting: list[Tensor] = []  # parameters of one unit, until its last gradient is reduced
        self._groups: dict[int, dict[str, Any]] = {}
        self._group_of: dict[Tensor, int] = {}
        self._factor: float | None = None

    @contextmanager
    def update_during_backward(self, *, factor: float | None) -> Generator[None]:
        """Context in which one backward runs, to be followed by `update_remaining_parameters`.

        factor: multiplies the reduced gradients; None measures their norms without an update

        Raises TrainError if a parameter's gradient is reduced more than once.
        """
        self._factor = factor
        self._unit_of = self._unit_of or _unit_id_by_parameter(self.model)
        self._norms, self._groups, self._waiting = {}, {}, []
        self._left = Counter(self._unit_of.values())
        groups = self.optimizer.param_groups
        self._group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
        with ExitStack() as hooks:
            for parameter in self._unit_of:
                # The hook runs when FSDP2 has reduced the parameter's gradient.
                hooks.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient_reduced).remove)
            yield

    def update_remaining_parameters(self) -> Mapping[Tensor, Tensor]:
        """Updates parameters not updated in backward; returns each parameter's local gradient norm."""
        self._update_waiting_unit()
        self._update_parameters([p for p in self.model.parameters() if p.grad is not None])
        for index, group in self._groups.items():
            kept = self.optimizer.param_groups[index]["params"]
            self.optimizer.param_groups[index].update(group | {"params": kept})
        return {p: self._norms[p] for p in self.model.parameters() if p in self._norms}

    @torch.no_grad()
    def _on_gradient_reduced(self, parameter: Tensor) -> None:
        unit = self._unit_of[parameter]
        if parameter in self._norms:
            raise _repeated_gradient_error(self.model, parameter)
        if self._waiting and self._unit_of[self._waiting[0]] != unit:
            self._update_waiting_unit()
        self._waiting.append(parameter)
        self._left[unit] -= 1
        if not self._left[unit]:
            self._update_waiting_unit()

    def _update_waiting_unit(self) -> None:
        parameters, self._waiting = self._waiting, []
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._update_parameters(parameters)
        for gradient in gradients:  # FSDP2 still refers to the memory: see [Note: the gradient's memory]
            local = local_tensor(gradient)
            if local.is_cuda:
                local.record_stream(torch.cuda.current_stream(local.device))
            cast(Any, local.untyped_storage()).resize_(0)

    @torch.no_grad()
    def _update_parameters(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        with TimedRange("update"):
            gradients = [p.grad for p in parameters if p.grad is not None]
            sum_gradients_over_tensor_axis(gradients)
            self._norms.update(zip(parameters, local_gradient_norms(gradients), strict=True))
            if self._factor is not None:
                self._step_optimizer_on([p for p in parameters if p in self._group_of], factor=self._factor)
        for parameter in parameters:
            parameter.grad = None

    def _step_optimizer_on(self, parameters: Sequence[Tensor], *, factor: float) -> None:
        """Steps the optimizer on `parameters` only, with gradients multiplied by `factor`.

        See [Note: one optimizer, a unit at a time].
        """
        groups, parts = self.optimizer.param_groups, dict[int, dict[str, Any]]()
        for parameter in parameters:
            index = self._group_of[parameter]
            part = parts.setdefault(index, {**groups[index], "params": []})
            part["params"].append(parameter)
        self.optimizer.param_groups = list(parts.values())
        try:
            gradients = [p.grad for p in parameters if p.grad is not None]
            update_parameters(self.optimizer, gradients, factor=factor)
        finally:
            self.optimizer.param_groups = groups
        self._groups |= parts


def _unit_id_by_parameter(model: nn.Module) -> dict[Tensor, int]:
    """Returns the id() of the FSDP2 parameter group, for each parameter whose gradient FSDP2 reduces.

    The parameters come from FSDP2 (after the first forward), because the model has others while its units
    are unsharded.
    """
    found: dict[Tensor, int] = {}
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            sharded = [one.sharded_param for one in group.fsdp_params]
            found |= {parameter: id(group) for parameter in sharded if parameter.requires_grad}
    return found


def _repeated_gradient_error(model: nn.Module, parameter: Tensor) -> TrainError:
    name = next((name for name, one in model.named_parameters() if one is parameter), "a parameter")
    return TrainError(
        f"the gradient of {name} comes more than once in a step.",
        got="optimizer.in_backward = true",
        why="a part of its backward runs apart, as of a reentrant checkpoint, and the unit was updated "
        "with what had come until then",
        fix="optimizer.in_backward = false",
    )

"""The model between two steps: its modes, and changes that the loop made."""

import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank
from fullshard.distributed.tensors import storage_key
from fullshard.distributed.unit_order import find_unit_order_recorder
from fullshard.errors import TrainError
from fullshard.parallel.unit_events import check_parameters_not_replaced, reshard_unsharded_units
from fullshard.quantities import join_names
from fullshard.torch_private.fsdp import list_units, set_reduce_dtypes_of_trained
from fullshard.torch_private.tensors import gradient_hooks
from fullshard.training.ema import refuse_swapped
from fullshard.training.extra_state import generator_states, set_generator_states
from fullshard.training.gradients import list_gradients
from fullshard.training.state import TrainState

logger = logging.getLogger("fullshard")


class ModelBetweenSteps:
    """The modes and trainable parameters of the model of `state`, as the step before had them.

    A model that is in evaluation mode as a whole is put into training mode: all of it at the start, and later
    the modules that trained in the step before. Modules that the user puts into evaluation mode within a
    training model keep it.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._parameters = state, list[tuple[int, ...]]()
        reshard_unsharded_units(state.model)
        if (order := find_unit_order_recorder(state.model)) is not None:
            order.is_trained = True
        if not state.model.training:
            state.model.train()
        self._modes: Mapping[nn.Module, bool] = module_modes(state.model)

    def prepare_step(self) -> None:
        """Restores the modes if the loop left the model in evaluation mode, and keeps them otherwise.

        If parameters were replaced, frozen or unfrozen since the step before, sets the dtypes in which units
        reduce anew, and logs trained parameters that are not updated, or lose small updates. Raises
        TrainError if there are gradients already, or hooks of shards that would never be called, and
        ShardError for parameters that were not sharded.
        """
        model = self._state.model
        refuse_swapped(self._state.average)
        if not model.training and self._modes[model]:
            restore_modes(model, self._modes)
        self._modes = module_modes(model)
        parameters = list(model.parameters())
        if list_gradients(parameters, self._state.optimizer):
            raise TrainError(
                f"the model has gradients before step {self._state.step + 1}.",
                got="a backward outside of the loss function, or a step that was broken off",
                why="they would be added to those of the step",
                fix="optimizer.zero_grad() after it, or a loss that includes the term",
            )
        if any(isinstance(one, DTensor) and gradient_hooks(one) for one in parameters):
            named = model.named_parameters()
            raise TrainError(
                "sharded parameters have gradient hooks, which are never called.",
                got=", ".join([name for name, one in named if gradient_hooks(one)][:3]),
                why="register_hook is for gradients of autograd; FSDP2 sets those of shards",
                fix="register_post_accumulate_grad_hook, which is called with the sharded parameter",
            )
        if _ids_storages_and_requires_grad(parameters) != self._parameters:
            reshard_unsharded_units(model)
            if self._state.average:
                self._state.wait_for_updates()
                self._state.average.begin()
            check_parameters_not_replaced(model)
            self._parameters = _ids_storages_and_requires_grad(model.parameters())
            for unit in list_units(model):
                set_reduce_dtypes_of_trained(unit)
            _warn_of_not_updated_or_half_precision_parameters(self._state)


def _ids_storages_and_requires_grad(parameters: Iterable[nn.Parameter]) -> list[tuple[int, ...]]:
    return [(id(one), storage_key(one), one.requires_grad) for one in parameters]


def _warn_of_not_updated_or_half_precision_parameters(state: TrainState) -> None:
    """Logs trained parameters that the optimizer lacks, or in half precision since they were frozen once."""
    updated = {parameter for group in state.optimizer.param_groups for parameter in group["params"]}
    trained = {name: one for name, one in state.model.named_parameters() if one.requires_grad}
    left = [name for name, parameter in trained.items() if parameter not in updated]
    if left and rank() == 0:
        logger.warning(
            "trainable parameters that are not in the optimizer are never updated: %s",
            join_names(left, most=3),
        )
    order = find_unit_order_recorder(state.model)
    masters = {one.dtype for one, (_, _, was) in (order.shards if order else {}).items() if was}
    late = [name for name, one in trained.items() if one.itemsize < 4 and one.dtype not in masters]
    if late and rank() == 0:
        logger.warning(
            "parameters that were frozen in half precision when they were sharded lose small updates: %s. "
            "Freeze them behind fullshard.shard, or shard them in fp32",
            join_names(late, most=3),
        )


def module_modes(model: nn.Module) -> dict[nn.Module, bool]:
    """Returns each module's `training`, which `restore_modes` sets again."""
    return {module: module.training for module in model.modules()}


def restore_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Puts each module into its mode in `modes`. First calls `model.train`, which a class may override."""
    model.train(modes[model])
    for module, training in modes.items():
        if module.training is not training:
            module.training = training


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Context in which `model` is in evaluation mode. It may be within another one.

    At its end, reshards units, and restores all modes and the states of this rank's random number generators,
    so that a run draws the same numbers with and without evaluations.
    """
    modes, generators = module_modes(model), generator_states()
    model.eval()
    order = find_unit_order_recorder(model)
    was_evaluated = order is not None and order.is_evaluated
    if order is not None:
        order.is_evaluated = True
    try:
        yield
    finally:
        if order is not None:
            order.is_evaluated = was_evaluated
        reshard_unsharded_units(model)
        restore_modes(model, modes)
        set_generator_states(generators)


@contextmanager
def averaged_weights(state: TrainState) -> Generator[None]:
    """Context in which the model of `state` computes with the averages of its trained parameters.

    Every rank enters it, between steps. Each exchanges its own shards in place, and exchanges them back at
    the end: then both are as they were, bit for bit. Nothing is trained, saved or loaded meanwhile. Raises
    TrainError for a state without averages.

    >>> averaged = fs.TrainState(model, optimizer, data=data, ema=True)  # training needs ema.decay
    >>> with fs.averaged_weights(averaged), torch.no_grad():
    ...     averaged.model(tokens).shape
    torch.Size([2, 32, 256])
    """
    if state.average is None:
        raise TrainError(
            "the state keeps no averages of its parameters.",
            got="ema = False",
            fix="TrainState(model, optimizer, ema=True), and ema.decay in the run",
        )
    state.wait_for_updates()
    state.run_before_update_callbacks()  # a save may still copy the parameters
    with state.average.swapped():
        yield

"""The optimizer of a sharded model."""

import inspect
import logging
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fullshard.errors import ShardError, SpecError
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.parallel.unit_events import check_parameters_not_replaced, reshard_unsharded_units
from fullshard.spec.plan import Plan
from fullshard.spec.settings.train_section import OptimizerSection
from fullshard.system.dotted import import_named_module
from fullshard.torch_private.fsdp import list_units
from fullshard.training.adafactor import Adafactor
from fullshard.training.groups import make_parameter_groups
from fullshard.training.learning_rates import mark_as_built_by_fullshard
from fullshard.training.low_bit_adamw import StochasticAdamW, import_adamw8bit_class
from fullshard.training.muon import MuonAdamW
from fullshard.training.shard import build_streaming_adamw
from fullshard.training.soap import SoapAdamW
from fullshard.training.state import check_state_can_be_saved

logger = logging.getLogger("fullshard")
_NAMES = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
EIGHT_BIT = "adamw8bit"
_LOADERS = {EIGHT_BIT: import_adamw8bit_class, "adafactor": lambda: Adafactor}


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """Returns the optimizer that the plan's run names, over the trainable parameters of `model`.

    Weight decay applies to parameters of two or more dimensions, except norms and biases, which can have two
    (biases of stacked experts): parameters named `bias` or `…_bias`, those of a module whose class has `Norm`
    in its name, and those named `…norm` themselves. Parameters that the model excludes do not decay either:
    those with the attribute `_no_weight_decay` (as in Mamba), and those whose names a module returns from
    `no_weight_decay()` (as in timm). [[optimizer.groups]] give parameters, by name, another rate, weight
    decay or betas. AdamW and Adam are fused: on two cores this is 8× as fast as the foreach loop.

    Raises ShardError if the model is not sharded, was changed since, or has no trainable parameter;
    SpecError for an unknown name, options that the class does not take, a group that matches nothing, and a
    class that cannot update sharded parameters; TrainError for state that checkpoints cannot hold;
    MissingExtraError without torchao.

    >>> optimizer = fs.build_optimizer(model, plan)  # after `fs.shard`, which replaces the parameters
    >>> state = fs.TrainState(model, optimizer, data=data)
    """
    if not list_units(model):
        raise ShardError(
            f"{type(model).__name__} is not sharded.",
            why="fullshard.shard replaces parameters, and the optimizer would hold the old ones",
            fix="model = fullshard.shard(model, plan), then the optimizer",
        )
    reshard_unsharded_units(model)  # an optimizer of gathered parameters would never update the shards
    check_parameters_not_replaced(model)
    section = plan.run.optimizer
    groups = make_parameter_groups(model, section)
    if not groups:
        name = type(model).__name__
        raise ShardError(f"{name} has no trainable parameter.", fix="requires_grad_(True) on some")
    if (own := _build_own_optimizer(model, groups, plan=plan)) is not None:
        return mark_as_built_by_fullshard(own)
    cls = _import_optimizer_class(section.name)
    options = _optimizer_options(section, cls, device=next(model.parameters()).device)
    try:
        # Not every optimizer uses only operations that DTensors support. Trying one step here finds this
        # before the first real step does.
        trial = cls([_make_trial_parameter_group(group) for group in groups], **options)
        if section.name.lower() != EIGHT_BIT:  # whose step compiles a kernel for each shape, on a GPU
            trial.step()
        for state in trial.state.values():
            for key, value in state.items():
                if value is not None:
                    check_state_can_be_saved(trial, key, value=value, parameter="parameter")
        return mark_as_built_by_fullshard(cls(groups, **options))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"{section.name} cannot train these parameters with these options.",
            got=str(options),
            why=str(error).partition("\n")[0],
            fix="other optimizer.options, or another optimizer.name",
        ) from error


def _make_trial_parameter_group(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `group` with a new parameter, with a gradient, for each number of dimensions.

    Each has the shape of the smallest with as many. Adafactor fails on matrices, and not on vectors.
    """
    smallest = {one.ndim: one for one in sorted(group["params"], key=torch.numel, reverse=True)}
    parameters = [nn.Parameter(torch.zeros_like(one.detach())) for one in smallest.values()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter.detach())
    return group | {"params": parameters}


def _import_optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    if name.lower() in _LOADERS:
        return _LOADERS[name.lower()]()
    dotted = _NAMES.get(name.lower(), name)
    module_name, _, class_name = dotted.rpartition(".")
    module: ModuleType | None = torch.optim if module_name == "torch.optim" else None
    if module is None and module_name:
        with suppress(ImportError, TypeError, ValueError):  # the last two for dots at its ends
            module = import_named_module(module_name, setting=f"optimizer.name = {name!r}")
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise SpecError(
            "optimizer.name names no optimizer.",
            got=repr(name),
            fix="the dotted name of a torch.optim.Optimizer, such as torch.optim.NAdam",
        )
    return found


def _optimizer_options(
    section: OptimizerSection, cls: type[torch.optim.Optimizer], *, device: torch.device
) -> dict[str, Any]:
    """Returns arguments for `cls`. `section.options` override others; lr and weight_decay raise SpecError."""
    takes = inspect.signature(cls).parameters
    if twice := {"lr", "weight_decay"} & section.options.keys():
        raise SpecError(
            "optimizer.options has values that have settings of their own.",
            got=", ".join(f"{key} = {section.options[key]}" for key in sorted(twice)),
            why="parameter groups have the values of these settings, and would ignore the options",
            fix="optimizer.learning_rate, optimizer.weight_decay",
        )
    options: dict[str, Any] = {"lr": section.learning_rate}
    if "betas" in takes:  # Adam's family; in other optimizers, eps has another meaning
        options["betas"] = section.betas
        options |= {"eps": section.eps} if "eps" in takes else {}
    elif any(group.betas for group in section.groups):
        raise SpecError(
            "a group of [[optimizer.groups]] has betas.",
            why=f"{section.name} has none",
            fix="the group without betas, or another optimizer.name",
        )
    for name in sorted({"betas", "eps"} - options.keys() - section.options.keys()):
        if (given := getattr(section, name)) != type(section).model_fields[name].default:
            why = "optimizer.options sets it" if name in takes else "it has no such value"
            logger.warning("optimizer.%s = %s is not used by %s: %s", name, given, section.name, why)
    # Among the fused optimizers, only Adam's has a rule for DTensors (as of torch 2.13).
    can_fuse = issubclass(cls, torch.optim.Adam) and device.type in ("cpu", "cuda")
    if can_fuse and not {"foreach", "differentiable"} & section.options.keys():
        options["fused"] = True
    return options | section.options


def _build_own_optimizer(
    model: nn.Module, groups: list[dict[str, Any]], *, plan: Plan
) -> torch.optim.Optimizer | None:
    if plan.run.offload.offloads_optimizer:
        return build_streaming_adamw(model, groups, plan=plan)
    section = plan.run.optimizer
    if section.matrix_kind:
        dtype = TORCH_DTYPE[section.matrix_section.dtype_beside(plan.precision.param)]
        return {"muon": MuonAdamW, "soap": SoapAdamW}[section.matrix_kind](groups, section, dtype=dtype)
    if not plan.precision.stochastic_rounding:
        return None
    if section.name.lower() != "adamw" or section.options:
        raise SpecError(
            "bf16_pure rounds its updates stochastically, which only adamw does here.",
            got=f"optimizer.name = {section.name!r}, options = {section.options}",
            fix='optimizer.name = "adamw" without options, or precision.mode = "bf16"',
        )
    return StochasticAdamW(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, seed=plan.run.run.seed
    )

"""Checks of a model's parameters and graphs."""

from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from fullshard.checks.model_trial import ModelTrial
from fullshard.distributed.agreement import ErrorCapture
from fullshard.models.build import build_model
from fullshard.sharding.blocks import find_repeated_blocks
from fullshard.spec.dotted import import_callable
from fullshard.spec.finding import Finding
from fullshard.spec.model_section import HuggingFaceModel, PythonModel
from fullshard.torch_private.compiler import dynamo

_CONSTANT_SHARE = 0.5
_LARGEST_VALUE = 100.0


def check_tied_parameters(trial: ModelTrial) -> Finding:
    """Looks for parameters that share memory without being one parameter, and for ties that are missing."""
    section = trial.run.model
    if isinstance(section, PythonModel):
        # As the user's function makes it: on the meta device nothing has memory to share.
        made = import_callable(section.python, key="model.python")(**section.options)
        shared = _names_that_share_memory(made)
        if shared:
            return Finding.failure(
                f"{' and '.join(shared)} share memory, and are different parameters",
                why="sharding copies each into shards of its own, so they are no longer tied",
                fix="one nn.Parameter for both: head.weight = embedding.weight, without .data",
            )
    model = build_model(trial.run)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    tied = [" = ".join(found) for found in names.values() if len(found) > 1]
    if isinstance(section, HuggingFaceModel) and _lacks_tie(model):
        return Finding.warning(
            "the config has tie_word_embeddings, and the head has weights of its own",
            why="the weights of the checkpoint are for a tied head",
            fix="model.architecture as in the config, or model.options.tie_word_embeddings = false",
        )
    return Finding.ok(f"tied: {'; '.join(tied[:2])}" if tied else "no tied parameters")


def _names_that_share_memory(model: nn.Module) -> list[str]:
    places: dict[int, dict[int, str]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.numel():
            places[parameter.untyped_storage().data_ptr()][id(parameter)] = name
    return next((list(found.values()) for found in places.values() if len(found) > 1), [])


def _lacks_tie(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    wanted = bool(getattr(config, "tie_word_embeddings", False))
    attempt = ErrorCapture()
    with attempt:  # some models of transformers do not implement these methods
        ends: list[Any] = [getattr(model, f"get_{end}_embeddings")() for end in ("input", "output")]
        weights = [getattr(end, "weight", None) for end in ends]
        return wanted and all(isinstance(one, Tensor) for one in weights) and weights[0] is not weights[1]
    return False


def check_initial_values(trial: ModelTrial) -> Finding:
    """Looks for initial values that are not finite, very large, or constant in most matrices."""
    matrices, constant = 0, list[str]()
    for name, parameter in trial.build().named_parameters():
        values = parameter.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if not values.isfinite().all():
            return Finding.failure(
                f"{name} has values that are not finite",
                why="it is not initialised",
                fix="reset_parameters()",
            )
        if values.abs().max() > _LARGEST_VALUE:
            return Finding.warning(
                f"{name} has values up to {float(values.abs().max()):.3g}",
                why="it is probably memory that nothing has initialised",
                fix="reset_parameters() in its module, which sets it",
            )
        if values.ndim >= 2 and min(values.shape) > 1 and not name.endswith("bias"):
            matrices += 1
            constant += [name] if bool((values == values.flatten()[0]).all()) else []
    if constant and len(constant) > _CONSTANT_SHARE * matrices:
        return Finding.warning(
            f"{len(constant)} of {matrices} matrices are constant, such as {constant[0]}",
            why="equal rows get equal gradients, and never become different",
            fix="reset_parameters() with random values",
        )
    return Finding.ok(f"{matrices} matrices have finite values that vary")


def check_graphs(trial: ModelTrial) -> Finding:
    """Traces the first block as torch.compile does, and counts the places where its graph breaks."""
    if not trial.plan.run.run.compile:
        return Finding.skipped("run.compile is false in the plan")
    model = trial.build().train()
    blocks = find_repeated_blocks(model)
    if not blocks:
        return Finding.skipped("there are no repeated blocks to compile")
    name, block = next(iter(blocks.items()))
    calls: list[tuple[Any, Any]] = []

    def keep_arguments(_module: nn.Module, args: Any, given: Any) -> None:  # signature: torch's hook
        calls.append((args, given))

    with block.register_forward_pre_hook(keep_arguments, with_kwargs=True):
        trial.mean_loss(model, trial.batches(0))
    args, given = calls[0]
    explained = dynamo.explain(block)(*args, **given)
    dynamo.reset()
    if count := explained.graph_break_count:
        reason = str(explained.break_reasons[0].reason).splitlines()[0] if explained.break_reasons else ""
        return Finding.warning(
            f"the graph of {name} has {count} break{'s' if count > 1 else ''}: {reason}",
            why="the block runs eagerly, so run.compile gains nothing and costs its time",
            fix="no .item(), print or Python branch on values in the block; TORCH_LOGS=graph_breaks names it",
        )
    return Finding.ok(f"{name} is one graph")

"""State beside parameters in checkpoints: of modules (`get_extra_state`), without pickle, and of generators.

[Note: one decision for all ranks] Models draw on the host which blocks to run (layer drop): from torch's CPU
generator, Python's or NumPy's. These have the same seed on all ranks, because ranks that run different blocks
gather different weights together (see `distributed/unit_order.py`). A GPU's generator, for dropout, has its
own seed for each part of a batch. On CPU ranks, dropout draws from the CPU generator, so all ranks use the
same masks, for different rows.
"""

import logging
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank, world_size
from fullshard.errors import CheckpointError
from fullshard.offload.adamw import StreamingAdamW
from fullshard.parallel.communication import find_hooks
from fullshard.parallel.model_parameters import persistent_buffers
from fullshard.quantities import join_names
from fullshard.spec.plan import Plan

_OF_HOOKS = "communication."  # begins the names of states of communication hooks
PREFIX = "extra."  # of the names of tensors in extra state
_SUFFIX = "_extra_state"  # torch's, of the names in a state dict
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS = ("state_dict", "_save_to_state_dict")

logger = logging.getLogger("fullshard")


def encode_extra_state(model: nn.Module) -> tuple[dict[str, JsonValue], dict[str, Tensor]]:
    """Returns the extra state of all modules: JSON values by module name, and the tensors in them, by name.

    Like buffers, it is that of rank 0 in a checkpoint. Raises CheckpointError for values other than tensors,
    numbers, text, None, and lists, tuples and dicts of these.
    """
    tensors: dict[str, Tensor] = {}
    return {
        name: _encode(module.get_extra_state(), name=f"{PREFIX}{name}", tensors=tensors)
        for name, module in _modules_with_extra_state(model)
    }, tensors


def set_extra_state(model: nn.Module, values: JsonValue, *, received: Mapping[str, Tensor]) -> None:
    """Calls `set_extra_state` of each module in `values`; logs modules and values that lack the other."""
    saved = values if isinstance(values, dict) else {}
    modules = dict(_modules_with_extra_state(model))
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    for name in modules.keys() & saved.keys():
        modules[name].set_extra_state(_decode(saved[name], received, device=device))
    for names, text in (
        (modules.keys() - saved.keys(), "the checkpoint has no extra state of %s, which keep theirs"),
        (saved.keys() - modules.keys(), "the checkpoint has extra state of %s, which take none here"),
    ):
        if names and rank() == 0:
            logger.warning(text, join_names([name or "the model" for name in sorted(names)]))


def warn_of_unsaved_custom_state(model: nn.Module) -> None:
    """Logs extra state that a checkpoint cannot hold, and what state_dict hooks or methods add or change."""
    try:
        encode_extra_state(model)
    except CheckpointError as error:
        if rank() == 0:
            logger.warning("saves will fail: %s", error)
    if not any(_changes_state_dict(module) for module in model.modules()):
        return
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= persistent_buffers(model)
    theirs: dict[str, Any] = model.state_dict()
    kept = {name: value for name, value in theirs.items() if name.rpartition(".")[2] != _SUFFIX}
    held = {id(own[name]) for name in own.keys() & kept.keys()}  # under another name, too
    other = [name for name in own.keys() ^ kept.keys() if id(own.get(name)) not in held]
    other += [name for name in own.keys() & kept.keys() if _address(own[name]) != _address(kept[name])]
    if other and rank() == 0:
        logger.warning(
            "checkpoints hold parameters and buffers as they are in the model, and not what hooks or methods "
            "of its state_dict add, leave out or change: %s. A buffer or get_extra_state is saved.",
            join_names(sorted(other)),
        )


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _changes_state_dict(module: nn.Module) -> bool:
    hooks = [hook for key in _HOOKS for hook in getattr(module, key, {}).values()]
    methods = [getattr(type(module), key) for key in _METHODS]
    return any(not _is_of_torch(one) for one in [*hooks, *methods])


def _is_of_torch(function: Any) -> bool:
    # The function in a partial, or in torch's wrapper of a hook
    function = getattr(function, "func", getattr(function, "hook", function))
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("torch", "fullshard")


def _address(value: object) -> int | None:
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if type(local) in (Tensor, nn.Parameter) else None


def _encode(value: Any, *, name: str, tensors: dict[str, Tensor]) -> JsonValue:
    """Returns `value` as JSON, in which objects stand for all that JSON does not have; fills `tensors`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (Tensor, nn.Parameter):
        tensors[name] = cast(Tensor, value).detach()
        return {"tensor": name, "host": tensors[name].device.type == "cpu"}
    if type(value) in (list, tuple):
        elements = enumerate(cast(list[Any], value))
        parts = [_encode(one, name=f"{name}.{i}", tensors=tensors) for i, one in elements]
        return parts if type(value) is list else {"tuple": parts}
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        if all(isinstance(key, str) for key, _ in items):
            return {"dict": {key: _encode(one, name=f"{name}.{key}", tensors=tensors) for key, one in items}}
    module, _, inner = name.removeprefix(PREFIX).rpartition(".")
    raise CheckpointError(
        "checkpoints cannot hold the extra state of a module.",
        got=f"get_extra_state of {module or inner}: {name} is a {type(value).__name__}",
        why="nothing is pickled: tensors, numbers, text, None, and lists, tuples and dicts of them by text",
        fix="tensors in its place: pickled bytes as a tensor of torch.uint8, for example",
    )


def _decode(value: JsonValue, received: Mapping[str, Tensor], *, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(one, received, device=device) for one in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = received[str(value["tensor"])]
        return tensor if value["host"] else tensor.to(device)
    if "float" in value:
        return float(str(value["float"]))
    if "tuple" in value:
        return tuple(_decode(one, received, device=device) for one in cast(list[JsonValue], value["tuple"]))
    parts = cast(dict[str, JsonValue], value["dict"])
    return {key: _decode(one, received, device=device) for key, one in parts.items()}


def seed_generators(plan: Plan) -> None:
    """Seeds the host's generators alike on all ranks, the GPU's by data rank.

    See [Note: one decision for all ranks].
    """
    seed = plan.run.run.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed + plan.data_rank(rank()))


def rank_states(model: nn.Module) -> dict[str, Tensor]:
    """Returns the states of this rank's generators and communication hooks, by names in checkpoints."""
    states = generator_states()
    for name, hook in find_hooks(model).items():
        own = hook.state() if hasattr(hook, "state") else {}
        states |= {f"{_OF_HOOKS}{name}:{key}.{_rank_text()}": tensor for key, tensor in own.items()}
    return states


def empty_rank_states_to_fill(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns {name in the checkpoint: tensor to fill} of what `rank_states` returned when it was saved.

    A rank whose hooks have no state in `saved`, which other numbers of ranks saved, begins with none.
    """
    found = empty_generator_states_to_fill(saved)
    of_hooks = [name for name in saved if name.startswith(_OF_HOOKS)]
    own = [name for name in of_hooks if name.endswith(f".{_rank_text()}")] if find_hooks(model) else []
    if of_hooks and not own and rank() == 0:
        logger.warning(
            "the state of communication hooks in the checkpoint is not loaded: it is of another number of "
            "ranks, or nothing is compressed now"
        )
    for name in own:
        found[name] = torch.empty(saved[name].shape, dtype=saved[name].torch_dtype)
    return found


def set_rank_states(model: nn.Module, received: Mapping[str, Tensor]) -> None:
    """Sets generators and hooks to `received`: the filled tensors of `empty_rank_states_to_fill`."""
    set_generator_states(received)
    for name, hook in find_hooks(model).items():
        begin, end = f"{_OF_HOOKS}{name}:", f".{_rank_text()}"
        names = [one for one in received if one.startswith(begin) and one.endswith(end)]
        if hasattr(hook, "load_state"):
            hook.load_state({one.removeprefix(begin).removesuffix(end): received[one] for one in names})


def _rank_text() -> str:
    return f"rank {rank()} of {world_size()}"


def generator_states() -> dict[str, Tensor]:
    """Returns the states of this rank's generators, by their names in checkpoints."""
    states = {"cpu": torch.get_rng_state(), "python": _python_random_state(), "numpy": _numpy_random_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{kind}.{rank()}": state for kind, state in states.items()}


def empty_generator_states_to_fill(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns {name in the checkpoint: tensor to fill with that state of a random number generator}.

    A rank whose states are not in `saved` gets rank 0's, except that of the GPU. States of another shape are
    left out.
    """
    found: dict[str, Tensor] = {}
    for name, own in generator_states().items():
        _, kind, _ = name.split(".")
        for key in (name, *([] if kind == "cuda" else [f"rng.{kind}.0"])):
            if key in saved and tuple(saved[key].shape) == tuple(own.shape):
                found[key] = own
                break
    return found


def set_generator_states(received: Mapping[str, Tensor]) -> None:
    """Sets the generators to `received`: the filled tensors of `empty_generator_states_to_fill`."""
    setters = {
        "cpu": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state,
        "python": _set_python_random_state,
        "numpy": _set_numpy_random_state,
    }
    for name, state in received.items():
        if name.startswith("rng."):
            setters[name.split(".")[1]](state)


# fp64 holds the words of 32 bits exactly, and the normal number that the generator has in stock, if any.
def _python_random_state() -> Tensor:
    _, words, normal = random.getstate()
    return torch.tensor([*words, normal is not None, normal or 0.0], dtype=torch.float64)


def _set_python_random_state(state: Tensor) -> None:
    *words, has_normal, normal = state.tolist()
    random.setstate((3, tuple(map(int, words)), normal if has_normal else None))


def _numpy_random_state() -> Tensor:
    _, words, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return torch.tensor([*words.tolist(), *rest], dtype=torch.float64)


def _set_numpy_random_state(state: Tensor) -> None:
    *words, position, has_normal, normal = state.tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_normal), normal))


def warn_of_unsaved_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Logs what of the optimizer is not in checkpoints: optimizers inside, and additions to `state_dict`."""
    if isinstance(optimizer, StreamingAdamW):
        return
    unsaved = [key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        added = optimizer.state_dict().keys() - {"state", "param_groups"}
        unsaved += [f"state_dict()[{key!r}]" for key in added]
    if unsaved and rank() == 0:
        logger.warning(
            "checkpoints hold the state and groups of %s, but not %s: a resumed run will differ from one "
            "without a break. Train with the inner optimizer itself, or keep everything in `state`.",
            type(optimizer).__name__,
            ", ".join(unsaved),
        )

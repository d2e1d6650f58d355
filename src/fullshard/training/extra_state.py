"""Extra state of modules (`get_extra_state`) in checkpoints: without pickle."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.agreement import rank
from fullshard.errors import CheckpointError
from fullshard.parallel.precision import persistent_buffers
from fullshard.quantities import join_names

PREFIX = "extra."  # of the names of tensors in extra state
_SUFFIX = "_extra_state"  # torch's, of the names in a state dict
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS = ("state_dict", "_save_to_state_dict")

logger = logging.getLogger("fullshard")


def encode_extra_state(model: nn.Module) -> tuple[dict[str, JsonValue], dict[str, Tensor]]:
    """Returns the extra state of all modules: JSON values by module name, and the tensors in them, by name.

    Like buffers, it is that of rank 0 in a checkpoint. Raises CheckpointError for values of other types.
    """
    tensors: dict[str, Tensor] = {}
    return {
        name: _encode(module.get_extra_state(), name=f"{PREFIX}{name}", tensors=tensors)
        for name, module in _modules_with_extra_state(model)
    }, tensors


def extra_state_targets(saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """Returns empty tensors for those of `saved` that are extra state."""
    return {
        name: torch.empty(info.shape, dtype=info.torch_dtype)
        for name, info in saved.items()
        if name.startswith(PREFIX)
    }


def set_extra_state(model: nn.Module, values: JsonValue, *, received: Mapping[str, Tensor]) -> None:
    """Calls `set_extra_state` of the modules in `values`; logs which are on one side only."""
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


def warn_of_unsaved_module_state(model: nn.Module) -> None:
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
    other = [name for name in own.keys() ^ kept.keys() if not _is_alias(name, own, kept=kept)]
    other += [name for name in own.keys() & kept.keys() if _address(own[name]) != _address(kept[name])]
    if other and rank() == 0:
        logger.warning(
            "checkpoints hold parameters and buffers as they are in the model, and not what hooks or methods "
            "of its state_dict add, leave out or change: %s. A buffer or get_extra_state is saved.",
            join_names(sorted(other)),
        )


def _is_alias(name: str, own: Mapping[str, Tensor], *, kept: Mapping[str, Any]) -> bool:
    """Returns whether `name`, missing in the state dict, is another name of a tensor that it has."""
    return name in own and any(one in kept for one, value in own.items() if value is own[name])


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
        parts = [
            _encode(one, name=f"{name}.{i}", tensors=tensors) for i, one in enumerate(cast(list[Any], value))
        ]
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

"""Inserts peft's low-rank adapters into a model on the meta device. Needs the extra `hf`.

[Note: initialised alone] peft initialises a whole adapter on every rank when it is inserted. Here adapters
are inserted on the meta device, and initialised later with all other parameters: A like a linear module
(peft's default), B with zeros. The model's own `_init_weights` must not overwrite these values.
"""

import importlib
import importlib.util
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fullshard.distributed.agreement import rank
from fullshard.errors import MissingExtraError, SpecError, TrainError
from fullshard.quantities import join_names
from fullshard.spec.settings.train_section import AdapterSection
from fullshard.system.dotted import import_quietly

ADAPTER = "default"
_DISABLED = "_disable_adapters"  # attribute of peft's layers
logger = logging.getLogger("fullshard")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def insert_adapters(
    model: nn.Module, section: AdapterSection, *, own_dtype: torch.dtype | None = None
) -> nn.Module:
    """Inserts adapters into `model`, in place, and freezes other parameters, except in `adapter.trained`.

    Returns the same model, which is on the meta device; unchanged if `adapter.rank` is 0. `own_dtype` is the
    dtype of frozen parameters if `adapter.base_dtype` is "auto"; None keeps theirs. Raises MissingExtraError
    without peft, SpecError for targets that the model does not have and for options that peft refuses.
    """
    if section.rank == 0:
        return model
    peft = import_peft()
    targets = _list_targets_in_chosen_layers(model, section)
    trained = _find_names_by_ending(model, section.trained, key="adapter.trained")
    modules = dict(model.named_modules())
    transposed = any(has_transposed_weight(modules[name]) for name in targets)
    config = make_lora_config(section, targets=targets, transposed=transposed)
    _check_names_in_options(model, section, targets=targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SpecError(
            f"peft cannot put adapters into {type(model).__name__}.",
            got=str(error).strip().splitlines()[0],
            fix="other adapter.targets, or other adapter.options",
        ) from error
    _check_only_modules_are_adapted(model)
    for name in trained:
        for parameter in modules[name].parameters():
            parameter.requires_grad_(True)
    frozen_dtype = own_dtype if section.base_dtype == "auto" else _DTYPES[section.base_dtype]
    for parameter in model.parameters():
        if frozen_dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(frozen_dtype)
    _set_adapter_initialisers(model, gaussian=section.options.get("init_lora_weights") == "gaussian")
    return model


def make_lora_config(section: AdapterSection, *, targets: list[str], transposed: bool) -> Any:
    """Returns peft's LoraConfig for `targets`, with weights (in, out) if `transposed`. Raises SpecError."""
    options = {key: value for key, value in section.options.items() if key != "init_lora_weights"}
    alpha = int(section.alpha) if section.alpha == int(section.alpha) else section.alpha  # as peft writes it
    try:
        return import_peft().LoraConfig(
            r=section.rank,
            lora_alpha=alpha,
            lora_dropout=section.dropout,
            target_modules=targets,
            fan_in_fan_out=transposed,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise SpecError("[adapter] options are not peft's.", got=str(error)) from error


def iterate_adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (full name, peft's layer) for every layer of `model` that has an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@contextmanager
def adapters_off(model: nn.Module) -> Generator[None]:
    """Context in which `model` computes as its base does, so that it is its own reference, without a copy.

    For forwards without gradients: backward may recompute a block, after the context has ended. Raises
    TrainError for a model without adapters, and for one that trains other parameters beside them.

    >>> config = peft.LoraConfig(target_modules=["query", "value"])
    >>> adapted = peft.inject_adapter_in_model(config, fs.DecoderModel(run.decoder_config))
    >>> with fs.adapters_off(adapted), torch.no_grad():
    ...     adapted(tokens).shape
    torch.Size([2, 32, 256])
    """
    layers = [layer for _, layer in iterate_adapted_layers(model)]
    trained = [name for name, one in model.named_parameters() if one.requires_grad and ".lora_" not in name]
    if not layers or trained:
        raise TrainError(
            "the model without its adapters cannot be its reference.",
            got=f"{join_names(trained, most=3)}, trained beside them" if layers else "no adapter",
            fix="a second, frozen model, sharded as the first is",
        )
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        setattr(layer, _DISABLED, True)  # peft's enable_adapters would also freeze them
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            setattr(layer, _DISABLED, disabled)


def import_peft() -> Any:
    """Returns the module peft. Raises MissingExtraError without it."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("hf", package="peft", needed_for="[adapter]")
    return import_quietly("peft")


def _list_targets_in_chosen_layers(model: nn.Module, section: AdapterSection) -> list[str]:
    """Returns the full names of `adapter.targets`, in all layers or those of `options.layers_to_transform`.

    Raises SpecError for a layer in which nothing matches.
    """
    names = _list_adapter_target_names(model, section)
    chosen = section.options.get("layers_to_transform")
    if chosen is None or chosen == []:
        return names
    found = set[str]()
    for layer in chosen if isinstance(chosen, list) else [chosen]:
        own = _names_adapted_in_layer(names, section, layer=layer)
        if not own:
            raise SpecError(
                "an adapter option matches no layer.",
                got=f"adapter.options.layers_to_transform = {chosen}: no target in layer {layer}",
                fix="layers of the model, from 0, and options.layers_pattern, the name of their list",
            )
        found |= own
    return [name for name in names if name in found]


def _names_adapted_in_layer(names: list[str], section: AdapterSection, *, layer: Any) -> set[str]:
    """Returns those of `names` that peft would adapt, if `layer` were the only layer to transform."""
    check: Any = importlib.import_module("peft.tuners.tuners_utils").check_target_module_exists
    options = {**section.options, "layers_to_transform": [layer], "exclude_modules": None}  # left to peft
    one = section.model_copy(update={"options": options})
    ends = {name.rpartition(".")[2] for name in names} if section.targets == "all-linear" else section.targets
    config = make_lora_config(one, targets=sorted(ends), transposed=False)
    # peft looks for the number behind two parts of a name, which the list of layers may not have.
    return {name for name in names if name in ends or check(config, f"model.{name}")}


def _check_names_in_options(model: nn.Module, section: AdapterSection, *, targets: list[str]) -> None:
    """Raises SpecError for a name or pattern in the options that no parameter, or no target, has."""
    parameters = [name for name, _ in model.named_parameters()]
    named = {"target_parameters": parameters, "rank_pattern": targets, "alpha_pattern": targets}
    for key, names in named.items():
        kind = "parameter" if names is parameters else "target"
        for end in section.options.get(key) or []:
            if not any(re.fullmatch(rf"(.*\.)?({end})", name) for name in names):
                raise SpecError(
                    f"{type(model).__name__} has no {kind} {end!r}.",
                    got=f"adapter.options.{key} = {section.options[key]}",
                    fix=", ".join(sorted({".".join(name.split(".")[-2:]) for name in names})[:8]),
                )


def _check_only_modules_are_adapted(model: nn.Module) -> None:
    """Raises SpecError if peft adapts parameters themselves, such as stacked experts."""
    kinds = {name: type(module).__name__ for name, module in iterate_adapted_layers(model)}
    wrapped = [name.removesuffix(".base_layer") for name, kind in kinds.items() if kind == "ParamWrapper"]
    if not wrapped:
        return
    left = dict.fromkeys(name.rpartition(".")[2] for name, kind in kinds.items() if kind != "ParamWrapper")
    others = json.dumps([*left] or ["q_proj", "v_proj"])
    raise SpecError(
        "adapters of parameters, such as experts in one tensor, cannot be sharded.",
        got=", ".join(dict.fromkeys(wrapped)),
        why="peft replaces these parameters in every forward, where they are gathered copies of "
        "shards; it also takes gate_proj, up_proj and down_proj of such a mixture for its experts",
        fix=f"adapter.targets = {others}, without target_parameters",
    )


def warn_of_unexpected_adapter_targets(model: nn.Module, section: AdapterSection) -> None:
    """Warns of stacked weights in blocks that the targets name and leave frozen: they are no linear modules.

    Logs how many modules "all-linear" adapts in each list of blocks if there are several, as with a vision
    tower. Only rank 0 logs.
    """
    if section.rank == 0 or rank() != 0:
        return
    every = section.targets == "all-linear"
    # `gate_proj` also means stacked weights `experts.gate_up_proj`.
    stems = () if every else tuple(one.rpartition(".")[2].removesuffix("_proj") for one in section.targets)
    stacked = [
        name
        for name, one in model.named_parameters()
        if one.ndim == 3 and ".lora_" not in name and any(part.isdigit() for part in name.split("."))
        if every or any(stem in name.rpartition(".")[2] for stem in stems)
    ]
    kinds = dict.fromkeys(".".join(name.split(".")[-2:]) for name in stacked)
    if kinds:
        targets = json.dumps(section.targets)
        logger.warning("adapter.targets = %s leaves %s frozen: no linear modules", targets, ", ".join(kinds))
    places = Counter(re.split(r"\.\d+\.", name)[0] for name, _ in iterate_adapted_layers(model))
    if every and len(places) > 1:
        counts = ", ".join(f"{count} of {place}" for place, count in places.items())
        logger.warning('adapter.targets = "all-linear" adapts linear modules in several places: %s', counts)


def _list_adapter_target_names(model: nn.Module, section: AdapterSection) -> list[str]:
    """Returns the full names of the modules that get adapters. Raises SpecError if no module matches."""
    if section.targets != "all-linear":
        return _find_names_by_ending(model, section.targets, key="adapter.targets")
    linear = [
        name
        for name, module in model.named_modules()
        if _is_linear(module) and any(part.isdigit() for part in name.split("."))  # in a block: not a head
    ]
    if not linear:
        raise SpecError(
            f"{type(model).__name__} has no linear module in a repeated block.",
            got='adapter.targets = "all-linear"',
            fix='adapter.targets = ["name", ...]',
        )
    return linear


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or has_transposed_weight(module)


def has_transposed_weight(module: nn.Module) -> bool:
    """Returns True for GPT-2's linear modules, Conv1D, whose weights are transposed: (in, out)."""
    return type(module).__name__ == "Conv1D"


def _find_names_by_ending(model: nn.Module, ends: tuple[str, ...], *, key: str) -> list[str]:
    """Returns the modules' names that end in one of `ends`. Raises SpecError for an end that matches none."""
    modules = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for end in ends:
        own = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not own:
            last = dict.fromkeys(name.rpartition(".")[2] for name, one in modules.items() if _is_linear(one))
            raise SpecError(
                f"{type(model).__name__} has no module {end!r}.",
                got=f"{key} = {list(ends)}",
                fix=", ".join(list(last)[:8]) or None,
            )
        found += own
    return found


def _set_adapter_initialisers(model: nn.Module, *, gaussian: bool) -> None:
    """Gives adapters initialisers, and makes the model's own skip them. See [Note: initialised alone]."""
    own = dict(_iterate_adapter_initialisers(model, gaussian=gaussian))
    for module, act in own.items():
        setattr(module, "reset_parameters", act)  # noqa: B010
    theirs: Callable[[nn.Module], object] | None = getattr(model, "_init_weights", None)

    def init_weights_except_adapters(module: nn.Module) -> None:
        if theirs is not None and module not in own:
            theirs(module)

    setattr(model, "_init_weights", init_weights_except_adapters)  # noqa: B010


def _iterate_adapter_initialisers(
    model: nn.Module, *, gaussian: bool
) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Yields (module that holds part of an adapter, function that initialises that part as peft does)."""
    for layer in model.modules():
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            parts: Any = getattr(layer, kind, None)
            if parts is None or ADAPTER not in parts:
                continue
            part = parts[ADAPTER]
            if isinstance(part, nn.Module):
                std = 1 / cast(dict[str, int], layer.r)[ADAPTER] if gaussian else None
                yield part, partial(_initialise_lora_module, part, kind, std=std)
            else:
                yield parts, partial(_initialise_lora_embedding, parts, kind)


def _initialise_lora_module(part: Any, kind: str, *, std: float | None) -> None:
    if kind == "lora_B":
        nn.init.zeros_(part.weight)
    elif std is not None:
        nn.init.normal_(part.weight, std=std)
    else:
        nn.init.kaiming_uniform_(part.weight, a=math.sqrt(5))
    if part.bias is not None:
        nn.init.zeros_(part.bias)


def _initialise_lora_embedding(parts: Any, kind: str) -> None:
    if kind == "lora_embedding_A":
        nn.init.zeros_(parts[ADAPTER])
    else:
        nn.init.normal_(parts[ADAPTER])

"""Inserts peft's low-rank adapters into a model on the meta device. Needs the extra `hf`.

[Note: initialised alone] peft initialises a whole adapter on every rank when it is inserted. Here adapters
are inserted on the meta device, and initialised later with all other parameters: A like a linear module
(peft's default), B with zeros. DoRA's magnitudes (arXiv:2402.09353) are set last: they begin as norms of the
base weights. The model's own `_init_weights` must not overwrite these values.
"""

import importlib.util
import json
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank
from fullshard.distributed.tensors import detached_local_tensor, shard_offsets
from fullshard.errors import MissingExtraError, SpecError, TrainError
from fullshard.models.adapted_parameters import compute_with_plain_sums, iterate_parameter_wrappers
from fullshard.quantities import join_names
from fullshard.spec.settings.train_section import AdapterSection
from fullshard.system.dotted import import_quietly

ADAPTER = "default"
_DISABLED = "_disable_adapters"  # attribute of peft's layers
_MAGNITUDES = "lora_magnitude_vector"  # name of the module that holds them in peft's layers
_PARAMETERS = "target_parameters"
_CONVERTED = ("rank_pattern", "alpha_pattern", _PARAMETERS)  # what peft changes in a config for experts
logger = logging.getLogger("fullshard")
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    # `models.packed_weights` packs matrices of these later.
    **dict.fromkeys(("bf16", "nf4", "int8"), torch.bfloat16),
}


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
    config = make_config_for_model(model, section)
    trained = _find_names_by_ending(model, section.trained, key="adapter.trained")
    modules = dict(model.named_modules())
    model.requires_grad_(False)
    with _peft_errors_as_spec_errors(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pattern keys did not match", category=RuntimeWarning)
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    compute_with_plain_sums(model)
    for name in trained:
        modules[name].requires_grad_()
    frozen_dtype = own_dtype if section.base_dtype == "auto" else _DTYPES[section.base_dtype]
    for parameter in model.parameters():
        if frozen_dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(frozen_dtype)
    _set_adapter_initialisers(model, gaussian=section.options.get("init_lora_weights") == "gaussian")
    return model


def make_config_for_model(model: nn.Module, section: AdapterSection) -> Any:
    """Returns peft's LoraConfig for `model`, which has no adapters yet, with full names of what is adapted.

    Targets by names that experts had before they were stacked (`w1`, `gate_proj`) are what peft makes of
    them: parameters of all experts, of twice the rank where two matrices became one. "all-linear" leaves out
    modules that peft would take for experts. Raises SpecError for targets that the model does not have and
    for options that peft refuses.
    """
    every = section.targets == "all-linear"
    names = _list_targets_in_chosen_layers(model, section) if every else [*section.targets]
    config = make_lora_config(section, targets=names, transposed=False)
    with _peft_errors_as_spec_errors(model):
        _convert_expert_targets(config, model)
    targets = [name for name in names if name in config.target_modules]
    options = dict(section.options)
    if not every:
        options |= {key: getattr(config, key) for key in _CONVERTED}
        left = section.model_copy(update={"targets": tuple(targets)})
        targets = _list_targets_in_chosen_layers(model, left)
    options[_PARAMETERS] = parameters = _find_target_parameters(model, options)
    _check_patterns_in_options(model, section, names=[*targets, *parameters])
    modules = dict(model.named_modules())
    transposed = any(has_transposed_weight(modules[name]) for name in targets)
    section = section.model_copy(update={"options": options})
    return make_lora_config(section, targets=targets, transposed=transposed)


def _convert_expert_targets(config: Any, model: nn.Module) -> None:
    """Lets peft change a config for the experts of transformers 5, as when it inserts adapters."""
    name = "peft.utils.transformers_weight_conversion"
    if all(importlib.util.find_spec(one) for one in (name, "transformers.core_model_loading")):
        import_quietly(name).convert_peft_config_for_transformers(config, model=model, conversions=None)


@contextmanager
def _peft_errors_as_spec_errors(model: nn.Module) -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SpecError(
            f"peft cannot put adapters into {type(model).__name__}.",
            got=str(error).strip().splitlines()[0],
            fix="other adapter.targets, or other adapter.options",
        ) from error


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


def reads_base_weight(layer: Any) -> bool:
    """Returns whether the adapter of `layer` computes with its base weight, not only beside it."""
    return hasattr(layer, "parameter_name") or len(getattr(layer, "lora_variant", ())) > 0


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


def set_magnitudes(model: nn.Module, names: Iterable[str]) -> None:
    """Sets those of the parameters `names` that are magnitudes of DoRA to the norms of their base weights.

    The model is sharded or plain, and its matrices B are zero. Gathers one base weight at a time. Collective.
    """
    parameters = dict(model.named_parameters())
    for name in (one for one in names if f".{_MAGNITUDES}." in one):
        layer: Any = model.get_submodule(name.partition(f".{_MAGNITUDES}.")[0])
        own, base = parameters[name], layer.get_base_layer().weight.detach()
        whole = base.full_tensor() if isinstance(base, DTensor) else base
        shard, offsets = detached_local_tensor(own), shard_offsets(own)
        box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shard.shape, strict=True))
        shard.copy_(layer.lora_magnitude_vector[ADAPTER].get_weight_norm(whole, 0.0, 1.0)[box])


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


def _find_target_parameters(model: nn.Module, options: Mapping[str, Any]) -> list[str]:
    parameters = [name for name, _ in model.named_parameters()]
    found = list[str]()
    for end in sorted(options.get(_PARAMETERS) or ()):
        own = [name for name in parameters if f".{name}".endswith(f".{end}")]
        if not own:
            raise _unknown_name_error(model, end, kind="parameter", key=_PARAMETERS, names=parameters)
        found += own
    if found and options.get("layers_to_transform"):
        raise SpecError(
            "adapter.options.layers_to_transform is for modules alone.",
            got=f"adapters of {', '.join(found[:3])}",
            why="peft adapts these parameters in all layers",
            fix=f"adapter.options.{_PARAMETERS} with full names of parameters",
        )
    return found


def _check_patterns_in_options(model: nn.Module, section: AdapterSection, *, names: list[str]) -> None:
    """Raises SpecError for a pattern in the options that none of `names`, the adapted ones, has."""
    for key in ("rank_pattern", "alpha_pattern"):
        for end in section.options.get(key) or []:
            if not any(re.fullmatch(rf"(.*\.)?({end})", name) for name in names):
                raise _unknown_name_error(model, end, kind="target", key=key, names=names)


def _unknown_name_error(
    model: nn.Module, end: str, *, kind: str, key: str, names: Iterable[str]
) -> SpecError:
    return SpecError(
        f"{type(model).__name__} has no {kind} {end!r}.",
        got=f"{end!r} in adapter.options.{key}",
        fix=", ".join(sorted({".".join(name.split(".")[-2:]) for name in names})[:8]),
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
    adapted = {id(wrapper.get_param()) for _, wrapper in iterate_parameter_wrappers(model)}
    stacked = [
        name
        for name, one in model.named_parameters()
        if one.ndim == 3 and ".lora_" not in name and any(part.isdigit() for part in name.split("."))
        if id(one) not in adapted and (every or any(stem in name.rpartition(".")[2] for stem in stems))
    ]
    kinds = dict.fromkeys(".".join(name.split(".")[-2:]) for name in stacked)
    if kinds:
        targets = json.dumps(section.targets)
        logger.warning("adapter.targets = %s leaves %s frozen: no linear modules", targets, ", ".join(kinds))
    if not section.options.keys() & {"layers_to_transform", "exclude_modules"}:
        ends = () if every else tuple(f".{one}" for one in section.targets)
        left = [
            name
            for name, module in model.named_modules()
            if _is_linear(module) and any(part.isdigit() for part in name.split("."))
            if ".lora_" not in name and ".base_layer" not in name and (every or name.endswith(ends))
        ]
        if left:
            names = ", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in left))
            logger.warning("peft takes %s for experts' names, and adds no adapters to these modules", names)
    places = Counter(re.split(r"\.\d+\.", name)[0] for name, _ in iterate_adapted_layers(model))
    if every and len(places) > 1:
        counts = ", ".join(f"{count} of {place}" for place, count in places.items())
        logger.warning('adapter.targets = "all-linear" adapts linear modules in several places: %s', counts)


def _list_adapter_target_names(model: nn.Module, section: AdapterSection) -> list[str]:
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
    fills: Mapping[str, Callable[[Tensor], object]] = {
        _MAGNITUDES: nn.init.ones_,  # until `set_magnitudes`
        "lora_A": partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
        "lora_B": nn.init.zeros_,
        "lora_embedding_A": nn.init.zeros_,
        "lora_embedding_B": nn.init.normal_,
    }
    for layer in model.modules():
        for kind, fill in fills.items():
            parts: Any = getattr(layer, kind, None)
            if parts is None or ADAPTER not in parts:
                continue
            if kind == "lora_A" and gaussian:
                fill = partial(nn.init.normal_, std=1 / cast(Any, layer).r[ADAPTER])
            part = parts[ADAPTER]
            holder, key = (part, "weight") if isinstance(part, nn.Module) else (parts, ADAPTER)
            yield holder, partial(_initialise_adapter, holder, key, fill=fill)


def _initialise_adapter(holder: Any, key: str, *, fill: Callable[[Tensor], object]) -> None:
    fill(getattr(holder, key))
    if getattr(holder, "bias", None) is not None:
        nn.init.zeros_(holder.bias)

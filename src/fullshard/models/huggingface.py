"""Builds transformers models from their config.json, without weights. Needs the extra `hf`."""

import difflib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fullshard.errors import MissingExtraError, SpecError
from fullshard.models.meta_init import construct_with_meta_parameters
from fullshard.spec.pretrained import check_config_limits, locate_config_file, read_config
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.system.dotted import import_quietly
from fullshard.system.small_files import ForeignErrorTranslator

_LAYERS = "num_hidden_layers"
_CAUSAL = "AutoModelForCausalLM"
_AUTO_MAP = "auto_map"
# Values of a config that do not decide how the model is built here -> the setting that does.
_SET_ELSEWHERE = {
    **dict.fromkeys(("dtype", "torch_dtype"), "precision.mode, and adapter.base_dtype for frozen weights"),
    "_attn_implementation": "model.attention",
    "model_type": "model.hf",
}
# Config keys that name code to run: classes in files beside the config, and kernels in hub repositories.
_NAMES_CODE = {
    _AUTO_MAP,
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
}


def meta_model(config_path: str | Path) -> nn.Module:
    """Builds the model that `config_path` describes, with parameters on the meta device and real buffers.

    `config_path` is a config.json, its directory, or the name of a model in the local cache. Raises the same
    errors as `build_hf_model`.

    >>> model = fs.meta_model("llama")  # a directory with a config.json
    >>> {parameter.device.type for parameter in model.parameters()}
    {'meta'}
    """
    return build_hf_model(HuggingFaceModel(hf=str(config_path)))


def build_hf_model(section: HuggingFaceModel) -> nn.Module:
    """Builds the transformers model that `section` names, for training: in fp32, without key/value cache.

    Parameters are on the meta device. Code that comes with the model is run only with `trust_remote_code`.

    Raises MissingExtraError without transformers. Raises SpecError for a name that is not on this machine, a
    config without a transformers model, an option that the config does not have, and an attention
    implementation that the model does not support.
    """
    config = build_hf_config(section)
    model_class = _choose_model_class(section, config)
    attention = None if section.attention == "auto" else section.attention
    build: Any = getattr(model_class, "_from_config", None)
    if build is None:  # an auto class; `_choose_model_class` has checked code beside it
        build = partial(model_class.from_config, trust_remote_code=False)

    def model_build_error(got: str) -> SpecError:
        fix = 'model.attention = "auto" or "eager"' if attention and attention in got else None
        name = getattr(model_class, "__name__", model_class)
        what = f"{section.setting_text}: transformers cannot build {name} of it."
        return SpecError(what, got=got, fix=fix)

    with ForeignErrorTranslator(model_build_error):
        return construct_with_meta_parameters(
            lambda: build(config, dtype=torch.float32, attn_implementation=attention)  # None: the model's own
        )


def import_transformers(needed_for: str) -> Any:
    """Imports transformers. Raises MissingExtraError, with what it is needed for, if it is absent."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("hf", package="transformers", needed_for=needed_for)
    import_quietly("transformers.modeling_utils")
    return importlib.import_module("transformers")


def build_hf_config(section: HuggingFaceModel) -> Any:
    """Returns the transformers config with `model.options` applied. Raises like `build_hf_model`."""
    import_transformers(f"[model] {section.setting_text}")
    path = locate_config_file(section.hf)
    found = read_config(path)
    check_config_limits(found, source=str(path))
    kind = found.get("model_type")
    if not isinstance(kind, str):
        raise SpecError(
            f"{section.setting_text}: {path} is not a config.json of a model.",
            got=f"an object with {', '.join(list(found)[:6]) or 'nothing in it'}",
            why="a model's has model_type, a text",
        )
    config_class = _choose_config_class(section, found, path=path)
    invalid = f"{section.setting_text}: {path} is not valid."
    with ForeignErrorTranslator(lambda got: SpecError(invalid, got=got)):
        # transformers 5 writes infinities in a form of its own, which its reader turns back into floats.
        data: dict[str, Any] = config_class.get_config_dict(str(path))[0]
        for part in (data, data.get("text_config")):
            if isinstance(part, dict):  # describes weights in files, which are dequantised on load
                cast(dict[str, Any], part).pop("quantization_config", None)
        if not section.trust_remote_code:
            data = remove_code_references(data)
        config = config_class.from_dict(dict(data))
        if section.options:
            changed = _merged_config_dict(data, section, config=config)
            check_config_limits(changed, source=f"{section.setting_text}, with model.options")
            config = config_class.from_dict(changed)
    for part in _iterate_config_parts(config):
        part.use_cache = False  # only generation needs the key/value cache
    return config


def _choose_config_class(section: HuggingFaceModel, data: Mapping[str, Any], *, path: Path) -> Any:
    transformers = import_transformers(f"[model] {section.setting_text}")
    kind, beside = str(data["model_type"]), auto_map_references(data).get("AutoConfig")
    if beside is not None and section.trust_remote_code:
        return load_class_from_model_code(beside, directory=path.parent, source=section.setting_text)
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind]
    if beside is not None:
        raise untrusted_model_code_error(section, beside)
    near = difflib.get_close_matches(kind, list(transformers.CONFIG_MAPPING), n=3)
    raise SpecError(
        f"{section.setting_text}: transformers {transformers.__version__} has no model {kind!r}.",
        fix=" or ".join([*near, "a newer transformers", 'model.python = "package.module:factory"']),
    )


def weight_dtype_in_config(section: HuggingFaceModel) -> torch.dtype | None:
    """Returns the dtype of the weights according to config.json; None if it does not define one."""
    data = read_config(locate_config_file(section.hf))
    found = getattr(torch, str(data.get("dtype", data.get("torch_dtype"))), None)
    return found if isinstance(found, torch.dtype) else None


def adds_balance_loss(model: nn.Module) -> bool:
    """Returns whether a mixture of transformers adds its load-balancing loss (`output_router_logits`)."""
    return any(getattr(config, "output_router_logits", False) for config in _own_and_text_config(model))


def balance_loss_factor(model: nn.Module) -> float:
    """Returns the factor of the load-balancing loss in the model's config; 0 if it has none."""
    factors = (getattr(config, "router_aux_loss_coef", None) for config in _own_and_text_config(model))
    return next((factor for factor in factors if factor is not None), 0.0)


def _own_and_text_config(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    return [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]


def unused_balance_loss_factor_note(model: nn.Module, options: Mapping[str, Any]) -> str | None:
    """Returns a note if `options` (of [model]) set the factor of a balance loss that is not computed."""
    inner: Any = options.get("text_config")
    given = [*options, *(cast(Mapping[str, Any], inner) if isinstance(inner, Mapping) else ())]
    if "router_aux_loss_coef" not in given or adds_balance_loss(model):
        return None
    return "model.options.router_aux_loss_coef has no effect: it needs output_router_logits = true beside it"


def is_causal_lm(model: nn.Module) -> bool:
    """Returns True for a transformers causal language model, sharded or not."""
    if not hasattr(getattr(model, "config", None), "model_type"):
        return False
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    beside = auto_map_references(vars(model.config)).get(_CAUSAL, "")
    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), beside.rpartition(".")[2]}
    return any(cls.__name__ in names for cls in type(model).__mro__)


def _merged_config_dict(data: Mapping[str, Any], section: HuggingFaceModel, *, config: Any) -> dict[str, Any]:
    """Returns `data`, the values of config.json, with the options of `section` applied.

    An option is named as in the config, or by the name common to all models (`num_hidden_layers`). The option
    of a part (`text_config`) is a table. Lists with an entry per layer are left out if the config makes them
    from other values, which options may change; others are cut to fewer layers, and left out for more.

    config: the config of `data`, without options. Raises SpecError for an option that it does not have, and
    for one that another setting replaces.
    """
    lists = _keys_of_per_layer_lists(data, getattr(config, _LAYERS, None))
    made = type(config).from_dict({key: value for key, value in data.items() if key not in lists})
    changed = {k: v for k, v in data.items() if k not in lists or getattr(made, k, None) != v}
    own_names: Mapping[str, str] = getattr(config, "attribute_map", {})
    for option, value in section.options.items():
        if option in _SET_ELSEWHERE:
            raise SpecError(
                f"{section.setting_text}: model.options cannot set {option!r}.",
                got=f"model.options.{option} = {value!r}",
                fix=_SET_ELSEWHERE[option],
            )
        if not hasattr(config, option):
            near = difflib.get_close_matches(option, list(config.to_dict()), n=2, cutoff=0.5)
            raise SpecError(
                f"{section.setting_text}: its config has no {option!r}.",
                got=f"model.options.{option} = {value!r}",
                fix=" or ".join(f"model.options.{key}" for key in near) or None,
            )
        key = own_names.get(option, option)
        part = getattr(config, option)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            inner = section.model_copy(update={"options": dict(value)})
            changed[key] = _merged_config_dict(changed.get(key) or part.to_dict(), inner, config=part)
            continue
        if option in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping):
            # A config of transformers 5 keeps the base of the rotation here, where scaling replaces the rest.
            bases = {k: v for k, v in (part or {}).items() if k in ("rope_theta", "partial_rotary_factor")}
            value = {**bases, **value}
            changed.pop("rope_scaling", None)  # its name in transformers 4, which would come first
        if key == own_names.get(_LAYERS, _LAYERS) and isinstance(value, int):
            changed = _cut_or_drop_per_layer_lists(changed, before=part, now=value)
        changed[key] = value
    return changed


def _keys_of_per_layer_lists(data: Mapping[str, Any], layers: Any) -> set[str]:
    return {key for key, value in data.items() if isinstance(value, list) and len(value) == layers > 1}


def _cut_or_drop_per_layer_lists(data: Mapping[str, Any], *, before: int, now: int) -> dict[str, Any]:
    """Cuts lists with one entry per layer to `now` layers. If layers are added, drops the lists."""
    per_layer = _keys_of_per_layer_lists(data, before)
    return {
        key: value[:now] if key in per_layer else value
        for key, value in data.items()
        if key not in per_layer or now <= before
    }


def _iterate_config_parts(config: Any) -> Iterable[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _iterate_config_parts(part)


def _choose_model_class(section: HuggingFaceModel, config: Any) -> Any:
    transformers = import_transformers(f"[model] {section.setting_text}")
    name = section.architecture
    if name == "auto":
        named: Any = getattr(config, "architectures", None)
        name = str(named[0]) if isinstance(named, list) and named else _CAUSAL
    path = locate_config_file(section.hf)
    beside = auto_map_references(read_config(path))
    by_class = {reference.rpartition(".")[2]: reference for reference in beside.values()}
    reference = by_class.get(name) or beside.get(name)
    if reference is not None and section.trust_remote_code:
        return load_class_from_model_code(reference, directory=path.parent, source=section.setting_text)
    found: Any = getattr(transformers, name, None)
    is_auto = hasattr(found, "from_config")
    if reference is not None and (found is None or (is_auto and type(config) not in found._model_mapping)):
        raise untrusted_model_code_error(section, reference)
    if is_auto or hasattr(found, "_from_config"):
        return found
    models = [one for one in dir(transformers) if one.startswith(name.partition("For")[0]) and "For" in one]
    near = difflib.get_close_matches(name, models or dir(transformers), n=3)
    raise SpecError(
        f"{section.setting_text}: transformers {transformers.__version__} has no model class {name!r}.",
        fix=" or ".join(f'model.architecture = "{one}"' for one in near) or "a newer transformers",
    )


# Code beside a model #
def remove_code_references(value: Any) -> Any:
    """Returns a config, as JSON values, without the keys that name code to run, at any depth."""
    if isinstance(value, Mapping):
        config = cast(Mapping[str, Any], value)
        return {key: remove_code_references(part) for key, part in config.items() if key not in _NAMES_CODE}
    if isinstance(value, list):
        return [remove_code_references(one) for one in cast(list[Any], value)]
    return value


def auto_map_references(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the config's `auto_map`: auto class -> `file.Class`, a class in a file beside the config."""
    named = config.get(_AUTO_MAP)
    if not isinstance(named, Mapping):
        return {}
    return {str(k): v for k, v in cast(Mapping[Any, Any], named).items() if isinstance(v, str)}


def load_class_from_model_code(reference: str, *, directory: Path, source: str) -> Any:
    """Runs the file in `directory` that `reference` (`file.Class`) names; returns the class."""
    modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    try:
        return modules.get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    except (OSError, ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise SpecError(
            f"{source}: the code beside it cannot be loaded.",
            got=f"{reference}: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
        ) from error


def untrusted_model_code_error(section: HuggingFaceModel, needed: str) -> SpecError:
    """Returns the error for a model that needs the class `needed` (`file.Class`) but is not trusted."""
    return SpecError(
        f"{section.setting_text} comes with Python code of its own, which is not run.",
        got=f"auto_map names {needed}, and model.trust_remote_code = false",
        why="the code may do whatever you may do on this machine",
        fix="read the code, then model.trust_remote_code = true; "
        'or install it as a package, and model.python = "package.module:factory"',
    )

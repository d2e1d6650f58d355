"""Maps tensors of a Hugging Face file to a model's tensors and back, by transformers' own rules.

[Note: followed, not copied] From version 5 on, transformers renames, joins and splits tensors while loading
(the experts of a mixture are separate tensors in the file and one tensor in the model). Its rules are run
here on tensors without values (`weights.trace`). The result says for each box of elements where it comes
from, without reading a file. Older versions keep the file's names.
"""

import copy
import importlib
import importlib.util
import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.errors import CheckpointError
from fullshard.models.adapted_parameters import name_in_base
from fullshard.models.huggingface import auto_map_references, import_transformers, remove_code_references
from fullshard.spec.pretrained import check_config_limits
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.spec.weight_map import BoxCopy, Shape, WeightMap, map_unchanged_tensor, map_weights_by_name
from fullshard.system.small_files import ForeignErrorTranslator
from fullshard.weights.trace import TracedTensor, UntraceableOperationError, make_source_tensor

# Names of the part without a head, for models that do not define base_model_prefix.
_BASES = ("model", "transformer")


def map_file_tensors_to_model(model: nn.Module, saved: Mapping[str, Shape]) -> WeightMap:
    """Maps the tensors of a file, given by name and shape, to those of `model`.

    `model` may be sharded, or have peft adapters, in which case its base model is the target. Tensors of a
    transformers model are mapped as by `from_pretrained`, those of any other model by name. Raises
    CheckpointError if transformers' rules do not fit the tensors, or compute values.
    """
    found = _find_transformers_submodule(model)
    if found is None:
        return map_weights_by_name(_shapes_of(model), saved, prefixes=_BASES)
    within, pretrained = found
    with torch.device("meta"):  # built anew: transformers uses the class names, which FSDP2 changes
        meta_model: Any = _class_before_sharding(pretrained)(copy.deepcopy(pretrained.config))
    core = _import_conversion_rules()
    if core is None:
        named = map_weights_by_name(_shapes_of(meta_model), saved, prefixes=(meta_model.base_model_prefix,))
    else:
        named = _apply_conversion_rules(meta_model, core, saved=saved)
    own = {
        name_in_base(name.removeprefix(within)): name
        for name in model.state_dict()
        if name.startswith(within)
    }
    return WeightMap(
        parts={own[name]: parts for name, parts in named.parts.items() if name in own},
        shapes={own[name]: shape for name, shape in named.shapes.items() if name in own},
        surplus=named.surplus,
    )


def map_model_tensors_to_file(meta_model: Any, tensors: Mapping[str, Shape]) -> WeightMap:
    """Maps the model's tensors, given by name and shape, to those of a file that its `from_pretrained` reads.

    `meta_model` is the model on the meta device, see `build_meta_model`. Raises CheckpointError if
    transformers' rules do not fit the tensors, or compute values.
    """
    core = _import_conversion_rules()
    if core is None:
        return map_weights_by_name(tensors, tensors, prefixes=())
    traced = {name: make_source_tensor(name, shape) for name, shape in tensors.items()}
    with _convert_untraced_errors(meta_model):
        made: dict[str, TracedTensor] = core.revert_weight_conversion(meta_model, traced)
    return WeightMap(
        parts={name: tensor.parts for name, tensor in made.items()},
        shapes={name: tuple(tensor.shape) for name, tensor in made.items()},
    )


def full_transformers_config(model: nn.Module) -> dict[str, Any] | None:
    """Returns the config from which `build_meta_model` rebuilds a transformers model; None for others."""
    found = _find_transformers_submodule(model)
    if found is None:
        return None
    _, pretrained = found
    config: dict[str, Any] = json.loads(pretrained.config.to_json_string(use_diff=False))
    return {**config, "architectures": [_class_before_sharding(pretrained).__name__]}


def build_meta_model(config: Mapping[str, Any], *, needed_for: str) -> Any:
    """Builds the transformers model that a complete config.json names, on the meta device.

    The config is untrusted, so no code beside a model is run for it. Raises MissingExtraError without
    transformers, CheckpointError for a config that transformers does not know, SpecError for impossible
    sizes.
    """
    transformers = import_transformers(needed_for)
    check_config_limits(config, source=needed_for)
    values = {key: value for key, value in remove_code_references(config).items() if key != "model_type"}
    named = config.get("architectures")

    def unknown_model_error(got: str) -> CheckpointError:
        if auto_map_references(config):
            return CheckpointError(
                f"{needed_for} would run Python code that came with the model.",
                got=f"{named}, which is not one of transformers' own",
                why="a checkpoint may come from anybody, so only classes of transformers are made from it",
                fix="--format safetensors, which writes the tensors by their own names",
            )
        return CheckpointError(
            f"{needed_for} needs a transformers that knows the model.",
            got=f"{named}, which transformers {transformers.__version__} does not have as it is: {got}",
            fix="the transformers that it was trained with, or a newer one",
        )

    with ForeignErrorTranslator(unknown_model_error), torch.device("meta"):
        (architecture,) = config["architectures"]
        known = transformers.AutoConfig.for_model(config["model_type"], **with_special_floats(values))
        made = getattr(transformers, architecture)
        if not issubclass(made, transformers.PreTrainedModel):
            raise TypeError(architecture)
        return made(known)


def with_special_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with floats in place of transformers' `{"__float__": "Infinity"}`."""
    return json.loads(
        json.dumps(config),
        object_hook=lambda one: float(one["__float__"]) if one.keys() == {"__float__"} else one,
    )


def _find_transformers_submodule(model: nn.Module) -> tuple[str, Any] | None:
    """Returns (name prefix, module) of the outermost transformers module in `model`; None without one."""
    for name, module in model.named_modules():
        if hasattr(type(module), "base_model_prefix") and hasattr(module, "config"):
            return (f"{name}." if name else ""), module
    return None


def _class_before_sharding(model: nn.Module) -> type:
    """Returns the class that `model` had before FSDP2 replaced it."""
    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))


def _shapes_of(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _import_conversion_rules() -> Any:
    """Returns transformers' module `core_model_loading`, which has the rules; None before version 5."""
    name = "transformers.core_model_loading"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _apply_conversion_rules(meta_model: Any, core: Any, *, saved: Mapping[str, Shape]) -> WeightMap:
    """Maps tensors of a file to those of a model by transformers' rules. See [Note: followed, not copied]."""
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    rules = mapping.get_model_conversion_mapping(meta_model)
    renamings = [rule for rule in rules if isinstance(rule, core.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted, base = _shapes_of(meta_model), meta_model.base_model_prefix
    parts, shapes = dict[str, tuple[BoxCopy, ...]](), dict[str, Shape]()
    surplus, converting = list[str](), dict[str, Any]()
    for source in sorted(saved, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(source, renamings, converters, base, wanted)
        if name not in wanted and source in wanted:  # renamed, although it was already the model's name
            name, pattern = core.rename_source_key(source, [], [], base, wanted)
        if name not in wanted:
            surplus.append(source)
        elif pattern is None:
            if name in parts:
                got, fix = f"{parts[name][0].source} and {source}", "a source with one of them"
                raise CheckpointError(f"two tensors would be {name} of the model.", got=got, fix=fix)
            parts[name], shapes[name] = map_unchanged_tensor(source, saved[source]), saved[source]
        else:
            if name not in converting:
                converting[name] = copy.deepcopy(by_pattern[pattern])
            converting[name].add_tensor(name, source, pattern, make_source_tensor(source, saved[source]))
    for name, converter in converting.items():
        with _convert_untraced_errors(meta_model):
            made: dict[str, Any] = converter.convert(name, model=meta_model, config=meta_model.config)
        for target, tensor in made.items():
            traced: TracedTensor = tensor[0] if isinstance(tensor, list) else tensor
            parts[target], shapes[target] = traced.parts, tuple(traced.shape)
    return WeightMap(parts=parts, shapes=shapes, surplus=tuple(_unexpected_tensor_names(meta_model, surplus)))


@contextmanager
def _convert_untraced_errors(meta_model: Any) -> Generator[None]:
    """Converts UntraceableOperationError, raised in the block, into CheckpointError."""
    try:
        yield
    except UntraceableOperationError as error:
        raise CheckpointError(
            f"the weights of {type(meta_model).__name__} are rearranged in a way that cannot be streamed.",
            got=str(error),
            fix="load it with from_pretrained on every rank, and shard the model that holds its weights",
        ) from error


def _unexpected_tensor_names(meta_model: Any, surplus: Iterable[str]) -> list[str]:
    """Returns the surplus tensors that transformers reports too: all except masks, position tables, etc."""
    kept = {name for name, _ in meta_model.named_buffers()}  # computed, so absent from the state dict
    patterns = [re.compile(one) for one in meta_model._keys_to_ignore_on_load_unexpected or ()]
    left = [name for name in surplus if name not in kept and not name.endswith(".inv_freq")]
    return [name for name in left if not any(pattern.search(name) for pattern in patterns)]


# The reference decoder as a Llama #
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_AROUND = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# Llama's name of each setting. A setting that Llama lacks raises an error unless it has its default.
_SIZES = {
    "vocabulary": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "max_sequence": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


def llama_config(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json of an equal Llama. Raises CheckpointError for settings that Llama lacks."""
    dumped, fields = decoder.model_dump(), DecoderConfig.model_fields
    other = [name for name in dumped if name not in _SIZES and dumped[name] != fields[name].default]
    if other:
        raise CheckpointError(
            "the decoder cannot be exported for transformers.",
            got=", ".join(f"model.{name} = {dumped[name]!r}" for name in other),
            why="it is exported as a Llama, which has no such setting",
        )
    sizes = {_SIZES[name]: value for name, value in dumped.items() if name in _SIZES}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        # read by transformers 5 and later, and by earlier ones
        "rope_parameters": {"rope_type": "default", "rope_theta": decoder.rope_theta},
        "rope_theta": decoder.rope_theta,
        **sizes,
    }


def llama_weight_map(tensors: Mapping[str, Shape]) -> WeightMap:
    """Returns the map of the decoder's tensors to Llama's. Raises CheckpointError for one Llama lacks."""
    parts: dict[str, tuple[BoxCopy, ...]] = {}
    shapes: dict[str, Shape] = {}
    for name, shape in tensors.items():
        new = _llama_tensor_name(name)
        parts[new], shapes[new] = map_unchanged_tensor(name, shape), shape
    return WeightMap(parts=parts, shapes=shapes)


def _llama_tensor_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _AROUND:
        return f"{_AROUND[module]}.{kind}"
    blocks, _, inner = module.partition(".")
    layer, _, part = inner.partition(".")
    if blocks != "blocks" or part not in _BLOCK:
        raise CheckpointError(
            "the model cannot be exported for transformers.",
            got=f"a tensor {name}",
            why="transformers has names for the reference decoder and its own models only",
            fix="--format safetensors",
        )
    return f"model.layers.{layer}.{_BLOCK[part]}.{kind}"

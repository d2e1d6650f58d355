"""Describes the reference decoder as a Llama of transformers, for export: its config and tensor names."""

from collections.abc import Mapping
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.spec.weight_map import BoxCopy, Shape, WeightMap, map_unchanged_tensor

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
        raise CheckpointError("the decoder cannot be exported for transformers.", got=f"a tensor {name}")
    return f"model.layers.{layer}.{_BLOCK[part]}.{kind}"

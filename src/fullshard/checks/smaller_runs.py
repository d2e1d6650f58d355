"""Smaller copies of a run's model, which the checks of the model can compute in seconds on a CPU."""

from collections.abc import Iterator, Mapping
from typing import Any

from fullshard.models.huggingface import build_hf_config
from fullshard.spec.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.run import Run

# A model up to this size is checked itself.
SMALL_PARAMETERS = 20_000_000
_LAYERS, _MOST_HEADS, _HEAD_DIM, _WIDTH = 2, 4, 16, 64
_LAYER_NAMES = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


def iterate_smaller_runs(run: Run, *, parameters: int) -> Iterator[tuple[Run, str]]:
    """Yields (run, description) of copies of the run's model to try, the best one first.

    parameters: number of parameters of the run's model

    The last is always the model itself. A copy that a family does not allow cannot be built, or cannot run.
    """
    if parameters > SMALL_PARAMETERS:
        if isinstance(run.model, DecoderConfig):
            yield _smaller_decoder(run, run.model)
        elif isinstance(run.model, HuggingFaceModel):
            yield from _smaller_hf_models(run, run.model)
    yield run, "the model itself"


def _smaller_decoder(run: Run, config: DecoderConfig) -> tuple[Run, str]:
    heads = min(config.heads, _MOST_HEADS)
    kv_heads = heads if config.kv_heads == config.heads else max(1, heads // 2)
    sizes = {
        "layers": min(config.layers, _LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "d_model": heads * _HEAD_DIM,
        "d_ff": 2 * _WIDTH,
    }
    text = f"a copy with {sizes['layers']} of {config.layers} layers, {sizes['d_model']} wide"
    return run.model_copy(update={"model": config.model_copy(update=sizes)}), text


def _smaller_hf_models(run: Run, section: HuggingFaceModel) -> Iterator[tuple[Run, str]]:
    config = build_hf_config(section)
    for narrow in (True, False):
        options = _smaller_options(config, narrow=narrow)
        merged = {**section.options, **options}
        smaller = section.model_copy(update={"options": merged, "weights": "none"})
        width = f", {_WIDTH} wide" if narrow else ""
        yield run.model_copy(update={"model": smaller}), f"a copy with few layers{width}"


def _smaller_options(config: Any, *, narrow: bool) -> dict[str, Any]:
    """Returns options that make a transformers config, and the configs of its parts, smaller."""
    options: dict[str, Any] = {}
    for name in _LAYER_NAMES:
        _lower(options, config, sizes={name: 4 if hasattr(config, "layer_types") else _LAYERS})
    if narrow:
        options |= _narrow_options(config)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and (inner := _smaller_options(part, narrow=narrow)):
            options[name] = inner
    return options


def _narrow_options(config: Any) -> dict[str, Any]:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not isinstance(getattr(config, "hidden_size", None), int):
        return {}
    kv = getattr(config, "num_key_value_heads", None)
    options: dict[str, Any] = {}
    shared = isinstance(kv, int) and kv < heads
    sizes = {"hidden_size": _WIDTH, "num_attention_heads": _MOST_HEADS, "head_dim": _HEAD_DIM}
    sizes |= {"num_key_value_heads": 2 if shared else _MOST_HEADS, "intermediate_size": 2 * _WIDTH}
    sizes |= {"moe_intermediate_size": _WIDTH, "num_experts_per_tok": 2, **dict.fromkeys(_EXPERT_NAMES, 8)}
    _lower(options, config, sizes=sizes)
    return options


def _lower(options: dict[str, Any], config: Any, *, sizes: Mapping[str, int]) -> None:
    """Adds to `options` each size of the config that is larger than in `sizes`."""
    for name, size in sizes.items():
        own = getattr(config, name, None)
        if isinstance(own, int) and not isinstance(own, bool) and own > size:
            options[name] = size

"""Reads which matmuls of a model of transformers can be divided over ranks, from the plan in its config.

`config.base_model_tp_plan` maps patterns such as `layers.*.self_attn.q_proj` to a style. Only the styles in
`_STYLES` are known here. Every matrix within the layers must have one, since layers that mix tokens, and are
not named by the plan, would see one rank's tokens only.

A mixture routes each rank's own tokens: its router and whatever else of it has no style are whole, and its
experts are not divided by their columns (see `parallel.expert_parallel`). Some mixtures' plans leave
out attention: `_ATTENTION_STYLES` are used if all of its modules are known.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.distributed.tensors import is_experts
from fullshard.errors import ShardError

_COLUMN, _ROW, _PACKED, _SPLIT_ROW = "colwise", "rowwise", "packed_colwise", "rowwise_split_input"
_DIVIDED = (_COLUMN, _ROW, _PACKED, _SPLIT_ROW)
# All ranks compute the second with all columns, as if their outputs were gathered.
_WHOLE = "replicated_with_grad_allreduce"
_STYLES = (*_DIVIDED, _WHOLE, "colwise_gather_output")
_KV = ("k_proj", "v_proj")
_ATTENTION_STYLES = {
    **dict.fromkeys(("q_proj", *_KV, "q_b_proj", "kv_b_proj"), _COLUMN),
    "o_proj": _ROW,
    "sinks": _WHOLE,  # a parameter of the attention module, of one element per head
    # Latent attention (arXiv:2405.04434) computes latents of all heads on each rank.
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), _WHOLE),
}


@dataclass(frozen=True)
class TransformersSplit:
    """The modules of a model by what is done with them. See `fullshard.parallel.tensor_parallel`.

    layers: in order of use
    containers: modules of the layers, such as attention, that compute with all tokens
    attentions: the containers with `kv_projections`, whose heads are divided
    packed: linears of two column weights in one
    split_rows: rows whose input has all columns on each rank
    """

    layers: list[nn.Module]
    containers: list[nn.Module]
    attentions: list[Any]
    columns: list[nn.Linear]
    kv_projections: list[nn.Linear]
    packed: list[nn.Linear]
    rows: list[nn.Linear]
    split_rows: list[nn.Linear]
    query_heads: int
    kv_heads: int


def read_transformers_split(model: Any, *, ranks: int) -> TransformersSplit:
    """Returns the modules of a causal language model that `ranks` ranks can divide, or raises ShardError."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise _unsupported_error(
            model,
            why="its balance loss (output_router_logits) is one of all tokens, of which each rank has a part",
        )
    styles = _styles_of_modules(model)
    base = model.base_model
    layers = list(base.layers)
    by_style: dict[str, list[nn.Linear]] = {style: [] for style in (*_STYLES, *_KV)}
    containers, layer_names = dict[str, nn.Module](), {f"layers.{index}" for index in range(len(layers))}
    for name, style in styles.items():
        module, (container, _, own) = base.get_submodule(name), name.rpartition(".")
        by_style[own if style == _COLUMN and own in _KV else style].append(module)
        if container not in layer_names:
            containers[container] = base.get_submodule(container)
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    split = TransformersSplit(
        layers,
        list(containers.values()),
        [one for one in containers.values() if getattr(one, "k_proj", None) in by_style["k_proj"]],
        by_style[_COLUMN],
        [*by_style["k_proj"], *by_style["v_proj"]],
        by_style[_PACKED],
        by_style[_ROW],
        by_style[_SPLIT_ROW],
        heads,
        kv_heads,
    )
    _check_sizes(split, model, ranks=ranks)
    return split


def _styles_of_modules(model: Any) -> dict[str, str]:
    """Returns module name within the base model -> style, of the modules within layers."""
    plan = _plan_with_attention(model)
    patterns = {re.escape(one).replace(r"\*", r"\d+"): style for one, style in plan.items()}
    styles: dict[str, str] = {}
    adapted = tuple(
        f"{name}." for name, one in model.base_model.named_modules() if hasattr(one, "base_layer")
    )
    modules = dict(model.base_model.named_modules())
    experts = tuple(name for name, module in modules.items() if is_experts(module))
    mixtures = tuple(f"{name.rpartition('.')[0]}." for name in experts)
    for name, module in modules.items():
        if not name.startswith("layers.") or name.startswith((*adapted, *experts)):
            continue
        style = next((s for pattern, s in patterns.items() if re.fullmatch(pattern, name)), None)
        if style is None and name.startswith(mixtures):
            continue
        own = getattr(module, "base_layer", module)  # inside an adapter
        matrices = any(parameter.ndim > 1 for parameter in own.parameters(recurse=False))
        if style is None and not matrices:
            continue
        divides = style in _DIVIDED
        if style not in _STYLES or (divides and (type(own) is not nn.Linear or name.count(".") < 3)):
            raise _unsupported_error(
                model,
                why=f"{name} has the style {style!r}, which is not supported"
                if style
                else f"{name} is not in the plan of its config (base_model_tp_plan)",
            )
        styles[name] = style
    if not styles:
        raise _unsupported_error(model, why="its config has no plan of its matmuls (base_model_tp_plan)")
    return styles


def _plan_with_attention(model: Any) -> dict[str, str]:
    """Returns the plan of the model's config, with `_ATTENTION_STYLES` if it has none of attention."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    attentions = [m for name, m in model.base_model.named_modules() if name.endswith(".self_attn")]
    names = {name.partition(".")[0] for attention in attentions for name, _ in attention.named_parameters()}
    if any(".self_attn." in pattern for pattern in plan) or not names <= _ATTENTION_STYLES.keys():
        return plan
    return plan | {f"layers.*.self_attn.{name}": _ATTENTION_STYLES[name] for name in names}


def _check_sizes(split: TransformersSplit, model: Any, *, ranks: int) -> None:
    """Raises ShardError if `ranks` do not divide the heads, or the columns of a matmul."""
    sizes = {
        split.query_heads,
        *(one.out_features for one in split.columns),
        *(one.out_features // 2 for one in split.packed),
        *(one.in_features for one in (*split.rows, *split.split_rows)),
    }

    def fits(count: int) -> bool:
        kv_fits = split.kv_heads % count == 0 or count % split.kv_heads == 0
        return kv_fits and all(size % count == 0 for size in sizes)

    if fits(ranks):
        return
    possible = [count for count in range(1, split.query_heads + 1) if fits(count)]
    nearest = min(possible, key=lambda count: (abs(count - ranks), count))
    raise ShardError(
        f"the matmuls of {type(model).__name__} cannot be divided over {ranks} ranks.",
        got=f"sharding.tensor_parallel = {ranks}; {split.query_heads} heads, {split.kv_heads} key/value "
        f"heads, matmuls of {', '.join(map(str, sorted(sizes - {split.query_heads})))} columns",
        why="each rank computes whole heads, and an equal share of the columns",
        fix=f"sharding.tensor_parallel = {nearest}",
    )


def _unsupported_error(model: Any, *, why: str) -> ShardError:
    return ShardError(
        f"the matmuls of {type(model).__name__} cannot be divided over ranks.",
        got="sharding.tensor_parallel above 1",
        why=why,
        fix="sharding.tensor_parallel = 1; sharding.context_parallel divides the tokens of more models",
    )

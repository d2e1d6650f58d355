"""Models whose matmuls are divided over ranks (tensor parallel), with the sequence divided between them.

[Note: tensor and sequence parallel]
T adjacent ranks share each matmul: arXiv:1909.08053, with the sequence parallelism of arXiv:2205.05198.
Between matmuls, each rank has 1/T of the tokens; within, all tokens, and 1/T of the heads or columns:

    x (tokens / T) ── norm ── gather ── query, key, value ── attention ── output ── reduce ── + x
                    (tokens / T)      (heads / T)                     (sums over heads)   (tokens / T)

column      the rows of the weight are divided: a Linear with fewer output features, see [Note: saved parts]
row         the columns are divided: each rank has one summand of the output, which is reduced and scattered
packed      two column weights in one, of which each is divided; every rank has all of it, and uses its rows
kv heads    fewer than ranks: their weights are whole, and each rank computes the head that its queries use
experts     whole: each rank's tokens go to all of them, see `fullshard.parallel.expert_parallel`
embedding   its rows are divided; the sum over ranks has one summand that is not 0
head        its rows are divided; the default loss never gathers its logits, any other code gets them whole

[Note: whole parameters]
A parameter that each rank has whole, such as a norm's, is used for the rank's own tokens or heads alone. So
its gradient on one rank is a summand, and `fullshard.training.gradients` sums these once per step. All that a
rank computes between embedding and head obeys this rule, also before the first block and after the last.

[Note: saved parts]
Eager blocks without recompute save this rank's part of a gathered input for backward, and gather it again
(`gather_for_matmuls`). A block that recomputes all gathers it anyway, and a compiled one saves
what the compiler chooses, which is the whole input.

Forwards are replaced, not modules, so names in checkpoints stay. The modules compute with local tensors: see
[Note: DTensors are storage] in `fullshard.parallel.model_parallel`.

[Note: styles]
What is done with each module comes from the table `sharding.tensor_parallel_styles`, which maps names of
modules to styles (`*` stands for one part of a name, such as a number), or from the config of a model of
transformers.

| style | module |
|---|---|
| `embedding` | an Embedding whose vocabulary is divided; it returns all tokens |
| `cut_input` | gets all tokens, and computes with this rank's, such as the first block |
| `gather_output` | computes with this rank's tokens, and returns the outputs of all, such as a norm |
| `gather_input` | gets this rank's tokens, and computes with all, such as an attention module |
| `colwise` | a Linear whose output features are divided |
| `colwise_2`, `colwise_3`, … | a Linear whose weight consists of 2, 3, … equal weights, each divided |
| `colwise_heads_8`, … | a Linear with 8, … key/value heads, which are divided, and may be fewer than ranks |
| `rowwise` | a Linear whose input features are divided; it returns this rank's tokens, summed over ranks |
| `rowwise_of_whole` | the same, with an input that has all features on each rank |
| `divide:heads`, … | any module: its integer attribute `heads`, … is divided by the number of ranks |
| `head` | the Linear over the vocabulary, which is divided; it gets all tokens |

A module may have several styles, joined by `+`. Modules between `gather_…` and `rowwise` compute with all
tokens and this rank's columns, all others of blocks with this rank's tokens: see [Note: whole parameters].

[Note: styles of transformers]
`config.base_model_tp_plan` maps patterns such as `layers.*.self_attn.q_proj` to styles of transformers. Only
those in `_OWN_STYLES` are known here. Every matrix within the layers must have one, since layers that mix
tokens, and are not named by the plan, would see one rank's tokens only. A mixture routes each rank's own
tokens: its router and whatever else of it has no style are whole, and its experts are not divided by their
columns (see `parallel.expert_parallel`). Some mixtures' plans leave out attention: `_ATTENTION_STYLES` are
used if all of its modules are known.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from fullshard.distributed.tensors import is_experts
from fullshard.errors import ShardError
from fullshard.models.decoder import DecoderModel, Mixture
from fullshard.models.huggingface import is_causal_lm
from fullshard.parallel.matmul_split import MatmulSplit, linear_and_adapter_matrices
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import check_decoder_can_be_split


def divide_matmuls_and_return_split_dims(
    model: nn.Module, plan: Plan, *, rank: int, group: str
) -> dict[str, int | None]:
    """Divides the matmuls of `model` over ranks. Returns the dim in which each parameter is divided, by name.

    The parameters themselves are divided when the model is sharded; None: each rank has the whole parameter.

    rank: global rank; those of one group are adjacent
    group: name of the process group of the ranks that share matmuls; fake tensors need none

    `model` is the reference decoder, a causal language model of transformers whose config has a plan of its
    matmuls (`base_model_tp_plan`), or any whose modules `sharding.tensor_parallel_styles` names. Raises
    ShardError for others, and for sizes that the ranks cannot divide.
    """
    recompute = plan.run.recompute
    recomputes_all = recompute.mode in ("full", "selective") and recompute.blocks is None
    gathers_again = not recomputes_all and plan.run.run.compile is not True
    split = MatmulSplit(plan.tensor_parallel, rank % plan.tensor_parallel, group, gathers_again)
    if styles := plan.run.sharding.tensor_parallel_styles:
        divide_by_styles(model, split, styles=styles)
    elif isinstance(model, DecoderModel):
        check_decoder_can_be_split(model.config, plan.tensor_parallel)
        _divide_decoder(model, split)
    elif is_causal_lm(model):
        divide_transformers_model(model, split)
    else:
        raise ShardError(
            f"the matmuls of {type(model).__name__} cannot be divided over ranks.",
            got=f"sharding.tensor_parallel = {plan.tensor_parallel}",
            why="nothing says which of its weights are divided by rows, and which by columns",
            fix="sharding.tensor_parallel_styles, or sharding.tensor_parallel = 1",
        )
    return {name: split.dims.get(id(parameter)) for name, parameter in model.named_parameters()}


def _divide_decoder(model: DecoderModel, split: MatmulSplit) -> None:
    kv_heads = model.config.kv_heads
    split.divide_embedding(model.embedding, scatters=True)
    split.gather_output(model.norm)
    for block in model.blocks:
        attention: Any = block.attention
        split.gather_output(block.attention_norm)
        split.make_column_parallel(attention.query)
        for projection in (attention.key, attention.value):
            split.divide_kv_projection(projection, kv_heads=kv_heads)
        split.make_row_parallel(attention.output)
        feed_forward: Any = block.feed_forward
        if isinstance(feed_forward, Mixture):  # routes this rank's tokens, to whole experts
            feed_forward.router.add_group_that_shares_sequences(split.ranks, tensor_group=split.group)
            feed_forward = feed_forward.shared
            if feed_forward is None:
                continue
            split.gather_input(feed_forward)
        else:
            split.gather_output(block.feed_forward_norm)
        for column in (feed_forward.gate, feed_forward.up):
            split.make_column_parallel(column)
        split.make_row_parallel(feed_forward.down)
    split.divide_head(model.head)


_WHOLE = "whole"  # each rank computes with all of it
_ROW_OF_WHOLE = "rowwise_of_whole"  # its input has all columns on each rank
_ALLREDUCE = "replicated_with_grad_allreduce"
# Styles of transformers, and those here. As if outputs were gathered, all ranks compute with all columns.
_OWN_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "colwise_2",
    "rowwise_split_input": _ROW_OF_WHOLE,
    _ALLREDUCE: _WHOLE,
    "colwise_gather_output": _WHOLE,
}
_KV = ("k_proj", "v_proj")
_ATTENTION_STYLES = {
    **dict.fromkeys(("q_proj", *_KV, "q_b_proj", "kv_b_proj"), "colwise"),
    "o_proj": "rowwise",
    "sinks": _ALLREDUCE,  # a parameter of the attention module, of one element per head
    # Latent attention (arXiv:2405.04434) computes latents of all heads on each rank.
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), _ALLREDUCE),
}
_METHODS: dict[str, Callable[[MatmulSplit, Any], None]] = {
    "embedding": partial(MatmulSplit.divide_embedding, scatters=False),
    "cut_input": MatmulSplit.cut_input,
    "gather_output": MatmulSplit.gather_output,
    "gather_input": MatmulSplit.gather_input,
    "colwise": MatmulSplit.make_column_parallel,
    "rowwise": MatmulSplit.make_row_parallel,
    _ROW_OF_WHOLE: partial(MatmulSplit.make_row_parallel, cuts_input=True),
    "head": MatmulSplit.divide_head,
}
StyledModule = tuple[Any, str]


# By a table #
def divide_by_styles(model: nn.Module, split: MatmulSplit, *, styles: Mapping[str, str]) -> None:
    """Divides the modules that `styles` names. Raises ShardError for names and sizes that do not fit."""
    styled = list(_iterate_styled_modules(model, styles))
    heads = [module for module, style in styled if style == "head"]
    if len(heads) != 1:
        raise _styles_error(
            got=f"{len(heads)} modules of style head",
            why="the loss is divided over ranks with the vocabulary of the one head",
        )
    _check_sizes(model, styled, ranks=split.ranks)
    _apply_styles(styled, split)
    if not hasattr(model, "get_output_embeddings"):  # by which the default loss finds the head
        setattr(model, "get_output_embeddings", lambda: heads[0])  # noqa: B010


def _apply_styles(styled: Iterable[StyledModule], split: MatmulSplit) -> None:
    for module, style in styled:
        number = style.rpartition("_")[2]
        if style in _METHODS:
            _METHODS[style](split, module)
        elif style.startswith("divide:"):
            name = style.partition(":")[2]
            setattr(module, name, getattr(module, name) // split.ranks)
        elif style.startswith("colwise_heads_"):
            split.divide_kv_projection(module, kv_heads=int(number))
        elif style != _WHOLE:
            split.compute_with_rows_only(module, split.own_rows_of_fused_weight(module, parts=int(number)))


def _iterate_styled_modules(model: nn.Module, styles: Mapping[str, str]) -> Iterator[StyledModule]:
    """Yields (module, style) in module order. Raises ShardError for names or styles that fit no module."""
    patterns = {key: re.compile(re.escape(key).replace(r"\*", r"[^.]+")) for key in styles}
    left = set(styles)
    for name, module in model.named_modules():
        for key, pattern in patterns.items():
            if not pattern.fullmatch(name):
                continue
            left.discard(key)
            for style in styles[key].split("+"):
                if not _fits(module, style):
                    raise _styles_error(
                        got=f"{key} = {style!r}, for a {type(module).__name__}",
                        why="there is no such style, or it is not for such modules",
                        fix=", ".join((*_METHODS, "colwise_N", "colwise_heads_N", "divide:ATTRIBUTE")),
                    )
                yield module, style
    if left:
        raise _styles_error(got=f"{min(left)}, which names no module of {type(model).__name__}")


def _fits(module: Any, style: str) -> bool:
    if style == "embedding":
        return isinstance(module, nn.Embedding)
    if style.startswith("divide:"):
        return isinstance(getattr(module, style.partition(":")[2], None), int)
    if style in ("cut_input", "gather_output", "gather_input"):
        return True
    is_counted = style.startswith("colwise_") and style.rpartition("_")[2].isdecimal()
    is_known = style in ("colwise", "rowwise", _ROW_OF_WHOLE, "head") or is_counted
    return is_known and isinstance(linear_and_adapter_matrices(module)[0], nn.Linear)


def _check_sizes(
    model: nn.Module, styled: Sequence[StyledModule], *, ranks: int, heads: Iterable[int] = ()
) -> None:
    """Raises ShardError if `ranks` do not divide heads or columns, with the nearest number that does.

    heads: numbers of query heads that are no attribute of a module
    """
    sizes, kv_heads = set[int](heads), set[int]()
    for module, style in styled:
        number = style.rpartition("_")[2]
        if style.startswith("divide:"):
            sizes.add(getattr(module, style.partition(":")[2]))
        elif style.startswith("colwise_heads_"):
            kv_heads.add(int(number))
        elif style.startswith("colwise"):
            sizes.add(module.out_features // (int(number) if number.isdecimal() else 1))
        elif style in ("rowwise", _ROW_OF_WHOLE):
            sizes.add(module.in_features)

    def can_divide_over_ranks(count: int) -> bool:
        shares = all(heads % count == 0 or count % heads == 0 for heads in kv_heads)
        return shares and all(size % count == 0 for size in sizes)

    if can_divide_over_ranks(ranks):
        return
    possible = [count for count in range(1, 2 * ranks + 1) if can_divide_over_ranks(count)]
    raise ShardError(
        f"the matmuls of {type(model).__name__} cannot be divided over {ranks} ranks.",
        got=f"sharding.tensor_parallel = {ranks}; heads and columns "
        f"{', '.join(map(str, sorted(sizes | kv_heads)))}",
        why="each rank computes whole heads, and an equal share of the columns",
        fix=f"sharding.tensor_parallel = {min(possible, key=lambda count: (abs(count - ranks), count))}",
    )


def _styles_error(*, got: str, why: str | None = None, fix: str | None = None) -> ShardError:
    return ShardError(
        "sharding.tensor_parallel_styles do not fit the model.",
        got=got,
        why=why,
        fix=fix or "docs/tensor-parallel.md lists the styles",
    )


# By the config of a model of transformers #
def divide_transformers_model(model: Any, split: MatmulSplit) -> None:
    """Divides a causal language model. See [Note: styles of transformers]. Raises ShardError."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise _unsupported_error(
            model,
            why="its balance loss (output_router_logits) is one of all tokens, of which each rank has a part",
        )
    styles, base = _styles_of_layer_modules(model), model.base_model
    layers = list(base.layers)
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    containers, matmuls, attentions = dict[Any, str](), list[StyledModule](), set[Any]()
    for name, style in styles.items():
        module, (container, _, own) = base.get_submodule(name), name.rpartition(".")
        around = base.get_submodule(container)
        if around not in layers:
            containers[around] = "gather_input"  # such as attention, which computes with all tokens
        if style == "colwise" and own in _KV:
            style = f"colwise_heads_{kv_heads}"
            attentions.add(around)
        matmuls.append((module, style))
    _check_sizes(model, matmuls, ranks=split.ranks, heads=[heads])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    before = [(embedding, "embedding"), (layers[0], "cut_input"), *containers.items()]
    _apply_styles([*before, *matmuls, (layers[-1], "gather_output"), (head, "head")], split)
    for attention in attentions:
        own_kv_heads = max(kv_heads // split.ranks, 1)
        attention.num_key_value_groups = heads // split.ranks // own_kv_heads
        if hasattr(attention, "sinks"):
            split.dims[id(attention.sinks)] = 0


def _styles_of_layer_modules(model: Any) -> dict[str, str]:
    """Returns {module name within the base model: name of our style} for the modules within its layers."""
    plan = _tp_plan_with_attention_styles(model)
    patterns = {re.escape(one).replace(r"\*", r"\d+"): style for one, style in plan.items()}
    styles: dict[str, str] = {}
    modules = dict(model.base_model.named_modules())
    adapted = tuple(f"{name}." for name, module in modules.items() if hasattr(module, "base_layer"))
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
        found = None if style is None else _OWN_STYLES.get(style)
        divides = found not in (None, _WHOLE)
        if found is None or (divides and (type(own) is not nn.Linear or name.count(".") < 3)):
            raise _unsupported_error(
                model,
                why=f"{name} has the style {style!r}, which is not supported"
                if style
                else f"{name} is not in the plan of its config (base_model_tp_plan)",
            )
        styles[name] = found
    if not styles:
        raise _unsupported_error(model, why="its config has no plan of its matmuls (base_model_tp_plan)")
    return styles


def _tp_plan_with_attention_styles(model: Any) -> dict[str, str]:
    """Returns the plan of the model's config, with `_ATTENTION_STYLES` if it has none of attention."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    attentions = [m for name, m in model.base_model.named_modules() if name.endswith(".self_attn")]
    names = {name.partition(".")[0] for attention in attentions for name, _ in attention.named_parameters()}
    if any(".self_attn." in pattern for pattern in plan) or not names <= _ATTENTION_STYLES.keys():
        return plan
    return plan | {f"layers.*.self_attn.{name}": _ATTENTION_STYLES[name] for name in names}


def _unsupported_error(model: Any, *, why: str) -> ShardError:
    return ShardError(
        f"the matmuls of {type(model).__name__} cannot be divided over ranks.",
        got="sharding.tensor_parallel above 1",
        why=why,
        fix="sharding.tensor_parallel = 1; sharding.context_parallel divides the tokens of more models",
    )

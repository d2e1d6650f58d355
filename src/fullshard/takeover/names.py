"""Matches the tensors of a foreign checkpoint with those of a run's model: names, boxes, order of moments.

[Note: one map for all] `weights.names.map_file_tensors_to_model` gives the boxes of weights to copy. Moments
have the shapes of their parameters, so the same boxes move them. Names and rows that another trainer has in
another way (wrappers, torchtitan's Llama) are changed before, for weights and moments alike.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fullshard.errors import CheckpointError, SpecError
from fullshard.models.build import text_config
from fullshard.models.decoder import DecoderModel
from fullshard.quantities import join_names
from fullshard.spec.weight_map import BoxCopy, Shape, WeightMap, map_unchanged_tensor
from fullshard.takeover.source import (
    ForeignCheckpoint,
    ForeignGroup,
    ForeignOptimizer,
    LazyTensor,
    change_names,
)
from fullshard.weights.files import iterate_copies
from fullshard.weights.names import llama_weight_map, map_file_tensors_to_model

ORDERS = ("decay-first", "parameters")
"""Orders of numbered moments: groups of transformers' Trainer, or `model.parameters()`."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
# Names of torchtitan's Llama 3, and of the same tensors in a file of Hugging Face.
_TITAN = {
    **{"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    "lm_head": "lm_head",
    **{f"attention.w{one}": f"self_attn.{one}_proj" for one in "qkvo"},
    **{f"attention.qkv_linear.w{one}": f"self_attn.{one}_proj" for one in "qkv"},
    **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"feed_forward.w{i}": f"mlp.{one}_proj" for i, one in ((1, "gate"), (2, "down"), (3, "up"))},
}
_TITAN_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.weight")
_FIX_FOR_EQUAL_NAMES = "a source with one of them, or other --names"
_ROTATED = re.compile(r".*\.w([qk])\.weight")
_FUSED = re.compile(r"(.*\.qkv_linear\.w)qkv\.weight")  # state of it; the weights are saved apart
# As transformers' Trainer selects parameters without weight decay, in its version 5.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True)
class MatchedCheckpoint:
    """The tensors of a source under the names of a run's model.

    weights, moments, updates, groups: as in `ForeignCheckpoint` and `ForeignOptimizer`
    sources: the names in the source that each tensor of the model consists of
    missing: tensors of the model that the source lacks
    left_over, left_over_state: names in the source of tensors, and of state, that the model does not have
    frozen: names in the source of parameters that have state there, and are frozen in the run
    """

    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    updates: Mapping[str, float]
    groups: tuple[ForeignGroup, ...]
    sources: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    left_over_state: tuple[str, ...]
    frozen: tuple[str, ...]


def match_names(
    source: ForeignCheckpoint,
    model: nn.Module,
    *,
    names: Mapping[str, str] | None = None,
    order: str | Sequence[str] | None = None,
) -> MatchedCheckpoint:
    """Returns the tensors of `source` under the names of `model`, which has no values.

    names: {pattern of a name in the source: name in the model}; each `*` stands for the same text in both
    order: order of numbered moments: one of ORDERS, or the parameters' names as in the source or the model

    Raises CheckpointError if shapes or names do not fit, SpecError if an order is needed.
    """
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    source = replace(source, optimizer=_split_fused_state(source, model))
    here, heads = _names_here(source, model, wanted=wanted, names=names or {})
    source = _with_names(source, here, heads=heads)
    original = {new: old for old, new in here.items()}
    found = map_file_tensors_to_model(model, {name: one.shape for name, one in source.weights.items()})
    _check_shapes(found, wanted)
    if source.optimizer.has_numbered_moments:
        source = replace(source, optimizer=_name_numbered_moments(source, found, order=order, model=model))
    state = source.optimizer
    first = {id(one): name for name, one in model.named_parameters()}
    own = {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}
    names_of: dict[str, list[str]] = {}  # of a tied tensor several, of which its own counts before aliases
    for name in sorted(found.parts, key=lambda one: own.get(one, one) != one):
        names_of.setdefault(own.get(name, name), []).append(name)
    parts = {name: found.parts[some[0]] for name, some in names_of.items()}
    weights = {n: _copy_boxes(one, wanted[n], sources=source.weights) for n, one in parts.items()}
    for name, (_, *aliases) in names_of.items():
        for alias in aliases:
            what, got = f"{name} and {alias} differ in the source.", "one tied tensor in the run's model"
            error = CheckpointError(what, got=got, fix="a run whose model does not tie them")
            other = _copy_boxes(found.parts[alias], wanted[alias], sources=source.weights)
            weights[name] = weights[name].check_equal_when_read(other, error)
    # The boxes of moments; if numbers count the model's parameters in memory, they have their names.
    boxes = parts if source.has_order else {n: map_unchanged_tensor(n, wanted[n]) for n in parameters}
    targets: dict[str, dict[str, None]] = {}  # a source may be split among several
    for name, some in boxes.items():
        for part in some:
            targets.setdefault(part.source, {})[name] = None
    moved = {n: _move_moments(source, boxes.get(n, ()), name=n, shape=wanted[n]) for n in parameters}
    return MatchedCheckpoint(
        weights=weights,
        moments={name: state for name, state in moved.items() if state},
        updates={n: count for one, count in state.updates.items() for n in targets.get(one, ())},
        groups=tuple(
            replace(group, names=tuple(dict.fromkeys(n for one in group.names for n in targets.get(one, ()))))
            for group in state.groups
        ),
        sources={n: tuple(dict.fromkeys(original[one.source] for one in some)) for n, some in parts.items()},
        missing=tuple(name for name in wanted if own.get(name, name) == name and name not in parts),
        left_over=tuple(original[name] for name in found.surplus),
        left_over_state=tuple(original.get(name, name) for name in state.moments if name not in targets),
        frozen=tuple(original.get(n, n) for n in state.moments if targets.get(n, {}).keys() - parameters),
    )


def _names_here(
    source: ForeignCheckpoint, model: nn.Module, *, wanted: Mapping[str, Shape], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Returns {name in the source: name in the model, or in a file of Hugging Face}.

    Also returns the numbers of heads of queries and keys, by `q` and `k`, if rows are in torchtitan's order.
    """
    heads: dict[str, int] = {}
    here = {name: _plain_name(name, names) for name in (*source.weights, *source.optimizer.moments)}
    weights = {here[name] for name in source.weights}
    prefix = next(iter(weights), "").partition(".")[0] + "."  # a LightningModule's attribute
    inside = {name.removeprefix(prefix) for name in weights}
    is_attribute = all(name.startswith(prefix) for name in weights)
    if is_attribute and inside & wanted.keys() and not weights & wanted.keys():
        here, weights = {old: name.removeprefix(prefix) for old, name in here.items()}, inside
    if "tok_embeddings.weight" in weights - wanted.keys():
        heads = _head_counts(model)
        here = {old: _titan_name(name) for old, name in here.items()}
        weights = {here[name] for name in source.weights}
    if isinstance(model, DecoderModel) and "model.embed_tokens.weight" in weights:
        own = {llama: parts[0].source for llama, parts in llama_weight_map(wanted).parts.items()}
        here = {old: own.get(name, name) for old, name in here.items()}
    return here, heads


def _plain_name(name: str, names: Mapping[str, str]) -> str:
    """Returns a name without wrappers' parts, after the first pattern of `names` that matches it."""
    name = _WRAPPERS.sub("", name)
    for pattern, new in names.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), name)
        if match is not None:
            for text in match.groups():
                new = new.replace("*", text, 1)
            return new
    return name


def _titan_name(name: str) -> str:
    match = _TITAN_NAME.fullmatch(name)
    if match is None or match[2] not in _TITAN:
        return name if match is None or match[1] is None else _raise_other_titan(f"{name} in the source")
    return f"model.layers.{match[1]}.{_TITAN[match[2]]}.weight" if match[1] else f"{_TITAN[match[2]]}.weight"


def _head_counts(model: nn.Module) -> dict[str, int]:
    if isinstance(model, DecoderModel):
        return {"q": model.config.heads, "k": model.config.kv_heads}
    config: Any = text_config(model)
    if getattr(config, "model_type", None) != "llama":
        _raise_other_titan(f"{type(model).__name__} in the run")
    return {"q": config.num_attention_heads, "k": config.num_key_value_heads}


def _split_fused_state(source: ForeignCheckpoint, model: nn.Module) -> ForeignOptimizer:
    """Gives wq, wk and wv of torchtitan 0.3 their state, which it saves as that of the fused `wqkv`.

    Its rows are, for each head of keys: those of the queries of this head, of the key, and of the value.
    """
    state, parts = source.optimizer, dict[str, list[str]]()
    for name in state.moments:
        own = [f"{match[1]}{one}.weight" for one in "qkv"] if (match := _FUSED.fullmatch(name)) else []
        if own and source.weights.keys() >= {*own}:
            parts[name] = own
    moments = {name: one for name, one in state.moments.items() if name not in parts}
    for name, own in parts.items():
        heads, shapes = _head_counts(model)["k"], [source.weights[one].shape for one in own]
        for number, (one, shape) in enumerate(zip(own, shapes, strict=True)):
            select = {"heads": heads, "rows": [rows // heads for rows, *_ in shapes], "number": number}
            moments[one] = {
                key: replace(tensor, shape=shape, read=partial(_read_rows_of_heads, tensor, **select))
                for key, tensor in state.moments[name].items()
            }
    names = [tuple(new for one in group.names for new in parts.get(one, [one])) for group in state.groups]
    groups = tuple(replace(group, names=own) for group, own in zip(state.groups, names, strict=True))
    updates = {one: count for name, count in state.updates.items() for one in parts.get(name, [name])}
    return replace(state, moments=moments, updates=updates, groups=groups)


def _read_rows_of_heads(tensor: LazyTensor, *, heads: int, rows: list[int], number: int) -> Tensor:
    whole = tensor.read()
    if whole.shape[0] != heads * sum(rows):
        got = f"{whole.shape[0]} rows, for {rows} of each of {heads} heads"
        raise CheckpointError("the state of a fused wqkv is of another model.", got=got)
    return whole.unflatten(0, (heads, -1)).split(rows, dim=1)[number].flatten(0, 1)


def _raise_other_titan(got: str) -> NoReturn:
    why = "others have the same names, and rotate queries and keys in another way"
    fix = "a run.toml with a Llama of transformers, or with the reference decoder"
    raise CheckpointError("of torchtitan's models, Llama 3 alone is read.", got=got, why=why, fix=fix)


def _with_names(
    source: ForeignCheckpoint, here: Mapping[str, str], *, heads: Mapping[str, int]
) -> ForeignCheckpoint:
    read = {name: _in_halves_of_heads(name, one, heads=heads) for name, one in source.weights.items()}
    weights = change_names(read, here, fix=_FIX_FOR_EQUAL_NAMES)
    return replace(source, weights=weights, optimizer=_rename_state(source.optimizer, here, heads=heads))


def _rename_state(
    state: ForeignOptimizer, here: Mapping[str, str], *, heads: Mapping[str, int]
) -> ForeignOptimizer:
    """Returns the state by the names `here`, with that of queries and keys in halves of heads."""
    moments = {
        name: {key: _in_halves_of_heads(name, one, heads=heads) for key, one in own.items()}
        for name, own in state.moments.items()
    }
    return replace(
        state,
        moments=change_names(moments, here, fix=_FIX_FOR_EQUAL_NAMES),
        updates={here[name]: count for name, count in state.updates.items() if name in here},
        groups=tuple(replace(g, names=tuple(here.get(n, n) for n in g.names)) for g in state.groups),
    )


def _in_halves_of_heads(name: str, tensor: LazyTensor, *, heads: Mapping[str, int]) -> LazyTensor:
    """Returns rows of queries and keys in Hugging Face's order, which rotates the two halves of a head.

    torchtitan rotates pairs of neighbouring rows. Its own export moves rows in the same way.
    """
    match = _ROTATED.fullmatch(name)
    if not heads or match is None:
        return tensor

    def read() -> Tensor:
        rows = tensor.read()
        return rows.view(heads[match[1]], -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return replace(tensor, read=read)


def _name_numbered_moments(
    source: ForeignCheckpoint, found: WeightMap, *, order: str | Sequence[str] | None, model: nn.Module
) -> ForeignOptimizer:
    """Gives numbered moments the names of their parameters, and checks numbers and shapes."""
    state = source.optimizer
    numbers = [name for group in state.groups for name in group.names]
    order = order or source.default_order
    if order is None:
        got = f"numbers up to {len(numbers) - 1}, in the order of the groups that its program built"
        fix = "--order parameters (as in model.parameters()), --order decay-first, or a file of names"
        raise SpecError("the source does not name the parameters of its optimizer state.", got=got, fix=fix)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    names_here = {some[0].source: name for name, some in found.parts.items() if len(some) == 1}
    known = [*parameters]
    if source.has_order:
        known = [name for name in source.weights if names_here.get(name) in parameters]
    names = known if isinstance(order, str) else [*order]
    if order == "decay-first":
        decays = {name: _decays(names_here.get(name, name), model) for name in known}
        names = sorted(known, key=lambda name: not decays[name])
        if sum(decays.values()) != (count := len(state.groups[0].names)):
            raise _other_order_error(f"{sum(decays.values())} parameters decay, {count} in the source")
    if len(names) != len(numbers):
        raise _other_order_error(f"{len(names)} parameters, {len(numbers)} in the source")
    keys = names_here  # the names under which moments are looked up: see `match_names`
    if source.has_order:
        keys = {new: old for old, new in names_here.items()} | {old: old for old in names_here}
    named = dict(zip(numbers, (keys.get(name, name) for name in names), strict=True))
    for number, moments in state.moments.items():
        name = names_here.get(named[number], named[number])
        for key, tensor in moments.items():
            if name not in parameters or tensor.shape != tuple(parameters[name].shape):
                raise _other_order_error(f"{key} {number} is {list(tensor.shape)}, which {name} is not")
    return _rename_state(state, named, heads={})


def _decays(name: str, model: nn.Module) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return not isinstance(owner, nn.LayerNorm) and _WITHOUT_DECAY.search(name.lower()) is None


def _other_order_error(got: str) -> CheckpointError:
    fix = f"--order {', '.join(ORDERS)}, or a file with the names in the order of the optimizer"
    return CheckpointError("the optimizer's state is not in this order.", got=got, fix=fix)


def _check_shapes(found: WeightMap, wanted: Mapping[str, Shape]) -> None:
    other = [
        f"{name} is {list(shape)} there and {list(wanted[name])} here"
        for name, shape in found.shapes.items()
        if tuple(shape) != wanted[name]
    ]
    if other or not found.parts:
        what = "the source is of another model."
        why = None if other else f"the model has {join_names([*wanted], most=3)}"
        fix = "the sizes of that model in [model]" if other else "--names, a file of names"
        raise CheckpointError(what, got=join_names(other or found.surplus, most=3), why=why, fix=fix)


def _move_moments(
    source: ForeignCheckpoint, parts: Sequence[BoxCopy], *, name: str, shape: Shape
) -> Mapping[str, LazyTensor]:
    """Returns the state of the model's parameter `name`: its own, or the boxes of its sources' states."""
    states = {part.source: source.optimizer.moments.get(part.source, {}) for part in parts}
    keys = set[str]().union(*states.values())
    if lacking := [one for one, state in states.items() if set(state) != keys]:
        got = f"no {join_names(sorted(keys))} of {join_names(lacking, most=3)}"
        raise CheckpointError(f"the state of {name} is not whole.", got=got)
    counts = {source.optimizer.updates.get(one): one for one in states}
    if len(counts) > 1:
        what = f"the parts of {name} were updated in different numbers of steps."
        got = join_names([f"{n}: {'none' if c is None else f'{c:.0f}'}" for c, n in counts.items()], most=3)
        why = "the averages of Adam depend on the number, and a joined tensor has one"
        fix = "the weights alone, in a file with step 0"
        raise CheckpointError(what, got=got, why=why, fix=fix)
    for one in states.keys() & source.weights.keys():
        for key in sorted(keys):
            if (found := states[one][key].shape) != (size := source.weights[one].shape):
                got = f"{key} is {[*found]}, and the parameter {[*size]}"
                raise CheckpointError(f"the state of {one} is of another parameter.", got=got)
    return {
        key: _copy_boxes(parts, shape, sources={n: state[key] for n, state in states.items()})
        for key in sorted(keys)
    }


def _copy_boxes(parts: Sequence[BoxCopy], shape: Shape, *, sources: Mapping[str, LazyTensor]) -> LazyTensor:
    """Returns the tensor that consists of boxes of `sources`. One whole source is read as it is."""
    first = sources[parts[0].source]
    if first.shape == shape and tuple(parts) == map_unchanged_tensor(parts[0].source, shape):
        return first

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=first.dtype)
        moves = sorted(iterate_copies(whole, parts, offsets=[0] * len(shape)), key=lambda one: one.source)
        for name, own in groupby(moves, key=lambda one: one.source):
            flat = sources[name].read().reshape(-1)
            for move in own:
                move.fill_target(flat[move.begin : move.begin + move.span_length])
        return whole

    return LazyTensor(shape, first.dtype, read)

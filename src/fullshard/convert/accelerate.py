"""Conversion of Accelerate's YAML. Its keys: accelerate/commands/config/{config_args,cluster}.py (1.15)."""

import math
from collections.abc import Mapping

from fullshard.convert.reader import (
    ConversionState,
    UnevaluatedExpression,
    is_open,
    is_true_yes_on,
    last_dotted_part_lower,
    parse_positive_integer,
)
from fullshard.convert.rules import (
    apply_rules,
    convert_offload,
    keys_without_wildcards,
    load_rules,
    require_valid_zero_stage,
)

_FSDP, _MESH = "fsdp_config.", "parallelism_config."
# In the order of their numbers in FSDP1's ShardingStrategy, which begin at 1.
_SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_STRATEGIES = {
    **{str(number): name for number, name in enumerate(_SHARDING_STRATEGIES, start=1)},
    **{name: name for name in _SHARDING_STRATEGIES},
}
_PREFETCHES = {
    **dict.fromkeys(("backward_pre", "backward_post", "1", "2"), "implicit"),
    "no_prefetch": "none",
}


def convert_accelerate(state: ConversionState) -> None:
    """Records a verdict on every key of an Accelerate config."""
    per_node = _convert_rank_count(state)
    require_valid_zero_stage(state, "deepspeed_config.zero_stage")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        state.checked_positive_integer(f"deepspeed_config.{name}")
    kind = str(state.get("distributed_type")).lower()
    _convert_distributed_type(state, kind)
    _convert_parallelism_config(state)
    convert_fsdp_section(state, by_default=kind == "fsdp", ranks_per_node=per_node)
    for part in ("optimizer", "param"):  # Accelerate writes `none` for an absent path
        path = f"deepspeed_config.offload_{part}_nvme_path"
        if state.get(path) in ("none", None):
            state.record_not_needed(path, "off, as it is here")
    rules = load_rules("accelerate")
    apply_rules(state, {key: rules[key] for key in ("deepspeed_config.zero_stage",)})
    optimizer, params = (f"deepspeed_config.offload_{part}_device" for part in ("optimizer", "param"))
    convert_offload(state, optimizer=optimizer, params=params)
    apply_rules(state, rules)
    own_file = "deepspeed_config.deepspeed_config_file" in state.leaves
    if kind == "deepspeed" and "deepspeed_config.zero_stage" not in state.leaves and not own_file:
        state.set_default_of_other_tool("sharding.strategy", "shard_grad_op", why="Accelerate's default")
    state.record_unknown_keys(keys_without_wildcards(rules))


def convert_fsdp_section(
    state: ConversionState, *, by_default: bool, ranks_per_node: int | None = None
) -> None:
    """Converts `fsdp_config` of Accelerate, which transformers' Trainer has too.

    by_default: whether FSDP is used even if no key sets a strategy; the strategy is then full_shard
    """
    # `fsdp_config.fsdp_offload_params` -> `fsdp_config.offload_params`, as in older files.
    longer = [key for key in state.leaves if key.startswith(f"{_FSDP}fsdp_")]
    state.rename_keys({key: _FSDP + key.removeprefix(f"{_FSDP}fsdp_") for key in longer})
    keys = {key.removeprefix(_FSDP): key for key in state.leaves if key.startswith(_FSDP)}
    _convert_sharding_and_prefetch(state, keys, by_default=by_default, ranks_per_node=ranks_per_node)
    rules = load_rules("accelerate").items()
    apply_rules(state, {name: rule for name, rule in rules if name.startswith(_FSDP)})


def _convert_rank_count(state: ConversionState) -> int | None:
    """Sets `run.ranks` if there is a single machine. Returns the ranks per machine, or None if unknown."""
    ranks = state.checked_positive_integer("num_processes")
    machines = state.checked_positive_integer("num_machines") or 1
    if ranks is None:
        return None
    state.ranks = state.ranks or ranks
    if machines == 1:
        state.record_setting("num_processes", "run.ranks", value=ranks)
    else:
        state.record_not_needed("num_processes", "torchrun's: --nnodes, --nproc-per-node")
        state.notes.append(f"{ranks} ranks on {machines} machines: torchrun --nnodes {machines} starts them")
    return ranks // machines if ranks % machines == 0 else None


def _convert_distributed_type(state: ConversionState, kind: str) -> None:
    key = "distributed_type"
    if kind == "no" or kind.startswith("multi_"):
        state.record_setting(key, "sharding.strategy", value="no_shard", why="nothing is sharded")
    elif kind in ("fsdp", "deepspeed"):
        state.record_not_needed(key, f"sharding.strategy says it, from {kind}_config")
    elif is_open(state.get(key)):
        state.record_open(key, "sharding.strategy")
    else:
        why = "ranks are sharded with FSDP2; the planner chooses the strategy"
        state.record_unsupported(key, why, misses="sharding.strategy")
    if kind == "multi_cpu":
        state.infer_setting("run.device", "cpu", origin=key)


def _convert_parallelism_config(state: ConversionState) -> None:
    """Sets the strategy from `parallelism_config`: replicated and sharded axes mean hybrid_shard.

    Parameters are sharded over the ranks of `cp_size` too.
    """
    found = {key.removeprefix(_MESH).removeprefix("parallelism_config_"): key for key in state.leaves}
    replicate, shard = found.get("dp_replicate_size", ""), found.get("dp_shard_size", "")
    context = found.get("cp_size", "")
    if (parse_positive_integer(state.get(replicate)) or 1) == 1:
        return
    degree = math.prod(parse_positive_integer(state.get(key)) or 1 for key in (shard, context))
    if degree == 1:
        state.record_setting(replicate, "sharding.strategy", value="no_shard")
        return
    why = "replicated over ranks / shard_degree"
    state.record_setting(replicate, "sharding.strategy", value="hybrid_shard", why=why)
    state.record_setting(shard, "sharding.shard_degree", value=degree)


def _convert_sharding_and_prefetch(
    state: ConversionState, keys: Mapping[str, str], *, by_default: bool, ranks_per_node: int | None = None
) -> None:
    """Converts the sharding strategy and the prefetch of FSDP1 or FSDP2.

    keys: the config's key for each argument of FSDP that it contains
    """
    _convert_reshard_after_forward(state, keys.get("reshard_after_forward", ""))
    _convert_strategy(state, keys.get("sharding_strategy", ""), ranks_per_node=ranks_per_node)
    if by_default and not {"sharding_strategy", "reshard_after_forward"} & keys.keys():
        state.set_default_of_other_tool("sharding.strategy", "full_shard", why="FSDP's default")
    _convert_prefetch(state, keys.get("backward_prefetch", ""), forward=keys.get("forward_prefetch", ""))


def _convert_strategy(state: ConversionState, key: str, *, ranks_per_node: int | None) -> None:
    """Sets `sharding.strategy`, and for a hybrid one the shard degree: the ranks per node, if known."""
    value = state.get(key)
    strategy = None if value is None else _STRATEGIES.get(last_dotted_part_lower(value))
    if value is None:
        state.record_not_needed(key, "unset: the planner chooses, or full_shard")
    elif strategy is None:
        _record_missed(state, key, target="sharding.strategy", known=", ".join(_SHARDING_STRATEGIES))
    else:
        state.record_setting(key, "sharding.strategy", value=strategy)
        if strategy.startswith("hybrid") and "sharding.shard_degree" not in state.settings:
            if ranks_per_node is None:
                state.notes.append(
                    f"{strategy} shards within a node and replicates over nodes: set sharding.shard_degree "
                    "to the ranks of a node (left out, the planner chooses)"
                )
            else:
                state.infer_setting("sharding.shard_degree", ranks_per_node, origin="the ranks of a node")


def _record_missed(state: ConversionState, key: str, *, target: str, known: str) -> None:
    """Records that the value of `key` is a variable, or none of the `known` values of `target`."""
    if isinstance(state.get(key), UnevaluatedExpression):
        state.record_open(key, target)
    else:
        state.record_unsupported(key, f"{target}: {known}", misses=target)


def _convert_reshard_after_forward(state: ConversionState, key: str) -> None:
    """Converts FSDP2's `reshard_after_forward`: true is full_shard, false shard_grad_op, a number hpZ."""
    value = state.get(key)
    if key not in state.leaves:
        return
    degree = None if isinstance(value, bool) else parse_positive_integer(value)
    if degree is not None and degree > 1:
        why = "and the strategy full_shard (ZeRO++ hpZ)"
        state.record_setting(key, "sharding.reshard_after_forward", value=degree, why=why)
        state.infer_setting("sharding.strategy", "full_shard", origin=key)
        return
    named = _STRATEGIES.get(last_dotted_part_lower(value)) if degree is None else None
    flag = {"true": "full_shard", "none": "full_shard", "false": "shard_grad_op"}.get(str(value).lower())
    strategy = named or flag
    if strategy is None:
        known = "true (full_shard), false (shard_grad_op), or a degree"
        _record_missed(state, key, target="sharding.strategy", known=known)
        return
    if state.settings.get("sharding.strategy") == "hybrid_shard":  # set by a two-axis mesh
        strategy = "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
        state.settings["sharding.strategy"] = strategy
    why = "unset: all units but the root; here the root too" if value is None else ""
    state.record_setting(key, "sharding.strategy", value=strategy, why=why)


def _convert_prefetch(state: ConversionState, backward: str, *, forward: str) -> None:
    """Sets `prefetch.mode` from `backward_prefetch` and `forward_prefetch`."""
    forward_on = is_true_yes_on(state.get(forward))
    if backward in state.leaves:
        name = last_dotted_part_lower(state.get(backward))
        mode = "none" if state.get(backward) is None else _PREFETCHES.get(name)
        if mode is None:
            _record_missed(state, backward, target="prefetch.mode", known="none, implicit, explicit")
        else:
            post = "one unit ahead; here always issued before the gradients of the one that waits"
            why = post if name in ("backward_post", "2") else ""
            state.record_setting(backward, "prefetch.mode", value="explicit" if forward_on else mode, why=why)
    if isinstance(state.get(forward), UnevaluatedExpression):
        state.record_open(forward, "prefetch.mode")
    elif forward_on:
        why = "prefetch.forward units ahead, 1 by default"
        state.record_setting(forward, "prefetch.mode", value="explicit", why=why)
    else:
        state.record_not_needed(forward, "off: FSDP2 itself overlaps one unit")

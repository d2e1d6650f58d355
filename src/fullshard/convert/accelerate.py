"""Conversion of Accelerate's YAML. Its keys: accelerate/commands/config/{config_args,cluster}.py (1.15)."""

import math

from fullshard.convert.fsdp import convert_sharding_and_prefetch
from fullshard.convert.reader import ConversionState, is_open, parse_positive_integer
from fullshard.convert.rules import (
    apply_rules,
    convert_offload,
    keys_without_wildcards,
    load_rules,
    require_valid_zero_stage,
)

_FSDP, _MESH = "fsdp_config.", "parallelism_config."


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

    by_default: see `convert_sharding_and_prefetch`
    """
    # `fsdp_config.fsdp_offload_params` -> `fsdp_config.offload_params`, as in older files.
    longer = [key for key in state.leaves if key.startswith(f"{_FSDP}fsdp_")]
    state.rename_keys({key: _FSDP + key.removeprefix(f"{_FSDP}fsdp_") for key in longer})
    keys = {key.removeprefix(_FSDP): key for key in state.leaves if key.startswith(_FSDP)}
    convert_sharding_and_prefetch(state, keys, by_default=by_default, ranks_per_node=ranks_per_node)
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

    Parameters are sharded over the ranks of `cp_size` too. `sp_size` is of DeepSpeed's Ulysses.
    """
    found = {key.removeprefix(_MESH).removeprefix("parallelism_config_"): key for key in state.leaves}
    replicate, shard = found.get("dp_replicate_size", ""), found.get("dp_shard_size", "")
    heads, context = found.get("sp_size", ""), found.get("cp_size", "")
    if (parse_positive_integer(state.get(heads)) or 1) > 1:
        state.infer_setting("sharding.context_method", "ulysses", origin=heads)
    if (parse_positive_integer(state.get(replicate)) or 1) == 1:
        return
    degree = math.prod(parse_positive_integer(state.get(key)) or 1 for key in (shard, context))
    if degree == 1:
        state.record_setting(replicate, "sharding.strategy", value="no_shard")
        return
    why = "replicated over ranks / shard_degree"
    state.record_setting(replicate, "sharding.strategy", value="hybrid_shard", why=why)
    state.record_setting(shard, "sharding.shard_degree", value=degree)

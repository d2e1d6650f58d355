"""Conversion of Accelerate's YAML. Its keys: accelerate/commands/config/{config_args,cluster}.py (1.15)."""

from fullshard.convert.fsdp import convert_sharding_and_prefetch
from fullshard.convert.reader import ConversionState, parse_positive_integer
from fullshard.convert.rules import apply_rules, keys_without_wildcards, load_rules, require_valid_zero_stage

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
    # `fsdp_config.fsdp_offload_params` -> `offload_params`; older files have no second `fsdp_`.
    fsdp_keys = [key for key in state.leaves if key.startswith(_FSDP)]
    names = {key: key.removeprefix(_FSDP).removeprefix("fsdp_") for key in fsdp_keys}
    keys = {name: key for key, name in names.items()}
    convert_sharding_and_prefetch(state, keys, by_default=kind == "fsdp", ranks_per_node=per_node)
    for part in ("optimizer", "param"):  # Accelerate writes `none` for an absent path
        path = f"deepspeed_config.offload_{part}_nvme_path"
        if state.get(path) in ("none", None):
            state.record_not_needed(path, "off, as it is here")
    rules = load_rules("accelerate")
    apply_rules(state, rules, named=lambda key: f"fsdp.{names[key]}" if key in names else key)
    if kind == "deepspeed" and "optimizer.clip_norm" not in state.settings:
        state.set_default_of_other_tool("optimizer.clip_norm", 0.0, why="DeepSpeed clips only if asked")
    known = keys_without_wildcards([*rules, "fsdp.sharding_strategy", "fsdp.reshard_after_forward"])
    state.record_unknown_keys([key.replace("fsdp.", f"{_FSDP}fsdp_") for key in known])


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
        state.notes.append(f"{ranks} ranks on {machines} machines: torchrun --nnodes {machines} starts them")
    return ranks // machines if ranks % machines == 0 else None


def _convert_distributed_type(state: ConversionState, kind: str) -> None:
    key = "distributed_type"
    if kind in ("multi_gpu", "multi_cpu", "no"):
        state.record_setting(key, "sharding.strategy", value="no_shard", why="nothing is sharded")
    elif kind in ("fsdp", "deepspeed"):
        state.record_not_needed(key, f"sharding.strategy says it, from {kind}_config")
    else:
        state.record_unsupported(key, "ranks are sharded with FSDP2; the planner chooses the strategy")
    if kind == "multi_cpu":
        state.infer_setting("run.device", "cpu", origin=key)


def _convert_parallelism_config(state: ConversionState) -> None:
    """Sets the strategy from `parallelism_config`: replicated and sharded axes mean hybrid_shard."""
    found = {key.removeprefix(_MESH).removeprefix("parallelism_config_"): key for key in state.leaves}
    replicate, shard = found.get("dp_replicate_size", ""), found.get("dp_shard_size", "")
    if (parse_positive_integer(state.get(replicate)) or 1) == 1:
        return
    degree = parse_positive_integer(state.get(shard)) or 1
    if degree == 1:
        state.record_setting(replicate, "sharding.strategy", value="no_shard")
        return
    why = "replicated over ranks / shard_degree"
    state.record_setting(replicate, "sharding.strategy", value="hybrid_shard", why=why)
    state.record_setting(shard, "sharding.shard_degree", value=degree)

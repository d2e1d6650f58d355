"""Conversion of Accelerate's YAML. Its keys: accelerate/commands/config/{config_args,cluster}.py (1.15)."""

from fullshard.convert.fsdp import read_sharding
from fullshard.convert.reader import ConfigReader, positive
from fullshard.convert.rules import follow, load_rules, plain_keys, require_stage

_FSDP, _MESH = "fsdp_config.", "parallelism_config."


def read_accelerate(reading: ConfigReader) -> None:
    """Records a verdict on every key of an Accelerate config."""
    per_node = _read_ranks(reading)
    require_stage(reading, "deepspeed_config.zero_stage")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        reading.count(f"deepspeed_config.{name}")
    kind = str(reading.get("distributed_type")).lower()
    _read_type(reading, kind)
    _read_mesh(reading)
    # `fsdp_config.fsdp_offload_params` -> `offload_params`; older files have no second `fsdp_`.
    fsdp_keys = [key for key in reading.leaves if key.startswith(_FSDP)]
    names = {key: key.removeprefix(_FSDP).removeprefix("fsdp_") for key in fsdp_keys}
    keys = {name: key for key, name in names.items()}
    read_sharding(reading, keys, by_default=kind == "fsdp", ranks_per_node=per_node)
    for part in ("optimizer", "param"):  # Accelerate writes `none` for an absent path
        path = f"deepspeed_config.offload_{part}_nvme_path"
        if reading.get(path) in ("none", None):
            reading.not_needed(path, "off, as it is here")
    rules = load_rules("accelerate")
    follow(reading, rules, named=lambda key: f"fsdp.{names[key]}" if key in names else key)
    if kind == "deepspeed" and "optimizer.clip_norm" not in reading.settings:
        reading.set_default("optimizer.clip_norm", 0.0, why="DeepSpeed clips only if asked")
    known = [*rules, "fsdp.sharding_strategy", "fsdp.reshard_after_forward"]
    reading.close([key.replace("fsdp.", f"{_FSDP}fsdp_") for key in plain_keys(known)])


def _read_ranks(reading: ConfigReader) -> int | None:
    """Sets `run.ranks` if there is a single machine. Returns the ranks per machine, or None if unknown."""
    ranks, machines = reading.count("num_processes"), reading.count("num_machines") or 1
    if ranks is None:
        return None
    reading.ranks = reading.ranks or ranks
    if machines == 1:
        reading.set("num_processes", "run.ranks", value=ranks)
    else:
        reading.notes.append(
            f"{ranks} ranks on {machines} machines: torchrun --nnodes {machines} starts them"
        )
    return ranks // machines if ranks % machines == 0 else None


def _read_type(reading: ConfigReader, kind: str) -> None:
    key = "distributed_type"
    if kind in ("multi_gpu", "multi_cpu", "no"):
        reading.set(key, "sharding.strategy", value="no_shard", why="nothing is sharded")
    elif kind in ("fsdp", "deepspeed"):
        reading.not_needed(key, f"sharding.strategy says it, from {kind}_config")
    else:
        reading.unsupported(key, "ranks are sharded with FSDP2; the planner chooses the strategy")
    if kind == "multi_cpu":
        reading.infer("run.device", "cpu", origin=key)


def _read_mesh(reading: ConfigReader) -> None:
    """Sets the strategy from `parallelism_config`: replicated and sharded axes mean hybrid_shard."""
    found = {key.removeprefix(_MESH).removeprefix("parallelism_config_"): key for key in reading.leaves}
    replicate, shard = found.get("dp_replicate_size", ""), found.get("dp_shard_size", "")
    if (positive(reading.get(replicate)) or 1) == 1:
        return
    degree = positive(reading.get(shard)) or 1
    if degree == 1:
        reading.set(replicate, "sharding.strategy", value="no_shard")
        return
    why = "replicated over ranks / shard_degree"
    reading.set(replicate, "sharding.strategy", value="hybrid_shard", why=why)
    reading.set(shard, "sharding.shard_degree", value=degree)

"""Accelerate's YAML. Keys: accelerate/commands/config/{config_args,cluster}.py (1.15)."""

from fullshard.convert.account import ConfigReader, KeyVerdict
from fullshard.convert.deepspeed import require_stage, strategy_of
from fullshard.convert.rules import (
    Maps,
    NotNeeded,
    Rule,
    Sets,
    Unsupported,
    each,
    follow,
    is_on,
    number,
    plain_keys,
    positive,
    required_count,
)
from fullshard.convert.words import (
    BLOCKS,
    IGNORED,
    OFFLOAD,
    OFFLOAD_PARAMS,
    ORIGINAL_PARAMETERS,
    RATE_LIMIT,
    SYNC_STATES,
    TENSOR_PARALLEL,
    read_prefetch,
    read_reshard,
    read_strategy,
    suppose_full_shard,
)

_TORCHRUN = NotNeeded("torchrun's: --nnodes, --node-rank, --rdzv-endpoint")
_TPU = Unsupported("GPUs and CPUs only")
_FP8 = Unsupported("precision.mode: fp32, bf16, bf16_reduce, fp16 or bf16_pure", ())
_COMPILED = NotNeeded("run.compile compiles block by block, for shapes that stay the same")
_DYNAMO = ("mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")
_TYPES = {"fsdp", "deepspeed", "multi_gpu", "multi_cpu", "no"}

_RULES: dict[str, Rule] = {
    "compute_environment": Unsupported(
        "ranks are started by fullshard train or torchrun", ("LOCAL_MACHINE",)
    ),
    "debug": NotNeeded("ranks compare a fingerprint of each step: survival.fingerprint"),
    "downcast_bf16": Unsupported("GPUs and CPUs only", ("no", False, None)),
    "enable_cpu_affinity": Unsupported("numactl, or torchrun --numa-binding"),
    "gpu_ids": Unsupported("CUDA_VISIBLE_DEVICES chooses GPUs", ("all", None)),
    "machine_rank": _TORCHRUN,
    "main_process_ip": _TORCHRUN,
    "main_process_port": _TORCHRUN,
    "rdzv_backend": _TORCHRUN,
    "same_network": _TORCHRUN,
    "num_machines": _TORCHRUN,
    "num_processes": _TORCHRUN,
    **each("mpirun_config", "mpirun_ccl mpirun_hostfile", rule=_TORCHRUN),
    "main_training_function": NotNeeded("fullshard train is the program; or docs/loops-pytorch.md"),
    "mixed_precision": Maps(
        "precision.mode",
        {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"},
        why="gradients are summed in fp32; Accelerate's FSDP sums in the dtype it computes in: bf16_reduce",
        instead="precision.mode: fp32, bf16, bf16_reduce, fp16 or bf16_pure",
    ),
    "use_cpu": Sets("run.device", lambda on: "cpu" if is_on(on) else "auto"),
    "tpu_*": _TPU,
    "tpu_env": Unsupported("GPUs and CPUs only", ([], None)),
    "command*": NotNeeded("for TPU pods"),
    "dynamo_config": NotNeeded("empty"),
    "dynamo_config.*dynamo_backend": Maps(
        "run.compile", {"inductor": True, "no": False}, instead="torch.compile's own backend: run.compile"
    ),
    **each("dynamo_config", " ".join(f"dynamo_{name}" for name in _DYNAMO), rule=_COMPILED),
    **each("dynamo_config", " ".join(_DYNAMO), rule=_COMPILED),
    "dynamo_backend": Maps("run.compile", {"inductor": True, "no": False}, instead="run.compile = true"),
    "fp8_config.*": _FP8,
    "fp8_config": NotNeeded("empty"),
    "megatron_lm_config.*": Unsupported(TENSOR_PARALLEL, ()),
    "megatron_lm_config": NotNeeded("empty"),
    "parallelism_config": NotNeeded("empty"),
    "parallelism_config.*tp_size": Unsupported(TENSOR_PARALLEL, (1, None)),
    "parallelism_config.*cp_size": Unsupported("sequences are not split over ranks", (1, None)),
    "parallelism_config.*sp_size": Unsupported("sequences are not split over ranks", (1, None)),
    "parallelism_config.*cp_comm_strategy": NotNeeded("sequences are not split over ranks"),
    "parallelism_config.*dp_shard_size": NotNeeded("all ranks, with full_shard"),
    "parallelism_config.*dp_replicate_size": NotNeeded("1: nothing is replicated"),
    "fsdp_config": NotNeeded("empty"),
    "deepspeed_config": NotNeeded("empty"),
}

FSDP: dict[str, Rule] = {
    "version": NotNeeded("the engine is FSDP2"),
    "auto_wrap_policy": Maps(
        "sharding.units.policy",
        {"transformer_based_wrap": "block", "size_based_wrap": "size"},
        instead="one unit for all would be gathered at once, and save nothing; blocks are units",
    ),
    "transformer_layer_cls_to_wrap": NotNeeded(BLOCKS),
    "transformer_cls_names_to_wrap": NotNeeded(BLOCKS),
    "min_num_params": Sets("sharding.units.min_parameters", lambda value: positive(number(value))),
    "state_dict_type": Maps(
        "checkpoint.export",
        {
            "full_state_dict": True,
            "sharded_state_dict": False,
            "local_state_dict": False,
            "1": True,
            "2": False,
            "3": False,
        },
        why="checkpoints are sharded always; export adds whole tensors at the end",
    ),
    "offload_params": Unsupported(OFFLOAD_PARAMS),
    "cpu_offload": Unsupported(OFFLOAD_PARAMS),
    "cpu_ram_efficient_loading": NotNeeded(SYNC_STATES),
    "sync_module_states": NotNeeded(SYNC_STATES),
    "use_orig_params": NotNeeded(ORIGINAL_PARAMETERS),
    "limit_all_gathers": NotNeeded(RATE_LIMIT),
    "activation_checkpointing": Sets("recompute.mode", lambda on: "full" if is_on(on) else "none"),
    "activation_checkpointing_offload": Unsupported(
        'what recompute keeps stays; recompute.mode = "offload" moves all that is saved'
    ),
    "ignored_modules": Unsupported(IGNORED),
    "ignored_params": Unsupported(IGNORED),
    "param_init_fn": Unsupported("fs.shard(model, plan, init=function)"),
    "mixed_precision_policy*": NotNeeded("precision.mode, output_dtype and cast_inputs"),
}

_DEEPSPEED: dict[str, Rule] = {
    "zero_stage": Sets(
        "sharding.strategy",
        strategy_of,
        instead="a stage is 0, 1, 2 or 3",
    ),
    "gradient_clipping": Sets("optimizer.clip_norm", number),
    "gradient_accumulation_steps": NotNeeded(
        "accumulation is train.global_batch / (train.microbatch × ranks): set these, as the program has them"
    ),
    "train_micro_batch_size_per_gpu": Sets("train.microbatch", positive),
    "train_batch_size": Sets("train.global_batch", positive),
    "zero3_init_flag": NotNeeded(SYNC_STATES),
    "zero3_save_16bit_model": Sets("checkpoint.export", is_on),
    "offload_optimizer_device": Unsupported(OFFLOAD.format(tier="optimizer:cpu")),
    "offload_param_device": Unsupported(OFFLOAD_PARAMS),
    "offload_optimizer_nvme_path": Sets("offload.path", lambda path: None if path == "none" else path),
    "offload_param_nvme_path": Sets("offload.path", lambda path: None if path == "none" else path),
    "deepspeed_config_file": Unsupported(
        "fullshard convert reads that file too: its settings stand there", ()
    ),
    "deepspeed_hostfile": _TORCHRUN,
    "deepspeed_multinode_launcher": _TORCHRUN,
    "deepspeed_exclusion_filter": _TORCHRUN,
    "deepspeed_inclusion_filter": _TORCHRUN,
    "deepspeed_moe_layer_cls_names": NotNeeded(
        "experts are units of their own: sharding.units.separate_experts"
    ),
}


def read_accelerate(reading: ConfigReader) -> None:
    """Gives a verdict on every key of an Accelerate config."""
    per_node = _read_ranks(reading)
    require_stage(reading, "deepspeed_config.zero_stage")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        required_count(reading, f"deepspeed_config.{name}")
    kind = str(reading.get("distributed_type")).lower()
    _read_type(reading, kind)
    _read_mesh(reading)
    names = {key: _fsdp_name(key) for key in reading.leaves if key.startswith("fsdp_config.")}
    keys = {name: key for key, name in names.items()}
    if "reshard_after_forward" in keys:
        read_reshard(reading, keys["reshard_after_forward"])
    if "sharding_strategy" in keys:
        read_strategy(reading, keys["sharding_strategy"], ranks_per_node=per_node)
    if kind == "fsdp":
        suppose_full_shard(reading, keys)
    read_prefetch(
        reading, backward=keys.get("backward_prefetch", ""), forward=keys.get("forward_prefetch", "")
    )
    rules = {**_RULES, **{f"deepspeed_config.{key}": rule for key, rule in _DEEPSPEED.items()}}
    _read_paths(reading)
    follow(reading, rules)
    follow(reading, FSDP, named=lambda key: names.get(key, ""))
    if kind == "deepspeed" and "optimizer.clip_norm" not in reading.settings:
        reading.set_default("optimizer.clip_norm", 0.0, why="DeepSpeed clips only if asked")
    known = [*plain_keys(rules), *(f"fsdp_config.fsdp_{key}" for key in plain_keys(FSDP))]
    reading.close([*known, "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"])


def _fsdp_name(key: str) -> str:
    """`fsdp_config.fsdp_offload_params` -> `offload_params`; older files have no second `fsdp_`."""
    return key.removeprefix("fsdp_config.").removeprefix("fsdp_")


def _read_ranks(reading: ConfigReader) -> int | None:
    """Reads `run.ranks` for a single machine. Returns the ranks per machine, if known."""
    ranks, machines = required_count(reading, "num_processes"), required_count(reading, "num_machines") or 1
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
    elif kind in _TYPES:
        reading.say(key, KeyVerdict.NOT_NEEDED, why=f"sharding.strategy says it, from {kind}_config")
    else:
        reading.say(
            key,
            KeyVerdict.NOT_SUPPORTED,
            why="ranks are sharded with FSDP2; the planner chooses the strategy",
        )
    if kind == "multi_cpu":
        reading.settings["run.device"] = "cpu"
        reading.origins["run.device"] = key


def _read_mesh(reading: ConfigReader) -> None:
    """Reads `parallelism_config`: a replicated axis over a sharded one is a hybrid strategy."""
    prefix = "parallelism_config."
    found = {key.removeprefix(prefix).removeprefix("parallelism_config_"): key for key in reading.leaves}
    replicate, shard = found.get("dp_replicate_size", ""), found.get("dp_shard_size", "")
    if (positive(reading.get(replicate)) or 1) > 1:
        degree = positive(reading.get(shard)) or 1
        if degree == 1:
            reading.set(replicate, "sharding.strategy", value="no_shard")
            return
        reading.set(
            replicate, "sharding.strategy", value="hybrid_shard", why="replicated over ranks / shard_degree"
        )
        reading.set(shard, "sharding.shard_degree", value=degree)


def _read_paths(reading: ConfigReader) -> None:
    """Ignores `none`, which Accelerate writes for an absent path."""
    for part in ("optimizer", "param"):
        key = f"deepspeed_config.offload_{part}_nvme_path"
        if reading.get(key) in ("none", None):
            reading.say(key, KeyVerdict.NOT_NEEDED, why="off, as it is here")

"""Arguments of FSDP1, FSDP2, wrappers around them, and Lightning. Sources: torch.distributed.fsdp (2.13),
lightning_fabric.strategies.fsdp (2.6).
"""

from fullshard.convert.account import ConfigReader, KeyVerdict, SourceText
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
    DTYPES,
    IGNORED,
    OFFLOAD_PARAMS,
    ORIGINAL_PARAMETERS,
    RATE_LIMIT,
    SYNC_STATES,
    TENSOR_PARALLEL,
    read_dtypes,
    read_prefetch,
    read_reshard,
    read_strategy,
    suppose_full_shard,
)

_MINE = NotNeeded("the loop's own, as before: docs/loops-pytorch.md")
_LOGGING = NotNeeded("log.trackers; progress goes to standard error")
_DTYPE = "precision.output_dtype and buffer_dtype: fp32, bf16 or fp16"
_MESH = NotNeeded("made from sharding.strategy and shard_degree")
_WALK = NotNeeded("for the walk over modules, which is done here")
_POLICIES = {
    "transformer_auto_wrap_policy": "block",
    "transformer": "block",
    "lambda_auto_wrap_policy": "block",
    "size_based_auto_wrap_policy": "size",
    "size_based": "size",
    "always_wrap_policy": "block",
}

RULES: dict[str, Rule] = {
    "module": NotNeeded("fs.shard(model, plan)"),
    "process_group": NotNeeded("fs.process_group(), and sharding.strategy for the axes"),
    "param_init_fn": NotNeeded(
        "modules on the meta device initialise themselves; or fs.shard(…, init=function)"
    ),
    "device_id": NotNeeded(
        "each rank has the device of its local rank; the model may stay on the meta device"
    ),
    "sync_module_states": NotNeeded(SYNC_STATES),
    "limit_all_gathers": NotNeeded(RATE_LIMIT),
    "use_orig_params": NotNeeded(ORIGINAL_PARAMETERS),
    "ignored_modules": Unsupported(IGNORED, (None,)),
    "ignored_states": Unsupported(IGNORED, (None,)),
    "ignored_params": Unsupported(IGNORED, (None,)),
    "cpu_offload": Unsupported(OFFLOAD_PARAMS),
    "cpu_offload.offload_params": Unsupported(OFFLOAD_PARAMS),
    "cpu_offload_params": Unsupported(OFFLOAD_PARAMS),
    "cpu_offload_grads": Unsupported(OFFLOAD_PARAMS),
    "offload_policy": Unsupported(OFFLOAD_PARAMS, (None, SourceText("OffloadPolicy()"))),
    "offload_policy.pin_memory": Unsupported(OFFLOAD_PARAMS, ()),
    "auto_wrap_policy": Maps("sharding.units.policy", _POLICIES, instead=BLOCKS),
    "auto_wrap_policy.function": Maps("sharding.units.policy", _POLICIES, instead=BLOCKS),
    "auto_wrap_policy.transformer_layer_cls": NotNeeded(BLOCKS),
    "auto_wrap_policy.module_classes": NotNeeded(BLOCKS),
    "auto_wrap_policy.lambda_fn": Unsupported(f"fs.shard(…, units=function); {BLOCKS}", ()),
    "auto_wrap_policy.min_num_params": Sets(
        "sharding.units.min_parameters", lambda value: positive(number(value))
    ),
    "auto_wrap_policy.exclude_wrap_modules": Unsupported(BLOCKS, (None,)),
    "auto_wrap_policy.force_leaf_modules": Unsupported(BLOCKS, (None,)),
    **each("auto_wrap_policy", "recurse nonwrapped_numel module", rule=_WALK),
    "auto_wrap_min_params": Sets("sharding.units.min_parameters", lambda value: positive(number(value))),
    "activation_checkpointing": Sets("recompute.mode", lambda on: "none" if on is False else "full"),
    "activation_checkpointing_policy": Sets("recompute.mode", lambda _: "full", why="of the repeated blocks"),
    "activation_checkpointing_policy.*": NotNeeded('recompute.mode = "full": of the repeated blocks'),
    "mixed_precision": Maps(
        "precision.mode",
        {"false": "fp32", "none": "fp32"},
        instead="set precision.mode: bf16, bf16_reduce or fp16",
    ),
    "mixed_precision.buffer_dtype": Maps("precision.buffer_dtype", DTYPES, instead=_DTYPE, without=(None,)),
    "mixed_precision.keep_low_precision_grads": NotNeeded("gradients have the dtype of the shards, fp32"),
    "mixed_precision.cast_forward_inputs": Sets("precision.cast_inputs", is_on),
    "mixed_precision.cast_root_forward_inputs": Sets("precision.cast_inputs", is_on),
    "mixed_precision._module_classes_to_ignore": Unsupported(
        "sharding.units.overrides: precision of a unit", (None,)
    ),
    "mp_policy.output_dtype": Maps("precision.output_dtype", DTYPES, instead=_DTYPE, without=(None,)),
    "mp_policy.cast_forward_inputs": Sets("precision.cast_inputs", is_on),
    "mp_policy": Unsupported("set precision.mode: bf16, bf16_reduce or fp16", (None,)),
    "param_dtype": NotNeeded("shards are fp32 in every mode but bf16_pure"),
    "reduce_dtype": NotNeeded("said with compute_dtype, by precision.mode"),
    "compute_dtype": NotNeeded("precision.mode"),
    "mesh": _MESH,
    "device_mesh": _MESH,
    **each("mesh", "device_type mesh_shape mesh mesh_dim_names", rule=_MESH),
    **each("device_mesh", "device_type mesh_shape mesh mesh_dim_names", rule=_MESH),
    "shard_placement_fn": Unsupported("every parameter is split along its first dim", (None,)),
    "dp_mesh_dims": _MESH,
    "state_dict_type": Maps(
        "checkpoint.export",
        {"full": True, "sharded": False, "full_state_dict": True, "sharded_state_dict": False},
        why="checkpoints are sharded always; export adds whole tensors at the end",
    ),
}

_HOST: dict[str, Rule] = {
    "accelerator": Maps(
        "run.device",
        {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "auto": "auto"},
        instead="run.device: cpu, cuda",
    ),
    "devices": NotNeeded("every GPU of the machine"),
    "num_nodes": NotNeeded("torchrun --nnodes"),
    "precision": Maps(
        "precision.mode",
        {
            "32": "fp32",
            "32-true": "fp32",
            "bf16": "bf16",
            "bf16-mixed": "bf16",
            "16": "fp16",
            "16-mixed": "fp16",
            "bf16-true": "bf16_pure",
        },
        instead="precision.mode: fp32, bf16, bf16_reduce, fp16 or bf16_pure",
    ),
    "max_steps": Sets("train.steps", positive),
    "accumulate_grad_batches": NotNeeded("train.global_batch / (train.microbatch × ranks)"),
    "gradient_clip_val": Sets("optimizer.clip_norm", number),
    "gradient_clip_algorithm": Unsupported("the global norm is clipped", ("norm", None)),
    "log_every_n_steps": Sets("log.every", positive),
    "val_check_interval": Sets("train.validate_every", positive),
    "default_root_dir": Sets("run.dir", lambda path: path if isinstance(path, str) else None),
    "deterministic": Unsupported(
        "the same ranks give the same bits on the CPU; kernels of CUDA are as torch has them"
    ),
    "loggers": _LOGGING,
    "logger": _LOGGING,
    "enable_checkpointing": NotNeeded("checkpoint.every"),
    "enable_progress_bar": _LOGGING,
    "enable_model_summary": _LOGGING,
    "callbacks": NotNeeded("the loop's body is yours: docs/loops-fabric.md"),
    "plugins": Unsupported("ranks are started by fullshard train or torchrun", (None,)),
    "max_epochs": Unsupported(
        "train.steps counts steps; with max_epochs = e: e × sequences / train.global_batch", (None,)
    ),
    "strategy": Unsupported('sharding.strategy: "no_shard" is ddp, "full_shard" fsdp', ("auto",)),
    "strategy.parallelize_fn": NotNeeded("fs.shard(model, plan)"),
    "strategy.data_parallel_size": NotNeeded("all ranks"),
    "strategy.tensor_parallel_size": Unsupported(TENSOR_PARALLEL, (1,)),
    "strategy.save_distributed_checkpoint": NotNeeded("checkpoints are sharded, and any ranks load them"),
    "strategy.process_group_backend": NotNeeded("nccl for GPUs, gloo for the host"),
    "strategy.accelerator": NotNeeded("run.device"),
    "strategy.parallel_devices": NotNeeded("each rank has the device of its local rank"),
    "strategy.cluster_environment": NotNeeded("torchrun's and srun's are read"),
    "strategy.precision": NotNeeded("precision.mode"),
    "strategy.timeout.seconds": Sets("survival.collective_seconds", number),
    "strategy.timeout*": Unsupported("survival.collective_seconds", (None,)),
    "strategy.mixed_precision.*": NotNeeded("precision.mode"),
}


def read_fsdp(reading: ConfigReader, *, prefix: str = "") -> None:
    """Gives a verdict on the arguments of FSDP, fully_shard or FSDP2Config: keys that start with `prefix`."""
    names = {key: key.removeprefix(prefix) for key in reading.leaves if key.startswith(prefix)}
    keys = {name: key for key, name in names.items()}
    _read_mesh(reading, keys)
    if "reshard_after_forward" in keys:
        read_reshard(reading, keys["reshard_after_forward"])
    if "sharding_strategy" in keys:
        read_strategy(reading, keys["sharding_strategy"], ranks_per_node=None)
    if keys and "parallelize_fn" not in keys:
        suppose_full_shard(reading, keys)
    read_prefetch(
        reading, backward=keys.get("backward_prefetch", ""), forward=keys.get("forward_prefetch", "")
    )
    for part in ("mixed_precision", "mp_policy"):
        param, reduce = keys.get(f"{part}.param_dtype", ""), keys.get(f"{part}.reduce_dtype", "")
        if param or reduce:
            read_dtypes(reading, param=param, reduce=reduce)
    if "compute_dtype" in keys:
        _read_compute_dtype(reading, keys)
    follow(reading, RULES, named=lambda key: names.get(key, ""))


def read_fsdp_alone(reading: ConfigReader) -> None:
    """Gives a verdict on every argument of FSDP, fully_shard or FSDP2Config."""
    read_fsdp(reading)
    reading.close([*plain_keys(RULES), "sharding_strategy", "backward_prefetch", "forward_prefetch"])


def read_lightning(reading: ConfigReader) -> None:
    """Gives a verdict on the arguments of Fabric or a Trainer and its strategy, or of a strategy alone."""
    prefix = "strategy."
    nodes = required_count(reading, "num_nodes") or 1
    required_count(reading, "max_steps", unset=(-1,))
    devices = reading.get("devices")
    each = len(devices) if isinstance(devices, list) else positive(devices)
    if each:
        reading.ranks = reading.ranks or each * nodes
        if nodes == 1:
            reading.set("devices", "run.ranks", value=each)
        else:
            reading.notes.append(
                f"{each} ranks on each of {nodes} nodes: torchrun --nnodes {nodes} starts them"
            )
    named = str(reading.get("strategy")).lower()
    if named in ("fsdp", "ddp"):
        reading.set("strategy", "sharding.strategy", value="full_shard" if named == "fsdp" else "no_shard")
    read_fsdp(reading, prefix=prefix)
    follow(reading, _HOST)
    if "gradient_clip_val" not in reading.leaves:
        reading.set_default("optimizer.clip_norm", 0.0, why="Lightning clips only if asked")
    reading.close([*plain_keys(_HOST), *(f"{prefix}{key}" for key in plain_keys(RULES))])


def _read_mesh(reading: ConfigReader, keys: dict[str, str]) -> None:
    """Reads a two-axis mesh, (replicas, shards), as a hybrid strategy of that degree."""
    for name in ("mesh.mesh_shape", "device_mesh.mesh_shape", "device_mesh", "mesh"):
        key = keys.get(name, "")
        shape = reading.get(key)
        if not isinstance(shape, list) or not all(isinstance(one, int) for one in shape):
            continue
        if len(shape) == 2 and shape[1] > 1 and shape[0] > 1:
            reading.settings.setdefault("sharding.strategy", "hybrid_shard")
            reading.origins.setdefault("sharding.strategy", key)
            reading.set(key, "sharding.shard_degree", value=shape[1], why="ranks / shard_degree replicas")
            reading.ranks = reading.ranks or shape[0] * shape[1]
        elif len(shape) == 2 and shape[0] > 1:
            reading.set(key, "sharding.strategy", value="no_shard", why="nothing is sharded")
    plain = keys.get("sharding_strategy", "")
    # The named strategy may be the ZeRO-2 variant of the mesh's.
    if reading.settings.get("sharding.strategy") == "hybrid_shard" and plain:
        reading.settings.pop("sharding.strategy")


def _read_compute_dtype(reading: ConfigReader, keys: dict[str, str]) -> None:
    on = reading.get(keys["mixed_precision"]) if "mixed_precision" in keys else True
    if is_on(on):
        read_dtypes(reading, param=keys["compute_dtype"], reduce=keys.get("reduce_dtype", ""))
        if "mixed_precision" in keys:
            reading.say(keys["mixed_precision"], KeyVerdict.NOT_NEEDED, why="on: precision.mode says which")

"""Conversion of torchtitan's TOML. Source: torchtitan/config/job_config.py; older names are known too."""

from typing import Any

from fullshard.convert.reader import ConfigReader, is_on, number, positive
from fullshard.convert.rules import follow, load_rules, plain_keys, read_trackers
from fullshard.spec.presets import find_preset

# torchtitan's defaults for keys that are left out, if the section or the file needs them.
_DEFAULTS = {
    "optimizer.learning_rate": 8e-4,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.weight_decay": 0.1,
    "schedule.warmup_steps": 200,
    "schedule.kind": "linear",
    "schedule.min_lr_ratio": 0.0,
    "data.sequence_length": 2048,
    "train.steps": 10_000,
    "train.microbatch": 8,
}
_PRESETS = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
    ("qwen3", "1.7b"): "qwen3-1.7b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "14b"): "qwen3-14b",
}


def read_torchtitan(reading: ConfigReader) -> None:
    """Records a verdict on every key of a torchtitan config."""
    for key in ("training.seq_len", "training.steps"):
        reading.count(key)
    _read_mesh(reading)
    _read_batch(reading)
    _read_model(reading)
    _read_recompute(reading)
    _read_optimizer(reading)
    _read_schedule(reading)
    _read_precision(reading)
    _read_switched(reading)
    read_trackers(reading, "metrics.enable_{}")
    rules = load_rules("torchtitan")
    follow(reading, rules)
    for target, value in _DEFAULTS.items():
        reading.set_default(target, value, why="torchtitan's default, which the file leaves as it is")
    _fit_positions(reading)
    reading.close(plain_keys(rules))


def _read_mesh(reading: ConfigReader) -> None:
    """Sets strategy and shard degree from the data-parallel degrees and `fsdp_reshard_after_forward`."""
    replicate_key = "parallelism.data_parallel_replicate_degree"
    shard_key = "parallelism.data_parallel_shard_degree"
    policy_key = "parallelism.fsdp_reshard_after_forward"
    # A degree of -1, or none, means all remaining ranks.
    replicate = reading.count(replicate_key, unset=(-1,)) or 1
    shard = reading.count(shard_key, unset=(-1,)) or -1
    never = reading.get(policy_key) == "never"
    if replicate > 1 and shard == 1:
        reading.set(replicate_key, "sharding.strategy", value="no_shard", why="replicated over all ranks")
        reading.not_needed(shard_key, "1: nothing is sharded")
    elif replicate > 1:
        degree = shard if shard > 1 else (reading.ranks // replicate if reading.ranks else None)
        strategy = "hybrid_shard_zero2" if never else "hybrid_shard"
        reading.set(replicate_key, "sharding.strategy", value=strategy, why="ranks / shard_degree replicas")
        if degree is None:
            reading.not_needed(shard_key, f"set sharding.shard_degree: ranks / {replicate}")
            reading.notes.append(f"set sharding.shard_degree = ranks / {replicate}, or give --ranks")
        else:
            reading.infer("sharding.shard_degree", degree, origin=shard_key)
            reading.set(shard_key, "sharding.shard_degree", value=degree)
    else:
        origin = policy_key if policy_key in reading.leaves else "FSDP2"
        reading.infer("sharding.strategy", "shard_grad_op" if never else "full_shard", origin=origin)
        reading.not_needed(replicate_key, "1: nothing is replicated")
        reading.not_needed(shard_key, "all ranks, with full_shard and shard_grad_op")
    why = "never: parameters stay gathered until backward"
    reading.set(policy_key, "sharding.strategy", value=reading.settings["sharding.strategy"], why=why)


def _read_batch(reading: ConfigReader) -> None:
    older, total_key = "training.batch_size" in reading.leaves, "training.global_batch_size"
    local_key = "training.batch_size" if older else "training.local_batch_size"
    local, total = reading.count(local_key), reading.count(total_key, unset=(-1,))
    if local:
        reading.set(local_key, "train.microbatch", value=local, why="sequences a rank at once")
    if total:
        reading.set(total_key, "train.global_batch", value=total)
    else:
        reading.infer_global_batch(local or 8, origin=local_key if local else "torchtitan's default")
        reading.not_needed(total_key, "left out: local batch × ranks")


def _read_model(reading: ConfigReader) -> None:
    """Sets the sizes of the model if its name and flavor have a preset."""
    name, flavor = (str(reading.get(f"model.{key}")).lower() for key in ("name", "flavor"))
    preset = find_preset(_PRESETS.get((name, flavor), ""))
    missing = (
        '[model] takes the sizes of a decoder, hf = "<directory or config.json>", or a module of Python\'s'
    )
    if preset is not None:
        for field, value in preset.model.model_dump().items():
            reading.infer(f"model.{field}", value, origin=preset.name)
    for key in ("model.name", "model.flavor"):
        if preset is None:
            reading.unsupported(key, missing)
        else:
            why = f"and the other sizes of {preset.name}"
            reading.set(key, "model.d_model", value=preset.model.d_model, why=why)


def _fit_positions(reading: ConfigReader) -> None:
    """Raises `model.max_sequence`, the number of rotary positions, to the length of the sequences."""
    length = reading.settings.get("data.sequence_length")
    if isinstance(length, int) and length > (reading.settings.get("model.max_sequence") or 2048):
        reading.settings.pop("model.max_sequence", None)
        reading.infer("model.max_sequence", length, origin="training.seq_len")


def _read_recompute(reading: ConfigReader) -> None:
    mode_key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, option = reading.get(mode_key), str(reading.get(option_key) or "2")
    if mode == "selective" and option == "op":
        reading.set(mode_key, "recompute.mode", value="selective")
        reading.infer("recompute.save_matmuls", 2, origin=option_key)
        reading.set(option_key, "recompute.save_matmuls", value=2, why="every second matmul is saved")
    elif mode == "selective" and positive(option):
        reading.set(mode_key, "recompute.mode", value="every")
        reading.set(option_key, "recompute.every", value=positive(option))
    elif mode in ("full", "none"):
        reading.set(mode_key, "recompute.mode", value=mode)
        reading.not_needed(option_key, f'for mode = "selective", not {mode}')
    elif mode is not None:
        reading.unsupported(mode_key, "recompute.mode: none, full, every, selective, offload, or auto")


def _read_optimizer(reading: ConfigReader) -> None:
    names = {"adamw": "adamw", "adam": "torch.optim.Adam"}
    name = names.get(str(reading.get("optimizer.name")).lower())
    if name is not None:
        reading.set("optimizer.name", "optimizer.name", value=name)
    betas: list[Any] = [number(reading.get(f"optimizer.beta{one}")) for one in (1, 2)]
    if any(one is not None for one in betas):
        pair = [default if one is None else one for one, default in zip(betas, (0.9, 0.95), strict=True)]
        for one in (1, 2):
            reading.set(f"optimizer.beta{one}", "optimizer.betas", value=pair)


def _read_schedule(reading: ConfigReader) -> None:
    """Sets the schedule. A decay ratio is the fraction of steps, at the end, in which the rate decays."""
    ratio_key, type_key = "lr_scheduler.decay_ratio", "lr_scheduler.decay_type"
    ratio, kind = number(reading.get(ratio_key)), str(reading.get(type_key) or "linear")
    if ratio is not None and 0 < ratio < 1:
        reading.set(ratio_key, "schedule.decay_fraction", value=ratio, why='with schedule.kind = "wsd"')
        reading.infer("schedule.kind", "wsd", origin=ratio_key)
        if kind != "linear":
            reading.unsupported(type_key, 'wsd falls linearly; or schedule.kind = "cosine"')
    elif kind in ("linear", "cosine"):
        origin = type_key if type_key in reading.leaves else "torchtitan's default"
        reading.infer("schedule.kind", kind, origin=origin)
    else:
        reading.unsupported(type_key, "schedule.kind: constant, cosine, linear or wsd")
    if type_key in reading.leaves:
        reading.set(type_key, "schedule.kind", value=reading.settings.get("schedule.kind"))
    reading.not_needed(ratio_key, "decay begins after the warmup: schedule.kind")


def _read_precision(reading: ConfigReader) -> None:
    """Sets `precision.mode` from the dtypes. torchtitan's default is to compute in bf16, reduce in fp32."""
    param_key, reduce_key = "training.mixed_precision_param", "training.mixed_precision_reduce"
    compute, wire = reading.get(param_key) or "bfloat16", reading.get(reduce_key) or "float32"
    pure = reading.get("training.dtype") == "bfloat16"
    mode = "fp32" if compute == "float32" else ("bf16_reduce" if wire == "bfloat16" else "bf16")
    if pure and compute != "float32":
        mode, why = "bf16_pure", "with updates rounded stochastically"
        reading.set("training.dtype", "precision.mode", value=mode, why=why)
    given = [key for key in (param_key, reduce_key) if key in reading.leaves]
    for key in given:
        reading.set(key, "precision.mode", value=mode)
    if not given:
        reading.set_default("precision.mode", mode, why="torchtitan's default")


def _read_switched(reading: ConfigReader) -> None:
    """Converts sections that have a switch: checkpoints, validation and compile."""
    saves = "checkpoint.enable" if "checkpoint.enable" in reading.leaves else "checkpoint.enable_checkpoint"
    if saves in reading.leaves:
        every = positive(reading.get("checkpoint.interval")) or 500
        if is_on(reading.get(saves)):
            reading.set(saves, "checkpoint.every", value=every)
            reading.set("checkpoint.interval", "checkpoint.every", value=every)
        else:
            reading.not_needed(saves, "off: saved at the end, and when interrupted")
            reading.not_needed("checkpoint.interval", "off")
    enabled = [key for key in ("validation.enable", "validation.enabled") if key in reading.leaves]
    if enabled and is_on(reading.get(enabled[0])):
        every = positive(reading.get("validation.freq")) or 10
        for key in (enabled[0], "validation.freq"):
            reading.set(key, "train.validate_every", value=every)
    for key in (*enabled, "validation.freq"):
        reading.not_needed(key, "off: train.validate_every")
    compiled = [key for key in ("training.compile", "compile.enable") if key in reading.leaves]
    for key in compiled:
        reading.set(key, "run.compile", value=is_on(reading.get(key)), why="block by block")

"""Conversion of torchtitan's TOML.

Sources: torchtitan/config/job_config.py of 2025 and 2026, config_manager.py of 2024.
"""

import math
from fnmatch import fnmatchcase
from typing import Any, cast

from fullshard.convert.rules import (
    ConversionState,
    apply_rules,
    convert_betas,
    convert_tracker_switches,
    is_true_yes_on,
    list_exact_keys,
    load_rules,
    load_table,
    parse_number,
    parse_positive_integer,
)
from fullshard.spec.pretrained import preset_or_none
from fullshard.spec.settings.model_section import DecoderConfig

_FLOAT8 = ("float8", "quantize.linear.float8")


def convert_torchtitan(state: ConversionState) -> None:
    """Records a verdict on every key of a torchtitan config."""
    rules = load_rules("torchtitan")
    # Keys of 2024 and early 2025; most are now in another section.
    state.rename_keys(load_table("torchtitan", "other_names"))
    older = [key for key in state.leaves if key.partition(".")[0] in ("training", "experimental")]
    names = {key: f"parallelism.{key.partition('.')[2]}" for key in older}
    known = {key: name for key, name in names.items() if any(fnmatchcase(name, rule) for rule in rules)}
    state.rename_keys(known)
    for key in ("training.seq_len", "training.steps"):
        state.checked_positive_integer(key)
    _convert_data_parallel_degrees(state)
    _convert_batch_sizes(state)
    _convert_model_flavor(state)
    _convert_activation_checkpoint(state)
    convert_betas(state, ("optimizer.beta1", "optimizer.beta2"), default=(0.9, 0.95))
    _convert_schedule(state)
    _convert_precision(state)
    _convert_save_and_validation_intervals(state)
    convert_tracker_switches(state, "metrics.enable_{}")
    apply_rules(state, rules)
    why = "torchtitan's default, which the file leaves as it is"
    for target, value in load_table("torchtitan", "defaults").items():
        state.set_default_of_other_tool(target, value, why=why)
    state.record_unknown_keys(list_exact_keys(rules))


def _convert_data_parallel_degrees(state: ConversionState) -> None:
    replicate_key = "parallelism.data_parallel_replicate_degree"
    shard_key = "parallelism.data_parallel_shard_degree"
    policy_key = "parallelism.fsdp_reshard_after_forward"
    # A degree of -1, or none, means all remaining ranks.
    replicate = state.checked_positive_integer(replicate_key, unset=(-1,)) or 1
    shard = state.checked_positive_integer(shard_key, unset=(-1,)) or -1
    # Parameters are sharded over ranks that share sequences, too.
    shard *= parse_positive_integer(state.get("parallelism.context_parallel_degree")) or 1
    never = state.get(policy_key) == "never"
    if replicate > 1 and shard == 1:
        why = "replicated over all ranks"
        state.record_setting(replicate_key, "sharding.strategy", value="no_shard", why=why)
        state.record_not_needed(shard_key, "1: nothing is sharded")
    elif replicate > 1:
        divided = replicate * (parse_positive_integer(state.get("parallelism.tensor_parallel_degree")) or 1)
        degree = shard if shard > 1 else (state.ranks // divided if state.ranks else None)
        strategy = "hybrid_shard_zero2" if never else "hybrid_shard"
        why = "ranks / shard_degree replicas"
        state.record_setting(replicate_key, "sharding.strategy", value=strategy, why=why)
        if degree is None:
            state.record_not_needed(shard_key, f"set sharding.shard_degree: ranks / {divided}")
            state.decisions.append(f"sharding.shard_degree = ranks / {divided}; --ranks N sets it")
        else:
            state.infer_setting("sharding.shard_degree", degree, origin=shard_key)
            state.record_setting(shard_key, "sharding.shard_degree", value=degree)
    else:
        origin = policy_key if policy_key in state.leaves else "FSDP2"
        state.infer_setting("sharding.strategy", "shard_grad_op" if never else "full_shard", origin=origin)
        state.record_not_needed(replicate_key, "1: nothing is replicated")
        state.record_not_needed(shard_key, "all ranks, with full_shard and shard_grad_op")
    why = "never: parameters stay gathered until backward"
    state.record_setting(policy_key, "sharding.strategy", value=state.settings["sharding.strategy"], why=why)


def _convert_batch_sizes(state: ConversionState) -> None:
    local_key, total_key = "training.local_batch_size", "training.global_batch_size"
    local = state.checked_positive_integer(local_key)
    total = state.checked_positive_integer(total_key, unset=(-1,))
    if local:
        state.record_setting(
            local_key, "train.microbatch", value=local, why="sequences per rank and microbatch"
        )
    if total:
        state.record_setting(total_key, "train.global_batch", value=total)
    else:
        degrees = (
            state.get(f"parallelism.{one}_parallel_degree") for one in ("tensor", "context", "pipeline")
        )
        shared = math.prod(parse_positive_integer(degree) or 1 for degree in degrees)
        origin = local_key if local else "torchtitan's default"
        state.infer_global_batch(local or 8, origin=origin, model_parallel=shared)
        state.record_not_needed(total_key, "left out: local batch × ranks")


def _convert_model_flavor(state: ConversionState) -> None:
    name, flavor = (str(state.get(f"model.{key}")).lower() for key in ("name", "flavor"))
    preset = preset_or_none(load_table("torchtitan", "presets").get(f"{name} {flavor}", ""))
    missing = (
        '[model] takes the sizes of a decoder, hf = "<directory or config.json>", or a module of Python\'s'
    )
    model = None if preset is None else preset.model
    if preset is not None and isinstance(model, DecoderConfig):
        for field, value in model.model_dump().items():
            state.infer_setting(f"model.{field}", value, origin=preset.name)
    for key in ("model.name", "model.flavor"):
        if preset is None or not isinstance(model, DecoderConfig):
            state.record_unsupported(key, missing, misses="model.d_model")
        else:
            why = f"and the other sizes of {preset.name}"
            state.record_setting(key, "model.d_model", value=model.d_model, why=why)


def _convert_activation_checkpoint(state: ConversionState) -> None:
    mode_key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, option = state.get(mode_key), str(state.get(option_key) or "2")
    if mode == "selective" and option == "op":
        state.record_setting(mode_key, "recompute.mode", value="selective")
        state.infer_setting("recompute.save_matmuls", 2, origin=option_key)
        why = "every second matmul is saved"
        state.record_setting(option_key, "recompute.save_matmuls", value=2, why=why)
    elif mode == "selective" and parse_positive_integer(option):
        state.record_setting(mode_key, "recompute.mode", value="full")
        why = f"all blocks recompute; recompute.blocks = their number / {option} costs what is asked"
        state.record_unsupported(option_key, why)
    elif mode in ("full", "none"):
        state.record_setting(mode_key, "recompute.mode", value=mode)
        state.record_not_needed(option_key, f'for mode = "selective", not {mode}')
    elif mode is not None:
        state.record_unsupported(mode_key, "recompute.mode: none, full, selective, offload, or auto")


def _convert_schedule(state: ConversionState) -> None:
    """Sets the schedule. A decay ratio is the fraction of steps, at the end, in which the rate decays."""
    ratio_key, type_key = "lr_scheduler.decay_ratio", "lr_scheduler.decay_type"
    warmup_key, steps = "lr_scheduler.warmup_steps", parse_positive_integer(state.get("training.steps"))
    given = parse_positive_integer(state.get(warmup_key))
    default = load_table("torchtitan", "defaults")["schedule.warmup_steps"]
    if steps and (default if given is None else given) > steps:
        why = "torchtitan cuts the warmup to the steps"
        if given is None:
            state.set_default_of_other_tool("schedule.warmup_steps", steps, why=why)
        state.record_setting(warmup_key, "schedule.warmup_steps", value=steps, why=why)
    ratio, kind = parse_number(state.get(ratio_key)), str(state.get(type_key) or "linear")
    if ratio is not None and 0 < ratio < 1:
        why = 'with schedule.kind = "wsd"'
        state.record_setting(ratio_key, "schedule.decay_fraction", value=ratio, why=why)
        state.infer_setting("schedule.kind", "wsd", origin=ratio_key)
        if kind != "linear":
            why = 'wsd falls linearly; or schedule.kind = "cosine"'
            state.record_unsupported(type_key, why, misses="schedule.kind")
    elif ratio == 0:
        why = "no steps of decay"
        state.record_setting(ratio_key, "schedule.kind", value="constant", why=why)
        state.record_not_needed(type_key, why)
        state.record_not_needed("lr_scheduler.min_lr_factor", why)
    elif kind in ("linear", "cosine"):
        origin = type_key if type_key in state.leaves else "torchtitan's default"
        state.infer_setting("schedule.kind", kind, origin=origin)
    else:
        why = "schedule.kind: constant, cosine, linear or wsd"
        state.record_unsupported(type_key, why, misses="schedule.kind")
    if "schedule.kind" in state.settings:
        state.record_setting(type_key, "schedule.kind", value=state.settings["schedule.kind"])
    state.record_not_needed(ratio_key, "decay begins after the warmup: schedule.kind")


def _convert_precision(state: ConversionState) -> None:
    """Sets `precision.mode` from the dtypes. torchtitan's default is to compute in bf16, reduce in fp32."""
    param_key, reduce_key = "training.mixed_precision_param", "training.mixed_precision_reduce"
    compute, wire = state.get(param_key) or "bfloat16", state.get(reduce_key) or "float32"
    pure = state.get("training.dtype") == "bfloat16"
    mode = "fp32" if compute == "float32" else ("bf16_reduce" if wire == "bfloat16" else "bf16")
    if pure and compute != "float32":
        mode, why = "bf16_pure", "with updates rounded stochastically"
        state.record_setting("training.dtype", "precision.mode", value=mode, why=why)
    named: Any = state.get("model.converters")
    is_float8 = isinstance(named, list) and named and all(one in _FLOAT8 for one in cast(list[Any], named))
    if is_float8 and mode == "bf16":
        recipe = next(
            (state.get(f"{one}.recipe_name") for one in _FLOAT8 if state.get(f"{one}.recipe_name")), None
        )
        mode = "fp8_rowwise" if "rowwise" in str(recipe) else "fp8"
    given = [key for key in (param_key, reduce_key) if key in state.leaves]
    for key in (*given, "model.converters") if mode.startswith("fp8") else given:
        state.record_setting(key, "precision.mode", value=mode)
    if not given:
        state.set_default_of_other_tool("precision.mode", mode, why="torchtitan's default")


def _convert_save_and_validation_intervals(state: ConversionState) -> None:
    """Converts how often a run is saved and validated: never if the section is off."""
    for switch, key, target, default in (
        ("checkpoint.enable", "checkpoint.interval", "checkpoint.every", 500),
        ("validation.enable", "validation.freq", "train.validate_every", 10),
    ):
        is_on = is_true_yes_on(state.get(switch))
        every = (parse_positive_integer(state.get(key)) or default) if is_on else 0
        for one in (switch, key):
            if one in state.leaves:
                state.record_setting(one, target, value=every, why="" if is_on else "off")

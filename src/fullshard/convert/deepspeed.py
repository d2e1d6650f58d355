"""Conversion of DeepSpeed's JSON. Source: deepspeed.ai/docs/config-json, deepspeed/runtime/zero/config.py."""

import math
from typing import Any

from fullshard.convert.reader import (
    AUTO,
    ConversionState,
    UnevaluatedExpression,
    is_enabled_value,
    lowercase_last_dotted_part,
    parse_nonnegative_integer,
)
from fullshard.convert.rules import (
    DTYPES,
    OFFLOAD,
    apply_rules,
    check_zero_stage,
    convert_trackers,
    keys_without_wildcards,
    read_rules,
    strategy_for_zero_stage,
)
from fullshard.errors import SpecError

_ZERO = "zero_optimization"
_ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
_DOTTED = {"adagrad": "torch.optim.Adagrad", "sgd": "sgd", "torch.optim.sgd": "sgd"}
# Defaults of DeepSpeed's FusedAdam for keys that `optimizer.params` leaves out.
_ADAM_DEFAULTS = {"optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0}


def convert_deepspeed(reading: ConversionState) -> None:
    """Records a verdict on every key of a DeepSpeed config. Raises SpecError for contradictions."""
    _convert_zero_stage(reading)
    _convert_offload(reading)
    _convert_precision(reading)
    _convert_batch_sizes(reading)
    _convert_optimizer(reading)
    _convert_schedule(reading)
    convert_trackers(reading, "{}.enabled")
    rules = read_rules("deepspeed")
    apply_rules(reading, rules)
    if "gradient_clipping" not in reading.leaves:
        reading.set_default_of_other_tool("optimizer.clip_norm", 0.0, why="DeepSpeed clips only if asked")
    reading.record_unknown_keys([*keys_without_wildcards(rules), *reading.key_results])


def _convert_zero_stage(reading: ConversionState) -> None:
    key = f"{_ZERO}.stage"
    stage = reading.get(key)
    if isinstance(reading.get(_ZERO), bool):  # an older form
        key, stage = _ZERO, int(reading.get(_ZERO))
    check_zero_stage(reading, f"{_ZERO}.stage")
    shard_size, hpz = reading.get(f"{_ZERO}.mics_shard_size"), reading.get(f"{_ZERO}.zero_hpz_partition_size")
    strategy = strategy_for_zero_stage(stage)
    if stage is None:
        reading.set_default_of_other_tool(
            "sharding.strategy", "no_shard", why="DeepSpeed shards nothing without a stage"
        )
    elif strategy is None:
        reading.record_not_needed(key, "left open there: the planner chooses the strategy")
    elif parse_nonnegative_integer(stage) == 3 and isinstance(shard_size, int) and shard_size > 0:  # MiCS
        reading.record_setting(
            key, "sharding.strategy", value="hybrid_shard", why="MiCS: sharded in groups of ranks"
        )
        reading.record_setting(f"{_ZERO}.mics_shard_size", "sharding.shard_degree", value=shard_size)
    else:
        reading.record_setting(key, "sharding.strategy", value=strategy)
    if parse_nonnegative_integer(stage) == 3 and isinstance(hpz, int) and hpz > 1:
        reading.record_setting(
            f"{_ZERO}.zero_hpz_partition_size", "sharding.reshard_after_forward", value=hpz
        )


def _convert_offload(reading: ConversionState) -> None:
    """Converts `offload_optimizer` and `offload_param`; sets `offload.path` for a drive."""
    parts = {"offload_optimizer": "optimizer:{}", "offload_param": "params+optimizer:{}"}
    for part, tier in parts.items():
        key = f"{_ZERO}.{part}.device"
        device = reading.get(key)
        if device in ("cpu", "nvme"):
            reading.record_unsupported(key, OFFLOAD.format(tier=tier.format(device)))
        path = reading.get(f"{_ZERO}.{part}.nvme_path")
        if device == "nvme" and isinstance(path, str):
            reading.record_setting(f"{_ZERO}.{part}.nvme_path", "offload.path", value=path)


def _convert_precision(reading: ConversionState) -> None:
    """Sets `precision.mode` from `bf16.enabled`, `fp16.enabled` and the dtype of communicated gradients."""
    modes = {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"}
    on = [key for key in modes if is_enabled_value(reading.get(key))]
    if len(on) > 1:
        raise SpecError("two precisions are turned on at once.", got=", ".join(on), fix="leave one of them")
    wire = "communication_data_type"
    sent = (
        DTYPES.get(lowercase_last_dotted_part(reading.get(wire))) if reading.get(wire) is not None else None
    )
    autocast = is_enabled_value(reading.get("torch_autocast.enabled"))
    for key, mode in [(key, mode) for key, mode in modes.items() if key in reading.leaves]:
        value = reading.get(key)
        if key in on:
            mode = "bf16_reduce" if mode == "bf16" and sent == "bf16" else mode
            reading.record_setting(key, "precision.mode", value=mode)
        elif value == AUTO:
            reading.record_not_needed(key, 'left open there: precision.mode = "auto" goes by the device')
        elif on or autocast or AUTO in [reading.get(other) for other in modes]:
            reading.record_not_needed(key, f"off; {', '.join(on) or 'another key'} says the precision")
        else:
            reading.record_setting(key, "precision.mode", value="fp32")
    if not on and not autocast and not any(key in reading.leaves for key in modes):
        reading.set_default_of_other_tool(
            "precision.mode", "fp32", why="DeepSpeed computes in fp32 unless asked"
        )
    if sent == "bf16" and reading.settings.get("precision.mode") == "bf16_reduce":
        reading.record_setting(wire, "precision.mode", value="bf16_reduce")
    elif sent in (None, "fp32"):
        reading.record_not_needed(wire, "gradients are sent and summed in fp32 here")
    else:
        reading.record_unsupported(wire, "gradients are summed in fp32 (bf16_reduce: in bf16)")


def _convert_batch_sizes(reading: ConversionState) -> None:
    """Sets the batch sizes: train_batch_size is the microbatch × the accumulation steps × the ranks."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (reading.get_positive_integer(key) for key in keys)
    ranks = reading.ranks
    given = [value for value in (micro, steps, ranks) if value]
    if total and total % math.prod(given):
        raise SpecError(
            "the batch sizes contradict each other.",
            got=", ".join(f"{key} = {reading.get(key)}" for key in keys if key in reading.leaves)
            + (f", {ranks} ranks" if ranks else ""),
            why="train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks",
        )
    if total and len(given) == 3 and math.prod(given) != total:
        raise SpecError(
            "the batch sizes contradict each other.",
            got=f"{keys[0]} = {total}; {micro} × {steps} × {ranks} ranks = {math.prod(given)}",
            fix=f"{keys[0]} = {math.prod(given)}, or other ranks",
        )
    if total and ranks and steps and not micro:
        micro = total // (ranks * steps)
        reading.infer_setting("train.microbatch", micro, origin=f"{keys[0]} / ({keys[2]} × ranks)")
    if total:
        reading.record_setting(keys[0], "train.global_batch", value=total)
        if micro and steps and not ranks:
            reading.notes.append(f"its batch sizes are for {total // (micro * steps)} ranks")
    if reading.get_positive_integer(keys[1]):
        reading.record_setting(keys[1], "train.microbatch", value=micro, why="sequences a rank at once")
    if steps:
        reading.record_not_needed(keys[2], "accumulation is train.global_batch / (train.microbatch × ranks)")
    if micro and not total:
        reading.infer_global_batch(micro * (steps or 1), origin=keys[2] if steps else keys[1])


def _convert_optimizer(reading: ConversionState) -> None:
    key = "optimizer.type"
    if key not in reading.leaves:
        return
    kind = str(reading.get(key)).lower()
    coupled = reading.get("optimizer.params.adam_w_mode") is False
    if kind in _ADAMS and coupled:
        reading.record_setting(
            key, "optimizer.name", value="torch.optim.Adam", why="its weight decay is an L2 term"
        )
        reading.record_not_needed("optimizer.params.adam_w_mode", "optimizer.name says it")
    elif kind in _ADAMS:
        reading.record_setting(
            key, "optimizer.name", value="adamw", why="fused, as DeepSpeed's is" if kind == "adam" else ""
        )
    elif kind in _DOTTED:
        reading.record_setting(key, "optimizer.name", value=_DOTTED[kind])
    else:
        instead = "adamw stands instead; optimizer.name takes the dotted name of any torch.optim.Optimizer"
        reading.record_unsupported(key, instead)
    # The scheduler may replace the learning rate, so the optimizer's keys come first.
    rules = read_rules("deepspeed").items()
    apply_rules(reading, {name: rule for name, rule in rules if name.startswith("optimizer.")})
    if kind in _ADAMS:
        for target, value in _ADAM_DEFAULTS.items():
            if f"optimizer.params.{target.partition('.')[2]}" not in reading.leaves:
                reading.set_default_of_other_tool(
                    target, value, why="DeepSpeed's default, which the file leaves as it is"
                )
    elif _DOTTED.get(kind) and "optimizer.params.weight_decay" not in reading.leaves:
        reading.set_default_of_other_tool("optimizer.weight_decay", 0.0, why="torch's default for it")


def _convert_schedule(reading: ConversionState) -> None:
    """Converts WarmupLR, WarmupDecayLR and WarmupCosineLR; other types are not supported."""
    key = "scheduler.type"
    kinds = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    kind = kinds.get(str(reading.get(key)).lower())
    if key in reading.leaves and kind is None:
        for one in [one for one in reading.keys_without_verdict() if one.startswith("scheduler.")]:
            reading.record_unsupported(one, "schedule.kind: constant, cosine, linear or wsd")
        return
    if kind is None:
        if "optimizer.type" in reading.leaves:
            reading.notes.append(
                "the file has no scheduler: DeepSpeed keeps the rate, a trainer brings its own; "
                "schedule.kind here is cosine by default"
            )
        return
    reading.record_setting(key, "schedule.kind", value=kind)
    if kind == "linear":
        reading.set_default_of_other_tool("schedule.min_lr_ratio", 0.0, why="WarmupDecayLR ends at 0")
    if kind == "cosine" and "scheduler.params.cos_min_ratio" not in reading.leaves:
        reading.set_default_of_other_tool("schedule.min_lr_ratio", 1e-4, why="WarmupCosineLR's default")
    if "scheduler.params.warmup_num_steps" not in reading.leaves:
        reading.set_default_of_other_tool("schedule.warmup_steps", 1000, why=f"{reading.get(key)}'s default")
    lowest = reading.get("scheduler.params.warmup_min_lr")
    if lowest not in (None, AUTO) and not isinstance(lowest, UnevaluatedExpression):
        verdict = (
            reading.record_not_needed
            if parse_nonnegative_integer(lowest) == 0
            else reading.record_unsupported
        )
        verdict("scheduler.params.warmup_min_lr", "warmup begins at the peak / warmup_steps")
    _convert_peak_learning_rate(reading)


def _convert_peak_learning_rate(reading: ConversionState) -> None:
    key = "scheduler.params.warmup_max_lr"
    peak: Any = reading.get(key)
    if peak is None or peak == AUTO:
        return
    optimizers = reading.settings.get("optimizer.learning_rate")
    if optimizers is not None and optimizers != peak:
        # The scheduler sets the rate in every step, so the optimizer's own is never used.
        reading.settings.pop("optimizer.learning_rate")
        reading.notes.append(f"the scheduler's peak, {peak}, is what DeepSpeed trains at, not {optimizers}")
    reading.record_setting(key, "optimizer.learning_rate", value=peak, why="the peak")

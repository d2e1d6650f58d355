"""Conversion of DeepSpeed's JSON. Source: deepspeed.ai/docs/config-json, deepspeed/runtime/zero/config.py."""

import math
from typing import Any

from fullshard.convert.rules import (
    AUTO,
    DTYPES,
    ConversionState,
    apply_rules,
    convert_tracker_switches,
    is_true_yes_on,
    last_dotted_part_lower,
    list_exact_keys,
    load_rules,
    load_table,
    parse_nonnegative_integer,
    parse_number,
    parse_positive_integer,
    strategy_for_zero_stage,
)
from fullshard.errors import SpecError
from fullshard.quantities import count_text

_ZERO = "zero_optimization"


def convert_deepspeed(state: ConversionState) -> None:
    """Records a verdict on every key of a DeepSpeed config. Raises SpecError for contradictions."""
    state.rename_keys(load_table("deepspeed", "other_names"))
    _convert_zero_stage(state)
    _convert_precision(state)
    _convert_batch_sizes(state)
    _convert_optimizer(state)
    optimizer, params = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
    convert_offload(state, optimizer=f"{optimizer}.device", params=f"{params}.device")
    for part in (optimizer, params):
        path = state.get(f"{part}.nvme_path")
        if state.get(f"{part}.device") == "nvme" and isinstance(path, str):
            state.record_setting(f"{part}.nvme_path", "offload.path", value=path)
    _convert_schedule(state)
    name = state.settings.get("optimizer.name", "")
    defaults = load_table("deepspeed", "defaults").get(name, {})
    if name == "adamw" and is_true_yes_on(state.get("optimizer.params.torch_adam")):
        defaults = defaults | {"weight_decay": 1e-2}
    for param, value in defaults.items():
        if f"optimizer.params.{param}" not in state.leaves:
            target = "optimizer.learning_rate" if param.endswith("lr") else f"optimizer.{param}"
            why = "DeepSpeed's default, which the file leaves as it is"
            state.set_default_of_other_tool(target, value, why=why)
    convert_tracker_switches(state, "{}.enabled")
    rules = load_rules("deepspeed")
    apply_rules(state, rules)
    if "communication.reduce" in state.settings:
        state.infer_setting("communication.reduce_within", "fp32", origin="the two levels of ZeRO++")
    if "gradient_clipping" not in state.leaves:
        state.set_default_of_other_tool("optimizer.clip_norm", 0.0, why="DeepSpeed clips only if asked")
    state.record_unknown_keys([*list_exact_keys(rules), *state.key_results])


def _convert_zero_stage(state: ConversionState) -> None:
    key, mics_key = f"{_ZERO}.stage", f"{_ZERO}.mics_shard_size"
    require_valid_zero_stage(state, key)
    stage, shard_size = state.get(key), state.get(mics_key)
    if isinstance(state.get(_ZERO), bool):  # an older form
        key, stage = _ZERO, int(state.get(_ZERO))
    strategy = strategy_for_zero_stage(stage)
    if stage is None:
        why = "DeepSpeed shards nothing without a stage"
        state.set_default_of_other_tool("sharding.strategy", "no_shard", why=why)
    elif strategy is None:
        state.record_auto_value(key, "sharding.strategy")
    elif parse_nonnegative_integer(stage) == 3 and isinstance(shard_size, int) and shard_size > 0:  # MiCS
        why = "MiCS: sharded in groups of ranks"
        state.record_setting(key, "sharding.strategy", value="hybrid_shard", why=why)
        state.record_setting(mics_key, "sharding.shard_degree", value=shard_size)
    else:
        state.record_setting(key, "sharding.strategy", value=strategy)


def _convert_precision(state: ConversionState) -> None:
    modes = {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"}
    on = [key for key in modes if is_true_yes_on(state.get(key))]
    if len(on) > 1:
        raise SpecError("two precisions are turned on at once.", got=", ".join(on), fix="leave one of them")
    wire = "communication_data_type"
    sent = DTYPES.get(last_dotted_part_lower(state.get(wire)))
    autocast = _convert_autocast_if_on(state) if not on else False
    open_keys = [key for key in modes if state.get(key) == AUTO]
    for key, mode in [(key, mode) for key, mode in modes.items() if key in state.leaves]:
        if key in on:
            mode = "bf16_reduce" if mode == "bf16" and sent == "bf16" else mode
            why = "gradients are summed in fp32; DeepSpeed sums in the dtype it computes in, unless asked"
            state.record_setting(key, "precision.mode", value=mode, why="" if sent else why)
        elif key in open_keys:
            state.record_auto_value(key, "precision.mode")
        elif on or autocast or open_keys:
            state.record_not_needed(key, f"off; {', '.join(on) or 'another key'} says the precision")
        else:
            state.record_setting(key, "precision.mode", value="fp32")
    if not on and not autocast and not any(key in state.leaves for key in modes):
        why = "DeepSpeed computes in fp32 unless asked"
        state.set_default_of_other_tool("precision.mode", "fp32", why=why)
    if sent == "bf16" and state.settings.get("precision.mode") == "bf16_reduce":
        state.record_setting(wire, "precision.mode", value="bf16_reduce")
    elif sent in (None, "fp32"):
        state.record_not_needed(wire, "gradients are sent and summed in fp32 here")
    else:
        state.record_unsupported(wire, "gradients are summed in fp32 (bf16_reduce: in bf16)")


def _convert_autocast_if_on(state: ConversionState) -> bool:
    switch, dtype = "torch_autocast.enabled", "torch_autocast.dtype"
    if not is_true_yes_on(state.get(switch)):
        return False
    mode = DTYPES.get(last_dotted_part_lower(state.get(dtype)), "bf16")
    for key in (switch, dtype):
        why = "whole modules are cast, without autocast's lists"
        state.record_setting(key, "precision.mode", value=mode, why=why)
    return True


def _convert_batch_sizes(state: ConversionState) -> None:
    """Sets the batch sizes: train_batch_size is the microbatch × the accumulation steps × the ranks.

    Ranks that share sequences or matmuls count as one.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (state.checked_positive_integer(key) for key in keys)
    sequence, tensor = (
        parse_positive_integer(state.get(key)) or 1
        for key in ("sequence_parallel_size", "tensor_parallel.autotp_size")
    )
    shared = sequence * tensor
    ranks = state.ranks and max(1, state.ranks // shared)
    given = [value for value in (micro, steps, ranks) if value]
    product = math.prod(given)
    if total and (total % product or (len(given) == 3 and total != product)):
        shown = ", ".join(f"{key} = {state.get(key)}" for key in keys if key in state.leaves)
        raise SpecError(
            "the batch sizes contradict each other.",
            got=shown + (f", {ranks} ranks" if ranks else ""),
            why="train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks",
        )
    if total and ranks and steps and not micro:
        micro = total // (ranks * steps)
        state.infer_setting("train.microbatch", micro, origin=f"{keys[0]} / ({keys[2]} × ranks)")
    if total:
        state.record_setting(keys[0], "train.global_batch", value=total)
        if micro and steps and not ranks:
            there = count_text(total // (micro * steps) * shared, "rank")
            state.notes.append(f"its batch sizes are for {there}")
    if state.checked_positive_integer(keys[1]):
        state.record_setting(
            keys[1], "train.microbatch", value=micro, why="sequences per rank and microbatch"
        )
    if steps:
        state.record_not_needed(keys[2], "accumulation is train.global_batch / (train.microbatch × ranks)")
    if micro and not total:
        origin = keys[2] if steps else keys[1]
        state.infer_global_batch(micro * (steps or 1), origin=origin, model_parallel=shared)


def _convert_optimizer(state: ConversionState) -> None:
    """Converts the optimizer's keys, before the scheduler's, which may replace the learning rate."""
    key, mode = "optimizer.type", "optimizer.params.adam_w_mode"
    if str(state.get(key)).lower() == "adam" and not state.leaves.get(mode, True):  # AdamW ignores it
        why = "its weight decay is an L2 term"
        state.record_setting(key, "optimizer.name", value="torch.optim.Adam", why=why)
        state.record_not_needed(mode, "optimizer.name says it")
    if str(state.get(key)).lower() == "muon":
        names = {"lr": "muon_lr", "momentum": "muon_momentum"}
        state.rename_keys(
            {f"optimizer.params.{old}": f"optimizer.params.{new}" for old, new in names.items()}
        )
        state.infer_setting("optimizer.muon.scale", "original", origin="DeepSpeed's Muon")
    rules = load_rules("deepspeed").items()
    apply_rules(state, {name: rule for name, rule in rules if name.startswith("optimizer.")})


def _convert_schedule(state: ConversionState) -> None:
    key = "scheduler.type"
    kinds = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    kind = kinds.get(str(state.get(key)).lower())
    if key in state.leaves and kind is None:
        for one in [one for one in state.keys_without_verdict() if one.startswith("scheduler.")]:
            why = "schedule.kind: constant, cosine, linear or wsd"
            state.record_unsupported(one, why, misses="schedule.kind")
        return
    if kind is None:
        _convert_absent_scheduler(state)
        return
    state.record_setting(key, "schedule.kind", value=kind)
    if kind == "linear":
        state.set_default_of_other_tool("schedule.min_lr_ratio", 0.0, why="WarmupDecayLR ends at 0")
    if kind == "cosine" and "scheduler.params.cos_min_ratio" not in state.leaves:
        state.set_default_of_other_tool("schedule.min_lr_ratio", 1e-4, why="WarmupCosineLR's default")
    if "scheduler.params.warmup_num_steps" not in state.leaves:
        state.set_default_of_other_tool("schedule.warmup_steps", 1000, why=f"{state.get(key)}'s default")
    if "scheduler.params.warmup_type" not in state.leaves:
        state.notes.append(f"{state.get(key)} warms up by the logarithm of the step, and fullshard linearly")
    _convert_peak_learning_rate(state, default=1e-3 if kind == "linear" else None)


def _convert_absent_scheduler(state: ConversionState) -> None:
    if AUTO in state.leaves.values():
        state.notes.append(
            "the file has no scheduler: the trainer that fills in its values brings its own; "
            "schedule.kind here is cosine by default"
        )
    elif "optimizer.type" in state.leaves:
        why = "DeepSpeed keeps the rate, without a scheduler"
        state.set_default_of_other_tool("schedule.kind", "constant", why=why)
        state.set_default_of_other_tool("schedule.warmup_steps", 0, why=why)


def _convert_peak_learning_rate(state: ConversionState, *, default: float | None) -> None:
    """Sets the rate to the scheduler's peak, or its `default`; with None, the optimizer's rate remains."""
    key = "scheduler.params.warmup_max_lr"
    peak: Any = state.leaves.get(key, default)
    if parse_number(peak) is None:
        return
    optimizers = state.settings.get("optimizer.learning_rate")
    if optimizers is not None and optimizers != peak:
        # The scheduler sets the rate in every step, so the optimizer's own is never used.
        state.settings.pop("optimizer.learning_rate")
        state.origins.pop("optimizer.learning_rate")
        state.notes.append(f"the scheduler's peak, {peak}, is what DeepSpeed trains at, not {optimizers}")
    if key not in state.leaves:
        state.set_default_of_other_tool("optimizer.learning_rate", peak, why="the scheduler's default")
    state.record_setting(key, "optimizer.learning_rate", value=peak, why="the peak")


def require_valid_zero_stage(state: ConversionState, key: str) -> None:
    """Raises SpecError for a stage that ZeRO does not have."""
    value = state.get(key)
    if value not in (None, AUTO) and strategy_for_zero_stage(value) is None:
        raise SpecError(f"{key} is not valid.", got=repr(value), fix="0, 1, 2 or 3")


def convert_offload(state: ConversionState, *, optimizer: str, params: str) -> None:
    """Sets `offload.tier` from DeepSpeed's devices, cpu or nvme, for optimizer state and for parameters.

    optimizer, params: the keys of the devices. The strategy, and the optimizer if the config names one, must
        be set before.
    """
    places = {
        key: "cpu" if is_true_yes_on(state.get(key)) else str(state.get(key)).lower()
        for key in (optimizer, params)
    }
    if state.settings.get("sharding.strategy", "full_shard") not in ("full_shard", "hybrid_shard"):
        state.record_not_needed(params, "DeepSpeed ignores it without stage 3")
        places.pop(params)
    used = {key: place for key, place in places.items() if place in ("cpu", "nvme")}
    if not used:
        for key, place in places.items():
            if state.get(key) is not None and place in ("none", "false"):
                state.record_setting(key, "offload.tier", value="none")
        return
    drive = "nvme" if "nvme" in used.values() else "cpu"
    tier = f"{'params+' if params in used else ''}optimizer:{drive}"
    whys = {
        optimizer: "" if used.get(optimizer, drive) == drive else "both on the drive",
        params: "with the optimizer state" if optimizer not in used else "",
    }
    for key in used:
        if state.settings.get("optimizer.name", "adamw") == "adamw":
            state.record_setting(key, "offload.tier", value=tier, why=whys[key])
        else:
            state.record_unsupported(key, "only AdamW's state can be offloaded")

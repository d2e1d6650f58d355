"""Conversion of the arguments of transformers' Trainer, and of axolotl's YAML, most of which are the same.

Sources: transformers/training_args.py (5.23), trl/trainer/sft_config.py, axolotl/utils/schemas of 2026-07,
llamafactory/hparams.
"""

import math
from collections.abc import Callable
from typing import Any

from fullshard.convert.accelerate import convert_fsdp_section
from fullshard.convert.reader import (
    AUTO,
    ConversionState,
    UnevaluatedExpression,
    is_true_yes_on,
    is_variable,
    parse_number,
    parse_positive_integer,
)
from fullshard.convert.rules import (
    apply_rules,
    convert_betas,
    keys_without_wildcards,
    load_other_names,
    load_rules,
)

# Defaults of transformers' TrainingArguments, and those that axolotl has instead.
_DEFAULTS = {
    "optimizer.learning_rate": 5e-5,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.0,
    "schedule.kind": "linear",
    "schedule.min_lr_ratio": 0.0,
}
_AXOLOTL_DEFAULTS = _DEFAULTS | {"schedule.kind": "cosine"}
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
# Degrees of ranks that share each sequence or its matmuls.
_MODEL_PARALLEL = (
    "tensor_parallel_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
_PRECISIONS = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}


def convert_trainer(state: ConversionState) -> None:
    """Records a verdict on every argument of transformers' Trainer, or of a program with its arguments."""
    state.rename_keys(load_other_names("trainer"))
    _convert_schedule(state, default_warmup=lambda steps: 0)
    _convert_arguments(state, defaults=_duration(state, epochs=3) | _DEFAULTS, microbatch=8)


def convert_axolotl(state: ConversionState) -> None:
    """Records a verdict on every key of an axolotl config."""
    state.rename_keys(load_other_names("trainer"))
    _convert_schedule(state, default_warmup=lambda steps: min(int(0.03 * steps), 100))
    _convert_arguments(state, defaults=_duration(state, epochs=1) | _AXOLOTL_DEFAULTS, microbatch=1)


def _duration(state: ConversionState, *, epochs: int) -> dict[str, Any]:
    """Returns the trainer's default duration in `epochs`; none if `max_steps` is set, which counts."""
    if state.checked_positive_integer("max_steps", unset=(-1, 0)) or is_variable(state.get("max_steps")):
        state.record_not_needed("num_train_epochs", "max_steps says the duration")
        return {}
    return {"train.epochs": epochs}


def _convert_arguments(state: ConversionState, *, defaults: dict[str, Any], microbatch: int) -> None:
    state.checked_positive_integer("max_length")
    model = state.get("model_name_or_path")
    if isinstance(model, str) and not isinstance(model, UnevaluatedExpression):
        state.record_setting("model_name_or_path", "model.hf", value=model)
        if is_true_yes_on(state.get("reinit_weights")):
            state.record_setting("reinit_weights", "model.weights", value="none")
        _convert_model_overrides(state)
    _convert_batch_sizes(state, default=microbatch)
    _convert_strategy(state)
    _convert_precision(state)
    if str(state.get("adapter")).lower() in ("lora", "qlora", "true"):
        rank = parse_positive_integer(state.get("lora_r"))
        state.record_setting("adapter", "adapter.rank", value=rank or 8, why="LoRA")
    else:
        for key in [
            key for key in state.leaves if key.startswith(("lora_", "peft_", "use_dora", "use_rslora"))
        ]:
            state.record_not_needed(key, "without an adapter")
    convert_betas(state, ("adam_beta1", "adam_beta2"), default=(0.9, 0.999))
    rules = load_rules("trainer")
    apply_rules(state, rules)
    why = "the trainer's default, which the file leaves as it is"
    for target, value in defaults.items():
        state.set_default_of_other_tool(target, value, why=why)
    state.record_unknown_keys([*keys_without_wildcards(rules), *load_other_names("trainer")])


def _convert_model_overrides(state: ConversionState) -> None:
    """Sets `model.options`, which are put over the model's config.json, from axolotl's overrides of it."""
    for key in state.leaves:
        section, _, option = key.partition(".")
        if section == "overrides_of_model_config" and option and state.get(key) is not None:
            state.record_setting(key, f"model.options.{option}", value=state.get(key))


def _convert_batch_sizes(state: ConversionState, *, default: int) -> None:
    key, steps_key = "per_device_train_batch_size", "gradient_accumulation_steps"
    each, steps = state.checked_positive_integer(key), state.checked_positive_integer(steps_key)
    if each:
        state.record_setting(key, "train.microbatch", value=each, why="sequences per rank and microbatch")
    if is_variable(state.get(key)) or is_variable(state.get(steps_key)):
        return
    sequences = (each or default) * (steps or 1)
    shared = math.prod(parse_positive_integer(state.get(one)) or 1 for one in _MODEL_PARALLEL)
    state.infer_global_batch(sequences, origin=f"{key} × {steps_key}", model_parallel=shared)


def _convert_strategy(state: ConversionState) -> None:
    """Sets the strategy from `fsdp`, `fsdp_config`, and axolotl's degrees of parallelism."""
    replicate, shard = "dp_replicate_size", "dp_shard_size"
    sizes = (
        parse_positive_integer(state.get(key)) or 1 for key in (replicate, shard, "context_parallel_size")
    )
    replicas, sharded, shared = sizes
    degree = sharded * shared  # parameters are sharded over ranks that share sequences, too
    if replicas > 1:
        strategy = "hybrid_shard" if degree > 1 else "no_shard"
        state.record_setting(replicate, "sharding.strategy", value=strategy, why="ranks / shard_degree")
    if replicas > 1 and degree > 1:
        state.record_setting(shard, "sharding.shard_degree", value=degree)
    value: Any = state.get("fsdp")
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
    named = next((word for word in words.lower().split() if word in _STRATEGIES), None)
    section = any(key.startswith("fsdp_config.") for key in state.leaves)
    # Of FSDP2, fsdp_config has the strategy, whatever `fsdp` says.
    if replicas == 1:
        convert_fsdp_section(state, by_default=(section or is_true_yes_on(value)) and named is None)
    if named is not None and "sharding.strategy" not in state.settings:
        state.record_setting("fsdp", "sharding.strategy", value=named)
    elif named is not None:
        state.record_not_needed("fsdp", f"{state.origins['sharding.strategy']} says the strategy")
    if "offload" in words.lower().split():
        state.infer_setting("offload.tier", "params+optimizer:cpu", origin="fsdp")


def _convert_precision(state: ConversionState) -> None:
    on = [key for key in _PRECISIONS if is_true_yes_on(state.get(key))]
    full = str(state.get("bf16")).lower() == "full" or is_true_yes_on(state.get("bfloat16"))
    pure = [key for key in ("bf16", "bfloat16", "dtype") if full and key in state.leaves]
    for key in pure:
        state.record_setting(key, "precision.mode", value="bf16_pure", why="without masters in fp32")
    for key in on[:1]:
        state.record_setting(key, "precision.mode", value=_PRECISIONS[key], why="with masters in fp32")
    for key in _PRECISIONS:
        value = state.get(key)
        if value == AUTO or is_variable(value):
            state.record_open(key, "precision.mode")
        else:
            state.record_not_needed(key, f"{', '.join(pure or on) or 'another key'} says the precision")


def _convert_schedule(state: ConversionState, *, default_warmup: Callable[[int], int]) -> None:
    """Sets the warmup, which can be a fraction of the steps, if the number of steps is known.

    default_warmup: returns the trainer's default for a number of steps
    """
    steps = state.checked_positive_integer("max_steps", unset=(-1, 0))
    ratio, own = parse_number(state.get("warmup_ratio")), parse_positive_integer(state.get("warmup_steps"))
    if str(state.get("lr_scheduler_type")).lower() == "constant":
        for key in ("warmup_ratio", "warmup_steps"):
            state.record_not_needed(key, "constant has no warmup")
        state.infer_setting("schedule.warmup_steps", 0, origin="constant has no warmup")
    elif own is None and ratio and steps:
        value = math.ceil(ratio * steps)
        state.record_setting("warmup_ratio", "schedule.warmup_steps", value=value, why="of max_steps")
    elif own is None and not ratio and (steps or default_warmup(10_000) == 0):
        why = "the trainer's default, which the file leaves as it is"
        state.record_not_needed("warmup_ratio", "0: no warmup")
        state.set_default_of_other_tool("schedule.warmup_steps", default_warmup(steps or 0), why=why)

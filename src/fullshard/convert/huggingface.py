"""Conversion of Accelerate's YAML, of the arguments of transformers' Trainer, and of axolotl's YAML.

Sources: accelerate/commands/config/{config_args,cluster}.py (1.15); transformers/training_args.py (5.23),
trl/trainer/sft_config.py, axolotl/utils/schemas of 2026-07, llamafactory/hparams.
"""

import math
from collections.abc import Mapping
from typing import Any

from fullshard.convert.datasets import convert_datasets
from fullshard.convert.deepspeed import convert_offload, require_valid_zero_stage
from fullshard.convert.groups import convert_groups
from fullshard.convert.rules import (
    AUTO,
    ConversionState,
    apply_rules,
    convert_betas,
    is_true_yes_on,
    last_dotted_part_lower,
    list_exact_keys,
    load_rules,
    load_table,
    parse_number,
    parse_positive_integer,
)
from fullshard.errors import SpecError

_FSDP, _MESH = "fsdp_config.", "parallelism_config."
# In the order of their numbers in FSDP1's ShardingStrategy, which begin at 1.
_SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_STRATEGIES = {
    **{str(number): name for number, name in enumerate(_SHARDING_STRATEGIES, start=1)},
    **{name: name for name in _SHARDING_STRATEGIES},
}


def convert_accelerate(state: ConversionState) -> None:
    """Records a verdict on every key of an Accelerate config."""
    kind = "no" if state.get("distributed_type") is False else str(state.get("distributed_type")).lower()
    # Accelerate reads the section of its type alone.
    sections = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed", "megatron_lm_config": "megatron_lm"}
    others = {section for section, owner in sections.items() if kind not in ("none", AUTO, owner)}
    unread = {key: value for key, value in state.leaves.items() if key.partition(".")[0] in others}
    state.leaves = {key: value for key, value in state.leaves.items() if key not in unread}
    _convert_keys_accelerate_reads(state, kind)
    state.leaves |= unread
    for key in unread:
        state.record_not_needed(key, f"not read with distributed_type {kind.upper()}")


def _convert_keys_accelerate_reads(state: ConversionState, kind: str) -> None:
    per_node = _convert_rank_count_and_return_ranks_per_node(state)
    require_valid_zero_stage(state, "deepspeed_config.zero_stage")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    _, micro, steps = (state.checked_positive_integer(f"deepspeed_config.{name}") for name in names)
    _convert_distributed_type(state, kind)
    found = {key.removeprefix(_MESH).removeprefix("parallelism_config_"): key for key in state.leaves}
    _convert_replicas(state, [found.get(f"{name}_size", "") for name in ("dp_replicate", "dp_shard", "cp")])
    convert_fsdp(state, by_default=kind == "fsdp", ranks_per_node=per_node)
    rules = load_rules("accelerate")
    apply_rules(state, {key: rules[key] for key in ("deepspeed_config.zero_stage",)})
    optimizer, params = (f"deepspeed_config.offload_{part}_device" for part in ("optimizer", "param"))
    convert_offload(state, optimizer=optimizer, params=params)
    apply_rules(state, rules)
    if micro is not None:
        degrees = ("sharding.tensor_parallel", "sharding.context_parallel")
        shared = math.prod(state.settings.get(one, 1) for one in degrees)
        state.infer_global_batch(micro * (steps or 1), origin=" × ".join(names[1:]), model_parallel=shared)
    if "deepspeed_config.deepspeed_config_file" not in state.leaves:
        if kind == "deepspeed":
            state.set_default_of_other_tool("sharding.strategy", "shard_grad_op", why="Accelerate's default")
        if state.get("mixed_precision") is None:
            why = "Accelerate computes in fp32, unless the program asks for another dtype"
            state.set_default_of_other_tool("precision.mode", "fp32", why=why)
    state.record_unknown_keys(list_exact_keys(rules))


def convert_fsdp(state: ConversionState, *, by_default: bool, ranks_per_node: int | None = None) -> None:
    """Converts `fsdp_config` of Accelerate, which transformers' Trainer has too.

    by_default: whether FSDP is used even if no key sets a strategy; the strategy is then full_shard
    """
    # `fsdp_config.fsdp_offload_params` -> `fsdp_config.offload_params`, as in older files.
    longer = [key for key in state.leaves if key.startswith(f"{_FSDP}fsdp_")]
    state.rename_keys({key: _FSDP + key.removeprefix(f"{_FSDP}fsdp_") for key in longer})
    keys = {key.removeprefix(_FSDP): key for key in state.leaves if key.startswith(_FSDP)}
    strategy, reshard = keys.get("sharding_strategy", ""), keys.get("reshard_after_forward", "")
    by_trainer = "distributed_type" not in state.leaves
    unset = 1 if strategy in state.leaves or not by_trainer else 2
    if (parse_positive_integer(state.get(keys.get("version", "fsdp_version"))) or unset) == 2:
        _convert_reshard_after_forward(state, reshard)
        state.record_not_needed(strategy, "read with fsdp_version 1 only")
    else:  # of version 1, the Trainer has the strategy in `reshard_after_forward`
        named = reshard if by_trainer and strategy not in state.leaves else strategy
        _convert_strategy(state, named, ranks_per_node=ranks_per_node)
        state.record_not_needed(reshard, "read with fsdp_version 2 only")
    if by_default:
        state.set_default_of_other_tool("sharding.strategy", "full_shard", why="FSDP's default")
    rules = load_rules("accelerate").items()
    apply_rules(state, {name: rule for name, rule in rules if name.startswith(_FSDP)})


def _convert_rank_count_and_return_ranks_per_node(state: ConversionState) -> int | None:
    """Sets `run.ranks` if there is a single machine. Returns the ranks per machine, or None if unknown."""
    ranks = state.checked_positive_integer("num_processes")
    machines = state.checked_positive_integer("num_machines") or 1
    if ranks is None:
        return None
    if state.ranks not in (None, ranks):
        raise SpecError("--ranks is not num_processes.", got=f"{state.ranks}, {ranks}", fix="one of them")
    state.ranks = ranks
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
    elif state.get(key) == AUTO:
        state.record_auto_value(key, "sharding.strategy")
    else:
        why = "ranks are sharded with FSDP2; the planner chooses the strategy"
        state.record_unsupported(key, why, misses="sharding.strategy")
    if kind == "multi_cpu":
        state.infer_setting("run.device", "cpu", origin=key)


def _convert_replicas(state: ConversionState, keys: list[str]) -> bool:
    """Sets hybrid_shard or no_shard if there are replicas, and returns whether there are.

    keys: keys of the numbers of replicas, of ranks that share parameters, and of ranks that share sequences,
        over which parameters are sharded too
    """
    replicas, *sharded = (parse_positive_integer(state.get(key)) or 1 for key in keys)
    degree = math.prod(sharded)
    if replicas > 1:
        strategy = "hybrid_shard" if degree > 1 else "no_shard"
        state.record_setting(keys[0], "sharding.strategy", value=strategy, why="ranks / shard_degree")
        if degree > 1:
            state.record_setting(keys[1], "sharding.shard_degree", value=degree)
    return replicas > 1


def _convert_strategy(state: ConversionState, key: str, *, ranks_per_node: int | None) -> None:
    value = state.get(key)
    strategy = None if value is None else _STRATEGIES.get(last_dotted_part_lower(value))
    if value is None:
        state.record_not_needed(key, "unset: the planner chooses, or full_shard")
    elif strategy is None:
        known = ", ".join(_SHARDING_STRATEGIES)
        state.record_unsupported(key, f"sharding.strategy: {known}", misses="sharding.strategy")
    else:
        state.record_setting(key, "sharding.strategy", value=strategy)
        if strategy.startswith("hybrid") and "sharding.shard_degree" not in state.settings:
            if ranks_per_node is None:
                state.decisions.append(
                    f"sharding.shard_degree, the ranks of a node: {strategy} shards within a node and "
                    "replicates over nodes; left out, the planner chooses"
                )
            else:
                state.infer_setting("sharding.shard_degree", ranks_per_node, origin="the ranks of a node")


def _convert_reshard_after_forward(state: ConversionState, key: str) -> None:
    """Converts FSDP2's `reshard_after_forward`: true or a number is full_shard, false is shard_grad_op."""
    value = state.get(key)
    if key not in state.leaves:
        return
    degree = None if isinstance(value, bool) else parse_positive_integer(value)
    if degree is not None and degree > 1:
        why = 'kept over fewer ranks after forward: sharding.strategy = "hybrid_shard" gathers within a node'
        state.record_unsupported(key, why)
        state.infer_setting("sharding.strategy", "full_shard", origin=key)
        return
    flags = {"true": "full_shard", "none": "full_shard", "false": "shard_grad_op"}
    strategy = flags.get(str(value).lower())
    if strategy is None:
        why = "sharding.strategy: true (full_shard) or false (shard_grad_op)"
        state.record_unsupported(key, why, misses="sharding.strategy")
        return
    if state.settings.get("sharding.strategy") == "hybrid_shard":  # set by a two-axis mesh
        strategy = "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
        state.settings["sharding.strategy"] = strategy
    why = "unset: all units but the root; here the root too" if value is None else ""
    state.record_setting(key, "sharding.strategy", value=strategy, why=why)


# Keys of which one suffices to recognise the tool that the Trainer's arguments belong to.
_LLAMA_FACTORY = {"stage", "finetuning_type", "template", "cutoff_len", "neat_packing"}
_TRL = {"packing", "max_length", "max_seq_length", "use_peft", "dataset_text_field", "completion_only_loss"}
# Degrees of ranks that share each sequence or its matmuls.
_MODEL_PARALLEL = (
    "tensor_parallel_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
# Plugins of axolotl that compute the same in another way, or only report.
_PLUGINS_OF_SAME_RESULT = ("liger", "cut_cross_entropy", "swanlab", "lm_eval")
_WANDB = ("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "wandb_mode")
_PRECISIONS = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}


def convert_trainer(state: ConversionState) -> None:
    """Records a verdict on every argument of transformers' Trainer, or of a program with its arguments."""
    state.rename_keys(load_table("trainer", "other_names"))
    tool = "trl" if _has_any_key_in(state, _TRL) else "trainer"
    tool = "llama_factory" if _has_any_key_in(state, _LLAMA_FACTORY) else tool
    _convert_arguments(state, tool=tool, epochs=3, microbatch=8)


def convert_axolotl(state: ConversionState) -> None:
    """Records a verdict on every key of an axolotl config."""
    state.rename_keys(load_table("trainer", "other_names"))
    _convert_arguments(state, tool="axolotl", epochs=1, microbatch=1)


def _convert_arguments(state: ConversionState, *, tool: str, epochs: float, microbatch: int) -> None:
    """Records a verdict on every key. `epochs` and `microbatch` are the defaults of the tool."""
    defaults = load_table("trainer", "defaults") | load_table("trainer", "defaults_of")[tool]
    state.checked_positive_integer("max_length")
    epochs = parse_number(state.get("num_train_epochs")) or epochs
    if state.checked_positive_integer("max_steps", unset=(-1, 0)):
        state.record_not_needed("num_train_epochs", "max_steps says the duration")
        epochs = epochs if tool == "axolotl" else 0
    else:
        defaults["train.epochs"] = epochs
    _convert_warmup(state, default_share=0.03 if tool == "axolotl" else 0)
    _convert_intervals(state, epochs=epochs)
    if state.get("wandb_project") and state.get("wandb_mode") != "disabled":
        state.record_setting("wandb_project", "log.trackers", value=["wandb"])
        variables = " ".join(f"{key.upper()}={state.get(key)}" for key in _WANDB if state.get(key))
        state.notes.append(f"wandb reads these from the environment: {variables}")
    model = state.get("model_name_or_path")
    if isinstance(model, str):
        state.record_setting("model_name_or_path", "model.hf", value=model)
        if is_true_yes_on(state.get("reinit_weights")):
            state.record_setting("reinit_weights", "model.weights", value="none")
        _convert_model_overrides(state)
    _record_other_objectives(state)
    convert_datasets(state)
    _convert_batch_sizes(state, default=microbatch)
    _convert_trainer_strategy(state)
    _convert_precision(state)
    _convert_packing(state)
    _convert_offloaded_activations(state)
    defaults = defaults | _convert_adapter(state)
    convert_betas(state, ("adam_beta1", "adam_beta2"), default=(0.9, 0.999))
    convert_groups(state, tool=tool, default_rate=defaults["optimizer.learning_rate"])
    rules = load_rules("trainer")
    if state.get("use_muon") is True:
        state.record_not_needed("optim", "use_muon replaces it")
    apply_rules(state, rules)
    if state.settings.get("optimizer.name") == "muon":
        state.notes.append(
            "optimizer.muon.scale: rms, which takes rates of AdamW; with another factor, rates differ"
        )
    why = "the trainer's default, which the file leaves as it is"
    for target, value in defaults.items():
        state.set_default_of_other_tool(target, value, why=why)
    state.record_unknown_keys([*list_exact_keys(rules), *load_table("trainer", "other_names")])


def _convert_adapter(state: ConversionState) -> Mapping[str, Any]:
    """Records the verdict on LoRA, or on settings without effect. Returns defaults of its own."""
    kind = str(state.get("adapter")).lower()
    if kind in ("lora", "qlora", "true"):
        named = state.original_names.get("adapter")
        rank = parse_positive_integer(state.get("lora_r")) or (16 if named == "use_peft" else 8)
        state.record_setting("adapter", "adapter.rank", value=rank, why="LoRA")
        lora = {
            "use_peft": load_table("trainer", "trl_lora"),
            "finetuning_type": {"adapter.alpha": 2.0 * rank},  # LLaMA-Factory's alpha is twice its rank
        }
        return lora.get(named or "", {}) | ({"adapter.base_dtype": "nf4"} if kind == "qlora" else {})
    for key in [k for k in state.leaves if k.startswith(("lora_", "peft_", "use_dora", "use_rslora"))]:
        state.record_not_needed(key, "without an adapter")
    for key in filter(state.get, ("load_in_4bit", "load_in_8bit", "quantization_bit")):
        state.record_unsupported(key, "only below adapters: adapter.rank", misses="adapter.base_dtype")
    return {}


def _record_other_objectives(state: ConversionState) -> None:
    """Records a head or plugins with another loss, and LLaMA-Factory's mask, which it has by default."""
    if "Classification" in str(state.get("model_type")):
        state.record_unsupported("model_type", "model.architecture", misses="model.architecture")
    plugins = str(state.get("plugins") or "liger").split(",")
    if not all(any(known in plugin for known in _PLUGINS_OF_SAME_RESULT) for plugin in plugins):
        state.record_unsupported("plugins", "they may change what is trained", misses="train.loss")
    is_tuning = state.get("stage") in (None, "sft") and state.get("train_on_prompt") is None
    if is_tuning and _has_any_key_in(state, _LLAMA_FACTORY):
        why = "trains on answers alone, by default: data.train_on, of data.records = messages or completion"
        state.record_unsupported("dataset", why, misses="data.train_on")


def _convert_intervals(state: ConversionState, *, epochs: float) -> None:
    """Sets how often a run is validated and saved: times per epoch, or strategies. 0 `epochs` are unknown."""
    for target, steps, per_epoch, strategies in (
        ("train.validate_every", "eval_steps", "evals_per_epoch", ("eval_strategy", "evaluation_strategy")),
        ("checkpoint.every", "save_steps", "saves_per_epoch", ("save_strategy",)),
    ):
        times = {key: 1.0 for key in strategies if state.get(key) == "epoch" and epochs}
        times |= {key: 0.0 for key in strategies if state.get(key) in ("no", False)}
        times |= {per_epoch: count} if (count := parse_number(state.get(per_epoch))) is not None else {}
        for key, count in times.items():
            value = 1 / (count * epochs) if count * epochs > 1 else 0
            why = "a fraction of the steps" if value else "after the last step alone"
            state.record_setting(key, target, value=value, why=why)
            state.record_not_needed(steps, f"{key} says how often")


def _convert_model_overrides(state: ConversionState) -> None:
    """Sets `model.options`, which are put over the model's config.json, from axolotl's overrides of it."""
    for key in state.leaves:
        section, _, option = key.partition(".")
        if section == "overrides_of_model_config" and option and state.get(key) is not None:
            state.record_setting(key, f"model.options.{option}", value=state.get(key))


def _has_any_key_in(state: ConversionState, names: set[str]) -> bool:
    return any(state.original_names.get(key, key) in names for key in state.leaves)


def _convert_packing(state: ConversionState) -> None:
    """Sets the packing, and whether packed documents see each other, which LLaMA-Factory's do by default."""
    neat, strategy = is_true_yes_on(state.get("neat_packing")), "packing_strategy"
    pretrains = state.get("stage") == "pt"
    value = state.get("packing")
    if not (is_true_yes_on(value) or neat or (pretrains and value is None)):
        return
    joined = pretrains or state.get(strategy) == "wrapped"
    for key in ("packing", "neat_packing", strategy):
        state.record_setting(key, "data.packing", value="concat" if joined else "best_fit")
    if neat or not (joined or _has_any_key_in(state, _LLAMA_FACTORY)):
        state.infer_setting("data.document_mask", True, origin="packed documents do not see each other")


def _convert_offloaded_activations(state: ConversionState) -> None:
    """Sets where activations wait: recomputed blocks keep their inputs alone, others all that they save."""
    kind, offload = "gradient_checkpointing", "activation_offloading"
    value = last_dotted_part_lower(state.get(kind))
    if value in ("offload", "offload_disk", "unsloth"):
        why = "inputs of blocks wait in host memory: recompute.inputs"
        state.record_setting(kind, "recompute.mode", value="full", why=why)
        state.infer_setting("recompute.inputs", "host", origin=kind)
    elif str(state.get(offload)).lower() in ("true", "legacy", "disk"):
        recomputes = value == "true"
        target = ("recompute.inputs", "host") if recomputes else ("recompute.mode", "offload")
        state.record_setting(offload, target[0], value=target[1], why="in host memory")
        if not recomputes:
            state.record_not_needed(kind, "this mode repeats no computation")


def _convert_batch_sizes(state: ConversionState, *, default: int) -> None:
    key, steps_key = "per_device_train_batch_size", "gradient_accumulation_steps"
    each, steps = state.checked_positive_integer(key), state.checked_positive_integer(steps_key)
    if each and not steps and state.original_names.get(key) == "micro_batch_size":  # axolotl's
        steps = (state.checked_positive_integer("batch_size") or each) // each
        state.record_not_needed("batch_size", "one rank's: micro_batch_size × accumulation steps")
    if each:
        state.record_setting(key, "train.microbatch", value=each, why="sequences per rank and microbatch")
    sequences = (each or default) * (steps or 1)
    shared = math.prod(parse_positive_integer(state.get(one)) or 1 for one in _MODEL_PARALLEL)
    state.infer_global_batch(sequences, origin=f"{key} × {steps_key}", model_parallel=shared)


def _convert_trainer_strategy(state: ConversionState) -> None:
    has_replicas = _convert_replicas(state, ["dp_replicate_size", "dp_shard_size", "context_parallel_size"])
    value: Any = state.get("fsdp")
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
    named = next((word for word in words.lower().split() if word in _SHARDING_STRATEGIES), None)
    section = any(key.startswith("fsdp_config.") for key in state.leaves)
    if "offload" in words.lower().split():
        state.infer_setting("offload.tier", "params+optimizer:cpu", origin="fsdp")
    # Of FSDP2, fsdp_config has the strategy, whatever `fsdp` says.
    if not has_replicas:
        convert_fsdp(state, by_default=(section or is_true_yes_on(value)) and named is None)
    if named is not None and "sharding.strategy" not in state.settings:
        state.record_setting("fsdp", "sharding.strategy", value=named)
    elif named is not None or is_true_yes_on(value):
        state.record_not_needed("fsdp", f"{state.origins['sharding.strategy']} says the strategy")


def _convert_precision(state: ConversionState) -> None:
    on = [key for key in _PRECISIONS if is_true_yes_on(state.get(key))]
    full = str(state.get("bf16")).lower() == "full" or is_true_yes_on(state.get("bfloat16"))
    pure = [key for key in ("bf16", "bfloat16", "dtype") if full and key in state.leaves]
    for key in pure:
        state.record_setting(key, "precision.mode", value="bf16_pure", why="without masters in fp32")
    for key in on[:1]:
        state.record_setting(key, "precision.mode", value=_PRECISIONS[key], why="with masters in fp32")
    if not on and not pure and not is_true_yes_on(state.get("float16")) and state.get("bf16") is False:
        state.record_setting("bf16", "precision.mode", value="fp32", why="off")
    for key in _PRECISIONS:
        if state.get(key) == AUTO:
            state.record_auto_value(key, "precision.mode")
        else:
            state.record_not_needed(key, f"{', '.join(pure or on) or 'another key'} says the precision")


def _convert_warmup(state: ConversionState, *, default_share: float) -> None:
    """Sets the warmup: steps, or a fraction of them; by default `default_share` of them, at most 100."""
    own, ratio = (parse_number(state.get(key)) for key in ("warmup_steps", "warmup_ratio"))
    steps = parse_positive_integer(state.get("max_steps"))
    kind = str(state.get("lr_scheduler_type") or "cosine").lower()
    if not kind.startswith("cosine"):
        state.record_not_needed("cosine_min_lr_ratio", f"axolotl reads it for cosine alone, not {kind}")
    if kind == "constant":
        for key in ("warmup_ratio", "warmup_steps"):
            state.record_not_needed(key, "constant has no warmup")
        state.infer_setting("schedule.warmup_steps", 0, origin="constant has no warmup")
    elif own or ratio:
        key, other = ("warmup_ratio", "warmup_steps") if own else ("warmup_steps", "warmup_ratio")
        state.record_not_needed(key, f"{other} counts")
    elif own is None and ratio is None:
        share = min(int(default_share * steps), 100) if steps else default_share
        why = "the trainer's default" + (", of at most 100 steps" if share else "")
        state.set_default_of_other_tool("schedule.warmup_steps", share, why=why)

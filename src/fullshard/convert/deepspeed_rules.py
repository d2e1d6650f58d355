"""The meaning of single keys of DeepSpeed's JSON. Keys that act together are read in `deepspeed`."""

from fullshard.convert.rules import (
    NotNeeded,
    Rule,
    Section,
    Sets,
    Unsupported,
    each,
    is_on,
    number,
    pair,
    positive,
    whole,
)
from fullshard.convert.words import TENSOR_PARALLEL

_BUCKETS = NotNeeded("a unit is one collective: sharding.units says which modules are one")
_STATES = NotNeeded("each unit is gathered when it is needed and freed after; sharding.units sets how large")
_BUFFERS = NotNeeded("buffers of an offload tier: offload.group_parameters")
_QUANTIZED = Unsupported(
    "collectives carry bf16 or fp32: precision.mode; sharding.reshard_to keeps them in a node"
)
_REPORT = NotNeeded("every run ends with a table of where bytes and seconds go")
_IN_RUN = NotNeeded("trackers write into run.dir")
_SAVED = NotNeeded("checkpoints are sharded, and any ranks in any strategy load them")

_OFFLOAD_KEYS = (
    "nvme_path pin_memory buffer_count buffer_size max_in_cpu fast_init ratio pipeline_read pipeline_write "
    "pipeline super_offload cpuadam_cores_perc"
)
_RECOMPUTED = NotNeeded("whether blocks are computed again is recompute.mode, or the planner's choice")
_IN_WANDB = NotNeeded("wandb reads WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP")
_IN_METRICS = NotNeeded("every step is a line of metrics.jsonl in run.dir")
_AIO = NotNeeded("for NVMe tiers, whose I/O has no settings here")

ZERO: dict[str, Rule] = {
    "overlap_comm": Sets("prefetch.mode", lambda on: "implicit" if is_on(on) else "none"),
    "contiguous_gradients": NotNeeded("the gradients of a unit are reduced from one buffer, always"),
    "reduce_scatter": NotNeeded("always so"),
    "allgather_partitions": NotNeeded("always so"),
    "use_multi_rank_bucket_allreduce": _BUCKETS,
    "reduce_bucket_size": _BUCKETS,
    "allgather_bucket_size": _BUCKETS,
    "*prefetch_bucket_size": NotNeeded("prefetch goes by unit: prefetch.forward, prefetch.backward"),
    "*param_persistence_threshold": NotNeeded(
        "small parameters are gathered with their block's, in one call"
    ),
    "*model_persistence_threshold": NotNeeded(
        "small parameters are gathered with their block's, in one call"
    ),
    "*max_live_parameters": _STATES,
    "*max_reuse_distance": _STATES,
    "*module_granularity_threshold": _STATES,
    "*use_all_reduce_for_fetch_params": _STATES,
    "*allgather_sequential": _STATES,
    "*partition_stream_chunk_size": NotNeeded("parameters are made shard by shard"),
    "*gather_16bit_weights_on_model_save": Sets("checkpoint.export", is_on),
    "*gather_fp16_weights_on_model_save": Sets("checkpoint.export", is_on),
    "sub_group_size": _BUFFERS,
    "round_robin_gradients": NotNeeded("for gradients that are copied to the host: there are none"),
    "ignore_unused_parameters": NotNeeded("a parameter without a gradient is left as it is"),
    "load_from_fp32_weights": NotNeeded("shards are fp32 in every mode but bf16_pure"),
    "elastic_checkpoint": _SAVED,
    "pipeline_loading_checkpoint": _SAVED,
    "legacy_stage1": NotNeeded('sharding.strategy = "zero1" is one thing'),
    "memory_efficient_linear": NotNeeded(
        "autograd saves what it needs; recompute.mode decides what it does not"
    ),
    "override_module_apply": NotNeeded("modules are initialised shard by shard"),
    "log_trace_cache_warnings": _REPORT,
    "enable_sanity_checks": NotNeeded("ranks compare a fingerprint of each step: survival.fingerprint"),
    "zero_hpz_partition_size": Unsupported("sharding.reshard_to, with stage 3", (0, 1)),
    "zero_quantized_weights": _QUANTIZED,
    "zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_quantized_gradients": _QUANTIZED,
    "zeropp_loco_param*": _QUANTIZED,
    "mics_shard_size": Unsupported('sharding.strategy = "hybrid_shard", with stage 3', (-1, 0)),
    "mics_hierarchical_params_gather": Unsupported("the collectives are the library's own"),
    "leaf_module*": Unsupported("sharding.units.names: the paths of the modules that are one unit each"),
    "zenflow*": Unsupported("updates are exact: each step waits for its own"),
    "save_muon_momentum_buffer_in_memory": _BUFFERS,
    "cpu_offload": Unsupported(
        'fullshard plan run.toml --set offload.tier="optimizer:cpu" says what it would take'
    ),
    "cpu_offload_param": Unsupported('offload.tier = "params+optimizer:cpu"'),
    "cpu_offload_use_pin_memory": _BUFFERS,
    "offload_optimizer.device": Unsupported("offload.tier: none, cpu or nvme"),
    "offload_param.device": Unsupported("offload.tier: none, cpu or nvme"),
    "offload_optimizer": Unsupported("offload.tier", (None,)),
    "offload_param": Unsupported("offload.tier", (None,)),
    **each("offload_optimizer", _OFFLOAD_KEYS, rule=_BUFFERS),
    **each("offload_param", _OFFLOAD_KEYS, rule=_BUFFERS),
}

_OPTIMIZER: dict[str, Rule] = {
    "lr": Sets("optimizer.learning_rate", number),
    "betas": Sets("optimizer.betas", pair, instead="optimizer.betas: two numbers from 0 to below 1"),
    "eps": Sets("optimizer.eps", number),
    "weight_decay": Sets(
        "optimizer.weight_decay", number, why="of matrices; norms and biases have none here"
    ),
    "momentum": Sets("optimizer.momentum", number),
    "nesterov": Sets("optimizer.options", lambda on: {"nesterov": True} if is_on(on) else {}),
    "bias_correction": Unsupported("always corrected: dividing by 1 - beta^step is part of Adam", (True,)),
    "amsgrad": Unsupported("optimizer.options = {amsgrad = true}"),
    "torch_adam": NotNeeded("torch's own, fused"),
    "fused": NotNeeded("torch's own, fused"),
    "adam_w_mode": NotNeeded("decoupled weight decay is what adamw is"),
    "fp32_optimizer_states": NotNeeded('always so, but in precision.mode = "bf16_pure"'),
    "*": Unsupported("optimizer.options are the keywords of the class that optimizer.name names", ()),
}

_SCHEDULER: dict[str, Rule] = {
    "warmup_min_lr": NotNeeded("left open there; warmup begins at the peak / warmup_steps"),
    "warmup_max_lr": NotNeeded("left open there; optimizer.learning_rate is the peak"),
    "warmup_num_steps": Sets("schedule.warmup_steps", whole),
    "total_num_steps": Sets("train.steps", positive),
    "warmup_type": Unsupported("warmup is linear", ("linear",)),
    "cos_min_ratio": Sets("schedule.final_ratio", number),
    "warmup_min_ratio": Unsupported("warmup begins at the peak / warmup_steps", (0, 0.0)),
    "last_batch_iteration": NotNeeded("the rate is a function of the step, which a checkpoint holds"),
}

_FP16: dict[str, Rule] = {
    "initial_scale_power": Sets("precision.initial_loss_scale", lambda power: _power_of_two(power)),
    "loss_scale_window": Sets("precision.loss_scale_window", positive),
    "loss_scale": Unsupported("the scale is dynamic; it begins at precision.initial_loss_scale", (0, 0.0)),
    "hysteresis": NotNeeded("the scale is halved at the first step that is not finite, which is left out"),
    "consecutive_hysteresis": NotNeeded("the scale is halved at the first step that is not finite"),
    "min_loss_scale": NotNeeded("a run stops after train.max_skipped_steps steps in a row"),
    "auto_cast": NotNeeded("inputs are cast: precision.cast_inputs"),
    "fp16_master_weights_and_gradients": Unsupported("shards are fp32 with fp16"),
    "fp16_master_weights_and_grads": Unsupported("shards are fp32 with fp16"),
}

_ELSEWHERE: dict[str, Rule] = {
    "gradient_clipping": Sets("optimizer.clip_norm", number),
    "steps_per_print": Sets("log.every", positive),
    "wall_clock_breakdown": _REPORT,
    "memory_breakdown": _REPORT,
    "dump_state": _REPORT,
    "prescale_gradients": NotNeeded("gradients are averaged over the valid tokens of all ranks, in fp32"),
    "gradient_predivide_factor": NotNeeded(
        "gradients are averaged over the valid tokens of all ranks, in fp32"
    ),
    "sparse_gradients": Unsupported("gradients of embeddings are reduced whole"),
    "zero_allow_untested_optimizer": NotNeeded(
        "an optimizer is tried on sharded tensors before the first step"
    ),
    "zero_force_ds_cpu_optimizer": NotNeeded("the update is on the device, fused"),
    "seq_parallel_communication_data_type": Unsupported("sequences are not split over ranks", (None, "fp32")),
    "disable_allgather": Unsupported("parameters are all-gathered"),
    "data_types.grad_accum_dtype": Unsupported("gradients are accumulated in fp32", (None, "fp32")),
    "bf16.bf16_master_weights_and_grads": Unsupported('precision.mode = "bf16_pure" keeps shards in bf16'),
    "bf16.bf16_optimizer_states": Unsupported('precision.mode = "bf16_pure" keeps shards and states in bf16'),
    "bf16.immediate_grad_update": NotNeeded(
        "each unit's gradient is reduced as soon as its backward is done"
    ),
    "bf16.check_grad_overflow": NotNeeded("a step whose loss or norm is not finite is left out, always"),
    "bf16.auto_cast": NotNeeded("inputs are cast: precision.cast_inputs"),
    "bf16.initial_scale_power": NotNeeded("bf16 needs no loss scale"),
    "bf16.loss_scale*": NotNeeded("bf16 needs no loss scale"),
    "amp.*": Section("NVIDIA's apex is not used: precision.mode"),
    "torch_autocast.*": Section('precision.mode = "bf16" or "fp16" casts whole modules, without autocast'),
    "activation_checkpointing.partition_activations": Unsupported("recompute.mode saves memory on each rank"),
    "activation_checkpointing.cpu_checkpointing": Unsupported(
        'recompute\'s inputs stay; recompute.mode = "offload" moves all that is saved'
    ),
    "activation_checkpointing.number_checkpoints": Unsupported(
        'recompute.mode = "every", every = k', (None, 0)
    ),
    **each(
        "activation_checkpointing",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        rule=_RECOMPUTED,
    ),
    "tensorboard.enabled": Unsupported('log.trackers = ["tensorboard"]'),
    **each("tensorboard", "output_path job_name", rule=_IN_RUN),
    "wandb.enabled": Unsupported('log.trackers = ["wandb"]'),
    **each("wandb", "group team project job_name", rule=_IN_WANDB),
    **each("csv_monitor", "enabled output_path job_name", rule=_IN_METRICS),
    "comet.*": Section("log.trackers: tensorboard, wandb, mlflow"),
    **each(
        "flops_profiler",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        rule=_REPORT,
    ),
    **each("comms_logger", "enabled verbose prof_all prof_ops debug", rule=_REPORT),
    "autotuning.*": NotNeeded("fullshard plan finds the fastest settings that fit, without running them"),
    **each(
        "aio",
        "block_size queue_depth thread_count single_submit overlap_events intra_op_parallelism use_gds",
        rule=_AIO,
    ),
    "checkpoint.use_node_local_storage": Sets(
        "checkpoint.disks", lambda on: "node" if is_on(on) else "shared"
    ),
    "checkpoint.tag_validation": NotNeeded("ranks agree on a save before it is named"),
    "checkpoint.load_universal": _SAVED,
    "checkpoint.parallel_write.pipeline_stage": NotNeeded("every rank writes its own shards"),
    "checkpoint.writer": NotNeeded('checkpoint.mode = "async" writes in the background'),
    "nebula.*": Section('checkpoint.mode = "async"'),
    "compile.*": Section("run.compile = true compiles block by block"),
    "elasticity.*": Section("docs/restarts.md: torchrun --nnodes 1:4; the global batch stays the same"),
    "tensor_parallel.*": Unsupported(TENSOR_PARALLEL, ()),
    "sequence_parallel_size": Unsupported("sequences are not split over ranks", (None, 1)),
    "pipeline.*": Unsupported("no pipeline: layers are sharded, not placed", ()),
    "data_efficiency.*": Section("all of the data is trained on"),
    "curriculum_learning.*": Section("sequences have one length: data.sequence_length"),
    "progressive_layer_drop.*": Section("every layer runs in every step"),
    "eigenvalue.*": Section("nothing is quantised while it trains"),
    "quantize_training.*": Section("nothing is quantised while it trains"),
    "compression_training.*": Unsupported("nothing is pruned or quantised while it trains", (False, "auto")),
    "sparse_attention.*": Unsupported("attention is the model's own", ()),
    "hybrid_engine.*": Section("there is no inference engine"),
    "dataloader_drop_last": NotNeeded("every step is a whole batch; what is left begins the next epoch"),
    "communication_data_type": NotNeeded("gradients are sent and summed in fp32"),
    "train_batch_size": NotNeeded("left open there: train.global_batch"),
    "train_micro_batch_size_per_gpu": NotNeeded("left open there: train.microbatch, or the planner's choice"),
    "gradient_accumulation_steps": NotNeeded("train.global_batch / (train.microbatch × ranks)"),
}


def _power_of_two(power: object) -> float | None:
    exponent = whole(power)
    return 2.0**exponent if exponent is not None and exponent < 128 else None


RULES: dict[str, Rule] = {
    **{f"zero_optimization.{key}": rule for key, rule in ZERO.items()},
    **{f"optimizer.params.{key}": rule for key, rule in _OPTIMIZER.items()},
    "optimizer.legacy_fusion": NotNeeded("torch's own, fused"),
    **{f"scheduler.params.{key}": rule for key, rule in _SCHEDULER.items()},
    **{f"fp16.{key}": rule for key, rule in _FP16.items()},
    **_ELSEWHERE,
}

"""The meaning of single keys of torchtitan's TOML. Keys that act together are read in `torchtitan`."""

from fullshard.convert.rules import (
    Maps,
    NotNeeded,
    Rule,
    Section,
    Sets,
    Unsupported,
    each,
    number,
    positive,
    whole,
)
from fullshard.convert.words import OFFLOAD_PARAMS, TENSOR_PARALLEL

_FLOAT8 = Unsupported("precision.mode: fp32, bf16, bf16_reduce, fp16 or bf16_pure", (False, None, []))
_PIPELINE = NotNeeded("for pipeline parallelism, of which there is none")
_REPORT = NotNeeded("every run ends with a table of where bytes and seconds go; log.profile_steps")
_IN_RUN = NotNeeded("all that a run leaves is in run.dir")
_DATA = "[data] source and paths say what is trained on"
_SEQUENCES = "sequences are not split over ranks"
_EXPERTS = "experts are sharded like all else, as units of their own: sharding.units.separate_experts"

_PLANNED = NotNeeded("fullshard plan run.toml says what each rank needs")
_HELD_OUT = NotNeeded("data.validation_fraction is held out; train.validate_sequences of it are used")

RULES: dict[str, Rule] = {
    "job.dump_folder": Sets("run.dir"),
    "job.description": NotNeeded("a comment of the file"),
    "job.config_file": NotNeeded("fullshard train run.toml"),
    "job.custom_config_module": Unsupported("a run.toml has the keys that fullshard init writes", ("", None)),
    "job.custom_args_module": Unsupported("a run.toml has the keys that fullshard init writes", ("", None)),
    "job.print_args": NotNeeded("run.dir holds plan.json, which has all settings"),
    "job.print_config": NotNeeded("run.dir holds plan.json, which has all settings"),
    "job.save_config_file": NotNeeded("run.dir holds plan.json, which has all settings"),
    "job.use_for_integration_test": NotNeeded("torchtitan's own tests"),
    **each(
        "profiling",
        "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
        "enable_memory_snapshot save_memory_snapshot_folder",
        rule=_REPORT,
    ),
    "metrics.log_freq": Sets("log.every", positive),
    "metrics.enable_tensorboard": Unsupported('log.trackers = ["tensorboard"]'),
    "metrics.enable_wandb": Unsupported('log.trackers = ["wandb"]'),
    "metrics.disable_color_printing": NotNeeded("colours are for terminals alone"),
    "metrics.save_tb_folder": _IN_RUN,
    "metrics.save_for_all_ranks": NotNeeded("figures are over all ranks"),
    "metrics.rank_0_only": NotNeeded("figures are over all ranks"),
    "model.tokenizer_path": Unsupported(_DATA, ()),
    "model.hf_assets_path": Unsupported(
        '[model] hf = "<directory>" takes its config, weights and tokenizer', ()
    ),
    "model.converters": Unsupported("precision.mode: fp32, bf16, bf16_reduce, fp16 or bf16_pure", ([],)),
    "model.print_after_conversion": NotNeeded("fs.sharding_table(model) prints what each rank holds"),
    "model.norm_type": Unsupported("the model's own", ("rmsnorm",)),
    "optimizer.name": Unsupported(
        "optimizer.name: adamw, sgd, or the dotted name of a torch.optim.Optimizer", ()
    ),
    "optimizer.lr": Sets("optimizer.learning_rate", number),
    "optimizer.eps": Sets("optimizer.eps", number),
    "optimizer.weight_decay": Sets(
        "optimizer.weight_decay", number, why="of matrices; norms and biases have none here"
    ),
    "optimizer.implementation": NotNeeded("fused where the class and the device allow it"),
    "optimizer.fused": NotNeeded("fused where the class and the device allow it"),
    "optimizer.early_step_in_backward": Unsupported(
        "optimizer.in_backward = true, with optimizer.clip_norm = 0"
    ),
    "lr_scheduler.warmup_steps": Sets("schedule.warmup_steps", whole),
    "lr_scheduler.lr_min": Sets("schedule.final_ratio", number),
    "lr_scheduler.min_lr_factor": Sets("schedule.final_ratio", number),
    "lr_scheduler.total_steps": Unsupported("the schedule is over train.steps", (None,)),
    "lr_scheduler.decay_ratio": NotNeeded("decay begins after the warmup: schedule.kind"),
    "lr_scheduler.decay_type": NotNeeded("schedule.kind"),
    "training.dataset": Unsupported(_DATA, ()),
    "training.dataset_path": Unsupported(_DATA, (None, "")),
    "training.batch_size": NotNeeded("train.microbatch"),
    "training.local_batch_size": NotNeeded("train.microbatch"),
    "training.global_batch_size": NotNeeded("train.global_batch"),
    "training.seq_len": Sets("data.sequence_length", positive),
    "training.max_norm": Sets("optimizer.clip_norm", number),
    "training.steps": Sets("train.steps", positive),
    "training.warmup_steps": Sets("schedule.warmup_steps", whole),
    "training.enable_cpu_offload": Unsupported(OFFLOAD_PARAMS),
    "training.dtype": Unsupported("shards are fp32 in every mode but bf16_pure", ("float32", None)),
    "training.gc_freq": NotNeeded("nothing in a step makes cycles that grow"),
    "training.gc_debug": NotNeeded("nothing in a step makes cycles that grow"),
    "training.seed": Sets("run.seed", whole),
    "training.deterministic": Unsupported(
        "the same ranks give the same bits on the CPU; kernels of CUDA are as torch has them"
    ),
    "debug.seed": Sets("run.seed", whole),
    "debug.deterministic": Unsupported("kernels of CUDA are as torch has them"),
    "parallelism.enable_compiled_autograd": Unsupported("backward runs as autograd has it"),
    "parallelism.tensor_parallel_degree": Unsupported(TENSOR_PARALLEL, (1,)),
    "parallelism.disable_loss_parallel": NotNeeded("for tensor parallelism"),
    "parallelism.enable_async_tensor_parallel": Unsupported(TENSOR_PARALLEL),
    "parallelism.pipeline_parallel_degree": Unsupported("no pipeline: layers are sharded, not placed", (1,)),
    "parallelism.pipeline_parallel_*": _PIPELINE,
    "parallelism.module_fqns_per_model_part": _PIPELINE,
    "parallelism.context_parallel_degree": Unsupported(_SEQUENCES, (1,)),
    "parallelism.context_parallel_rotate_method": NotNeeded(_SEQUENCES),
    "parallelism.expert_parallel_degree": Unsupported(_EXPERTS, (1,)),
    "parallelism.expert_tensor_parallel_degree": Unsupported(_EXPERTS, (1,)),
    "checkpoint.enable": NotNeeded("checkpoint.every"),
    "checkpoint.enable_checkpoint": NotNeeded("checkpoint.every"),
    "checkpoint.folder": _IN_RUN,
    "checkpoint.interval": Sets("checkpoint.every", positive),
    "checkpoint.interval_type": Unsupported("checkpoint.every counts steps", ("steps",)),
    "checkpoint.initial_load_path": Unsupported(
        "checkpoint.dir with --resume; or [model] hf, with weights", (None, "")
    ),
    "checkpoint.initial_load_model_only": NotNeeded("for initial_load_path"),
    "checkpoint.initial_load_in_hf": Unsupported('[model] hf = "<directory>" reads its weights'),
    "checkpoint.last_save_model_only": NotNeeded("every checkpoint is whole; export adds the model alone"),
    "checkpoint.model_weights_only": NotNeeded("every checkpoint is whole; export adds the model alone"),
    "checkpoint.export_dtype": Unsupported(
        "fullshard ckpt export writes the dtype of the shards", ("float32",)
    ),
    "checkpoint.last_save_in_hf": Sets("checkpoint.export", bool),
    "checkpoint.create_seed_checkpoint": NotNeeded("parameters depend on run.seed alone, not on the ranks"),
    "checkpoint.async_mode": Maps(
        "checkpoint.mode",
        {"disabled": "sync", "async": "async", "async_with_pinned_mem": "async"},
        instead="checkpoint.mode: sync or async",
    ),
    "checkpoint.keep_latest_k": Sets("checkpoint.keep", whole),
    "checkpoint.load_step": Unsupported("--resume takes the newest", (-1,)),
    "checkpoint.exclude_from_loading": Unsupported("a checkpoint is loaded whole", ([], None)),
    "checkpoint.enable_first_step_checkpoint": NotNeeded(
        "a save is tried when it is due, and reported if it fails"
    ),
    "activation_checkpoint.mode": NotNeeded("recompute.mode"),
    "activation_checkpoint.selective_ac_option": NotNeeded("recompute.every, recompute.save_matmuls"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Unsupported(
        "recompute.save_matmuls: every k-th matmul of a block", ([],)
    ),
    "activation_checkpoint.early_stop": NotNeeded("torch's own choice"),
    "activation_checkpoint.memory_budget": Unsupported(
        "the planner chooses what fits: recompute.mode", (None, 0.5)
    ),
    "compile.enable": NotNeeded("run.compile"),
    "compile.components": NotNeeded("the blocks; run.compile"),
    "compile.backend": Unsupported("torch.compile's own backend", ("inductor",)),
    "float8.filter_fqns": NotNeeded("for float8: model.converters"),
    "mx.filter_fqns": NotNeeded("for float8: model.converters"),
    "float8.*": _FLOAT8,
    "quantize.*": _FLOAT8,
    "mx.*": _FLOAT8,
    "comm.init_timeout_seconds": NotNeeded("survival.watchdog_patience: longer until the first step is done"),
    "comm.train_timeout_seconds": Sets("survival.collective_seconds", number),
    "comm.trace_buf_size": NotNeeded("the watchdog names who hangs, with its stack: docs/survival.md"),
    "comm.save_traces_*": NotNeeded("the watchdog names who hangs, with its stack: docs/survival.md"),
    "comm.mode": Unsupported("fullshard plan --exact runs on ranks that are not there", ("default",)),
    **each("memory_estimation", "enabled disable_fake_mode", rule=_PLANNED),
    "fault_tolerance.*": Section("ranks that die are started again: docs/restarts.md", switch="enable"),
    "experimental.custom_import": Unsupported('[model] python = "package.module:factory"', ("", None)),
    "experimental.custom_args_module": Unsupported(
        "a run.toml has the keys that fullshard init writes", ("", None)
    ),
    "experimental.custom_model_path": Unsupported('[model] python = "package.module:factory"', ("", None)),
    "validation.enable*": NotNeeded("train.validate_every"),
    "validation.freq": Sets("train.validate_every", whole),
    **each("validation", "dataset dataset_path local_batch_size seq_len steps", rule=_HELD_OUT),
}

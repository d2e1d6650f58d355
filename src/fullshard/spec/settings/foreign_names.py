"""Names of settings in other trainers and in earlier versions, for the errors that name the right key."""

from typing import Any

# fullshard's key (or an answer that names it) -> the names of transformers, torchtitan, nanoGPT, DeepSpeed, …
_NAMES = {
    "run.dir": "output_dir out_dir save_dir save_path log_dir logdir workdir dump_folder run_name",
    "run.seed": "random_seed manual_seed",
    "run.device": "accelerator",
    "run.ranks": "gpus n_gpus num_gpus n_gpu ngpus world_size nproc nproc_per_node num_processes devices",
    "run.restarts": "max_restarts",
    "run.compile": "torch_compile compile_model use_compile",
    "model.hf": "model_name_or_path model_name model_id model_path base_model pretrained hf_path hf_model",
    "model.vocabulary": "vocab_size n_vocab padded_vocab_size",
    "model.d_model": "n_embd hidden_size dim hidden_dim embed_dim embedding_dim d_hidden",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.d_ff": "intermediate_size ffn_dim ffn_hidden_size mlp_dim",
    "model.max_sequence": "max_position_embeddings",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying",
    "adapter.rank": "lora_r lora_rank lora",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules",
    "data.source and data.paths": (
        "dataset datasets dataset_name dataset_path data_path data_dir data_file data_files train_file"
        " train_files train_data files"
    ),
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_type hf_tokenizer",
    "data.sequence_length": (
        "seq_len seq_length seqlen max_seq_len max_seq_length sequence_len max_length block_size context"
        " context_length context_len ctx_len n_ctx cutoff_len"
    ),
    "data.packing": "sample_packing pack",
    "data.train_on": "train_on_inputs completion_only_loss assistant_only_loss",
    "data.messages_field": "field_messages conversations_field messages_key conversation_column",
    "data.role_field": "message_field_role role_tag message_property_mappings",
    "data.content_field": "message_field_content content_tag",
    "data.chat_template": "chat_template_path chat_template_jinja",
    "data.tokens_field": "input_ids_field token_field",
    "data.validation_fraction": "val_fraction val_split val_set_size validation_split test_size",
    "data.processes": "num_workers num_proc dataset_num_proc preprocessing_num_workers",
    "data.prefetch_steps": "prefetch_factor dataloader_prefetch_factor",
    "train.steps": (
        "max_steps num_steps n_steps total_steps training_steps num_training_steps train_steps max_iters"
        " train_iters iters iterations num_iterations max_train_steps"
    ),
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs total_epochs epoch",
    "train.microbatch, the sequences per rank, or train.global_batch, those of a step over all ranks": (
        "batch_size batchsize bs batch train_batch mini_batch_size minibatch_size"
    ),
    "train.microbatch": (
        "micro_batch_size micro_batch microbatch_size per_device_train_batch_size per_device_batch_size"
        " device_batch_size local_batch_size train_micro_batch_size_per_gpu"
    ),
    "train.global_batch": "global_batch_size train_batch_size total_batch_size global_train_batch_size",
    "train.global_batch, which is train.microbatch × ranks × accumulated microbatches": (
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps grad_accumulation"
        " grad_accumulation_steps accumulate_grad_batches accumulation_steps accumulation num_microbatches"
    ),
    "train.validate_every": "eval_steps eval_every eval_interval eval_freq val_every val_check_interval",
    "train.validate_sequences": "eval_iters eval_batches limit_val_batches max_eval_samples",
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr peak_learning_rate",
    "optimizer.name": "optim optimizer_name optimizer_type optimizer_class",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "optimizer.eps": "adam_epsilon adam_eps epsilon optim_eps",
    "optimizer.weight_decay": "wd decay weightdecay",
    "optimizer.clip_norm": (
        "max_grad_norm max_norm grad_clip grad_norm_clip clip_grad clip_grad_norm gradient_clip"
        " gradient_clipping gradient_clip_val grad_norm"
    ),
    "schedule.kind": "scheduler scheduler_type lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "schedule.warmup_steps, a number of steps": "warmup_ratio warmup_fraction warmup_epochs",
    "schedule.min_lr_ratio, a fraction of optimizer.learning_rate": "min_lr lr_min eta_min final_lr",
    "sharding.strategy": (
        "fsdp_config sharding_strategy zero zero_stage zero_optimization stage dp_strategy parallelism"
        " distributed ddp deepspeed fsdp_sharding_strategy data_parallel"
    ),
    "sharding.shard_degree": (
        "dp_shard dp_shard_size data_parallel_shard_degree dp_replicate dp_replicate_size"
        " data_parallel_replicate_degree hybrid_shard_group_size mics_shard_size"
    ),
    "sharding.tensor_parallel": (
        "tp tp_size tp_degree tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size"
    ),
    "sharding.context_parallel": (
        "cp cp_size cp_degree sp_size context_parallel_size context_parallel_degree sequence_parallel_size"
        " sequence_parallel_degree ulysses_degree ulysses_sequence_parallel_size"
    ),
    "sharding.units": "auto_wrap_policy fsdp_auto_wrap_policy wrap_policy transformer_layer_cls_to_wrap",
    "precision.mode": (
        "dtype torch_dtype param_dtype compute_dtype mixed_precision amp bf16 fp16 fp8 float16 bfloat16 tf32"
    ),
    "recompute.mode": (
        "gradient_checkpointing grad_checkpointing activation_checkpointing activation_checkpoint"
        " checkpoint_activations enable_activation_checkpointing ac remat"
    ),
    "recompute.blocks": "recompute_num_layers recompute_method",
    "offload.tier": (
        "cpu_offload offload_params offload_param offload_optimizer fsdp_offload_params enable_cpu_offload"
    ),
    "checkpoint.dir": "checkpoint_dir ckpt_dir checkpoint_path save_folder",
    "checkpoint.every": (
        "save_steps save_every save_interval save_freq checkpoint_interval checkpoint_every ckpt_interval"
        " checkpointing_steps"
    ),
    "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints",
    "fullshard train --resume": "resume resume_from resume_from_checkpoint auto_resume load_checkpoint",
    "log.every": "logging_steps log_steps log_interval log_every log_freq log_every_n_steps",
    "log.trackers": (
        "report_to logger loggers tracker wandb mlflow tensorboard comet wandb_project use_wandb wandb_log"
        " enable_wandb"
    ),
}
# Key of an earlier version -> (its default, what replaces it).
REMOVED: dict[str, tuple[Any, str]] = {
    "checkpoint.export": (False, "fullshard ckpt export, after the run"),
    "checkpoint.storage": (
        "shared",
        "checkpoint.dir, a directory that all nodes share, or an object store (s3://bucket/run)",
    ),
    "data.attention_mask_field": ("attention_mask", "a column of that name: rename yours"),
    "data.chat_template_kwargs_field": ("chat_template_kwargs", "a column of that name: rename yours"),
    "data.labels_field": ("labels", "a column of that name: rename yours"),
    "data.loss_mask_field": ("loss_mask", "a column of that name: rename yours"),
    "data.tools_field": ("tools", "a column of that name: rename yours"),
    "fault_tolerance.collective_timeout_seconds": (600.0, "fault_tolerance.watchdog_timeout_seconds"),
    "log.sample_tokens": (160, "fullshard ckpt export --format hf, and generate of transformers"),
    "optimizer.momentum": (0.0, "optimizer.options = { momentum = … }"),
    "precision.buffer_dtype": (None, "nothing instead: buffers keep their dtype"),
    "precision.initial_loss_scale": (65536.0, "nothing instead: the scale begins at 65536"),
    "precision.loss_scale_window": (
        2000,
        "nothing instead: the scale doubles after 2000 steps without an overflow",
    ),
    "precision.output_dtype": (None, "train.loss, a function that casts the outputs"),
    "prefetch": (
        {"mode": "implicit", "forward": 1, "backward": 1},
        "nothing instead: FSDP2 gathers one unit ahead",
    ),
    "recompute.every": (None, "recompute.blocks, the number of blocks that recompute"),
    "sharding.context_method": ("gather", "nothing instead: ranks gather keys and values"),
    "sharding.reshard_after_forward": (
        None,
        'sharding.strategy = "hybrid_shard" with sharding.shard_degree = the ranks of a node',
    ),
    "sharding.units.policy": (
        "block",
        "sharding.units.names, or min_parameters, or neither for the repeated blocks",
    ),
}
# Removed settings that never changed numbers: a plan of an earlier version that sets one is used without it.
IGNORED = frozenset({"prefetch", "log.sample_tokens"})
FOREIGN_NAMES = {name: answer for answer, names in _NAMES.items() for name in names.split()}

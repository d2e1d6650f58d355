"""The verdict on single keys: converted to a setting, not needed, or lost."""

import pytest

from fullshard.convert.conversion import convert_config
from fullshard.convert.rules import ConfigFormat, KeyVerdict

FSDP = "distributed_type: FSDP\n"
AXOLOTL = "base_model: a/b\nsequence_len: 512\nadapter: lora\nlora_r: 8\n"
TRAINER = "model_name_or_path: a/b\nnum_train_epochs: 1\nfinetuning_type: lora\n"
LOST, NOT_NEEDED = "lost", "not needed"
# (the config around it, a key and its value) -> what becomes of it: lost, not needed, or the setting.
OUTCOMES = {
    (AXOLOTL, "warmup_ratio: 0.1"): "schedule.warmup_steps=0.1",
    (AXOLOTL + "max_steps: 50\n", "warmup_ratio: 0.1"): "schedule.warmup_steps=5",
    (TRAINER, "warmup_steps: 0.03"): "schedule.warmup_steps=0.03",
    (TRAINER, "warmup_steps: -3"): LOST,
    (AXOLOTL, "warmup_steps: 0"): "schedule.warmup_steps=0",
    (TRAINER + "warmup_steps: 0\n", "warmup_ratio: 0.1"): "schedule.warmup_steps=0.1",
    (TRAINER + "max_steps: 50\n", "eval_strategy: epoch"): "train.validate_every=100",
    (AXOLOTL, "datasets: [{path: a.jsonl, type: chat_template, roles: {user: human}}]"): (
        "data.roles={'human': 'user'}"
    ),
    (AXOLOTL + "num_epochs: 2\n", "evals_per_epoch: 4"): "train.validate_every=0.125",
    (AXOLOTL + "num_epochs: 2\n", "saves_per_epoch: 1"): "checkpoint.every=0.5",
    (AXOLOTL, "saves_per_epoch: 1"): "checkpoint.every=0",
    (TRAINER + "eval_steps: 9\n", "eval_strategy: epoch"): "train.validate_every=0",
    (TRAINER, "save_steps: 0.2"): "checkpoint.every=0.2",
    (AXOLOTL, "wandb_project: a"): "log.trackers=('wandb',)",
    (AXOLOTL, "wandb_project: ''"): "log.trackers=()",
    (AXOLOTL + "wandb_mode: disabled\n", "wandb_project: a"): "log.trackers=()",
    (AXOLOTL, "use_tensorboard: true"): "log.trackers=('tensorboard',)",
    (AXOLOTL, "plugins: [axolotl.integrations.liger.LigerPlugin]"): NOT_NEEDED,
    (AXOLOTL, "plugins: [axolotl.integrations.kd.KDPlugin]"): LOST,
    (AXOLOTL, "kd_alpha: 0.9"): LOST,
    (AXOLOTL, "model_type: AutoModelForSequenceClassification"): LOST,
    (AXOLOTL, "model_type: LlamaForCausalLM"): NOT_NEEDED,
    **{(AXOLOTL, f"rl: {kind}"): LOST for kind in ("dpo", "ipo", "kto", "orpo", "simpo", "grpo")},
    **{(TRAINER, f"stage: {kind}"): LOST for kind in ("dpo", "rm", "ppo", "kto")},
    (TRAINER, "max_prompt_length: 64"): LOST,
    (TRAINER, "lmbda: 0.5"): LOST,
    (TRAINER, "val_size: 0.1"): "data.validation_fraction=0.1",
    (TRAINER, "do_train: true"): "data.validation_fraction=0.0",
    (AXOLOTL, "cosine_constant_lr_ratio: 0.5"): LOST,
    (TRAINER, "lr_scheduler_kwargs: {num_cycles: 2}"): LOST,
    (TRAINER, "lr_scheduler_type: polynomial"): LOST,
    (AXOLOTL, "chat_template: chatml"): LOST,
    (AXOLOTL, "chat_template: tokenizer_default"): NOT_NEEDED,
    (AXOLOTL, "chat_template: tokenizer_default_fallback_chatml"): NOT_NEEDED,
    (AXOLOTL, "chat_template_jinja: '{% for m in messages %}{{ m }}{% endfor %}'"): LOST,
    (TRAINER, "template: qwen"): LOST,
    (AXOLOTL, "overrides_of_model_config: {rope_scaling: {factor: 2.0}}"): (
        "model.options={'rope_scaling': {'factor': 2.0}}"
    ),
    (AXOLOTL, "overrides_of_model_config: {}"): NOT_NEEDED,
    (AXOLOTL, "overrides_of_model_kwargs: {use_cache: true}"): LOST,
    (AXOLOTL, "rope_scaling: {factor: 2.0}"): LOST,
    (AXOLOTL, "excess_length_strategy: truncate"): LOST,
    (AXOLOTL, "min_sample_len: 30"): LOST,
    (AXOLOTL, "shuffle_merged_datasets: false"): LOST,
    (AXOLOTL, "shuffle_merged_datasets: true"): NOT_NEEDED,
    (AXOLOTL, "curriculum_sampling: true"): LOST,
    (AXOLOTL, "special_tokens: {eos_token: <end>}"): LOST,
    (AXOLOTL, "special_tokens: {pad_token: <pad>}"): NOT_NEEDED,
    (AXOLOTL, "revision_of_model: abc"): LOST,
    (AXOLOTL, "tokenizer_config: other/tokenizer"): LOST,
    (AXOLOTL, "s2_attention: true"): LOST,
    (AXOLOTL, "sdp_attention: true"): NOT_NEEDED,
    (AXOLOTL, "peft_use_dora: true"): "adapter.options={'use_dora': True}",
    (AXOLOTL, "peft_init_lora_weights: pissa"): LOST,
    (AXOLOTL, "peft_init_lora_weights: gaussian"): "adapter.options={'init_lora_weights': 'gaussian'}",
    (AXOLOTL, "peft_use_rslora: true"): "adapter.options={'use_rslora': True}",
    (AXOLOTL, "peft_use_rslora: true\npeft_use_dora: true"): (
        "adapter.options={'use_rslora': True, 'use_dora': True}"
    ),
    (AXOLOTL, "bnb_config_kwargs: {bnb_4bit_quant_type: fp4}"): LOST,
    (TRAINER, "use_dora: true"): "adapter.options={'use_dora': True}",
    (AXOLOTL, "early_stopping_patience: 3"): LOST,
    (AXOLOTL, "eval_steps: 0.1"): "train.validate_every=0.1",
    (TRAINER, "group_by_length: true"): LOST,
    (TRAINER, "train_sampling_strategy: sequential"): LOST,
    (TRAINER, "accelerator_config: {split_batches: true}"): LOST,
    (TRAINER, "accelerator_config: {split_batches: false}"): NOT_NEEDED,
    (AXOLOTL, "a_key_of_next_year: 1"): LOST,
    (TRAINER, "a_key_of_next_year: auto"): "run.seed=0",
    (AXOLOTL, "datasets: [{type: completion}]"): NOT_NEEDED,
    (AXOLOTL, "datasets: [{path: a, type: completion}, {path: a, type: alpaca}]"): LOST,
    (AXOLOTL, "datasets: [{path: a, type: {field_output: b}}]"): LOST,
    (AXOLOTL + "train_on_inputs: true\n", "datasets: [{type: alpaca}]"): LOST,
    (AXOLOTL, "datasets: [{path: a.jsonl, type: completion, field: b}]"): "data.text_field=b",
    (AXOLOTL, "datasets: [{path: a.jsonl, type: chat_template}]"): "data.train_on=assistant",
    (AXOLOTL, "datasets: [{path: a/b, split: 'train[:1%]', type: completion}]"): LOST,
    (AXOLOTL, "datasets: [{path: s3://a/b.jsonl, type: completion}]"): LOST,
    (AXOLOTL, "datasets: [{path: a/b, data_files: c.jsonl, type: completion}]"): LOST,
    (AXOLOTL, "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user]}]"): LOST,
    (AXOLOTL + "train_on_inputs: true\n", "datasets: [{path: a.jsonl, type: chat_template}]"): LOST,
    (
        AXOLOTL,
        "datasets: [{path: a.jsonl, type: completion}]\ntest_datasets: [{path: b.txt, type: completion}]",
    ): LOST,
    (AXOLOTL, "datasets: [{path: a, train_on_eos: last}]"): LOST,
    (AXOLOTL, "datasets: [{path: a}]"): LOST,
    (AXOLOTL, "datasets: [{path: a, split: 'train[:1%]'}]"): LOST,
    (AXOLOTL, "datasets: [{split: train}]"): NOT_NEEDED,
    (AXOLOTL, "datasets: [{path: a, a_key_of_next_year: 1}]"): LOST,
    (AXOLOTL, "lr_groups: [{name: a, lr: 0.1}]"): LOST,
    (TRAINER, "dataset: a"): LOST,
    (TRAINER + "stage: pt\n", "dataset: a"): LOST,
    (TRAINER, "dataset_num_proc: 8"): NOT_NEEDED,
    (TRAINER, "eval_strategy: 'no'"): "train.validate_every=0",
    (TRAINER, "disable_gradient_checkpointing: true"): "recompute.mode=none",
    (TRAINER, "expert_parallel_size: 1"): "sharding.expert_parallel=1",
    (TRAINER, "tensor_parallel_size: auto"): "sharding.tensor_parallel=auto",
    (FSDP, "fsdp_config: {fsdp_offload_params: false}"): "offload.tier=none",
    (FSDP + "parallelism_config:\n  cp_size: 1\n", "  sp_size: 4"): "sharding.context_parallel=4",
    ("[training]\ntensor_parallel_degree=1\n", "sequence_parallel_degree=4"): "sharding.tensor_parallel=4",
    (TRAINER + "eval_strategy: 'no'\n", "eval_steps: 500"): NOT_NEEDED,
    ("train_batch_size: 8\n", "compile: {enabled: false}"): "run.compile=False",
    ("[training]\n", "enable_cpu_offload = false"): "offload.tier=none",
    ("[training]\n", "steps = 9"): "sharding.tensor_parallel=1",
    ("[training]\n", "[validation]\nenable = false"): "train.validate_every=0",
    ("[training]\n", "dataset = 'c4'"): LOST,
    ("[model]\n", "hf_assets_path = 'a/tokenizer'"): LOST,
    (FSDP, "fsdp_config: {fsdp_of_next_year: 1}"): LOST,
    (FSDP, "a_key_of_next_year: true"): LOST,
    ("train_batch_size: 8\n", "a_key_of_next_year: {inner: 3}"): LOST,
    ("train_batch_size: 8\n", "zero_optimization: {of_next_year: 1}"): LOST,
    ("train_batch_size: 8\n", "torch_autocast: {enabled: true}"): "precision.mode=bf16",
    ("[training]\nsteps = 9\n", "of_next_year = 1"): LOST,
    ("[model]\nname = 'llama3'\nflavor = '8B'\n", "[of_next_year]\nkey = 1"): LOST,
    ("[training]\nsteps = 9\n", "[checkpoint]\ninitial_load_path = '/a'"): LOST,
}


@pytest.mark.parametrize(("around", "line"), OUTCOMES)
def test_each_key_is_converted_not_needed_or_lost_as_listed(around, line):
    toml = ConfigFormat.TORCHTITAN if around.startswith("[") else None
    conversion = convert_config(around + line, name="config", format=toml)
    expected = OUTCOMES[around, line]
    assert bool(conversion.lost_keys) == (expected == LOST)
    if expected == NOT_NEEDED:
        assert conversion.key_results[-1].verdict is KeyVerdict.NOT_NEEDED
    elif expected != LOST:
        target, _, value = expected.partition("=")
        section, _, key = target.partition(".")
        assert str(getattr(getattr(conversion.run, section), key)) == value

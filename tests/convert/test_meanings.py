"""Configs whose meaning is easily lost: near-JSON, templates, variables, others' defaults, old names."""

import json

import pytest

from fullshard.cli.main import main
from fullshard.convert.conversion import Conversion, convert_config
from fullshard.convert.rules import ConfigFormat, KeyVerdict
from fullshard.errors import SpecError


def converted(text: str, *, name: str = "config") -> Conversion:
    return convert_config(text, name=name)


def verdict_of(conversion: Conversion, key: str) -> KeyVerdict:
    return next(one.verdict for one in conversion.key_results if one.key == key)


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 1,}, "bf16": {"enabled": true},}',
        '{"zero_optimization": {"stage": 1}, // the stage\n "bf16": {"enabled": true} /* and # the dtype */}',
        '{"zero_optimization": {"stage": 1}, # "stage": 3,\n "bf16": {"enabled": true}}',
    ],
    ids=["trailing commas", "comments", "number signs"],
)
def test_json_is_read_as_deepspeed_reads_it(text):
    conversion = converted(text)
    assert conversion.format is ConfigFormat.DEEPSPEED
    assert conversion.settings["sharding.strategy"] == "zero1"
    assert conversion.settings["precision.mode"] == "bf16"


def test_a_string_is_no_comment():
    text = '{"train_batch_size": 4, "wandb": {"team": "a // b, } # c"},}'
    conversion = converted(text)
    assert next(one.value for one in conversion.key_results if one.key == "wandb.team") == "a // b, } # c"


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {{ zero }}, {% if bf16 %} "bf16": {"enabled": true} {% endif %} }',
        "distributed_type: FSDP\nnum_processes: {{ ranks }}\n",
        "{% set n = 8 %}\nnum_processes: 8\nfsdp_config: {}\n",
        "distributed_type: ${KIND}\nnum_processes: 8\nmixed_precision: bf16",
        '{"zero_optimization": {"stage": "$STAGE"}, "train_batch_size": 8}',
        '{"zero_optimization": {"stage": ${STAGE}}, "train_batch_size": 8}',
        "[parallelism]\ndata_parallel_replicate_degree = '${REPLICAS}'",
        "model_name_or_path: a\ndatasets: [data, '${DATA}']",
    ],
)
def test_a_template_is_refused(text):
    with pytest.raises(SpecError, match="is a template"):
        converted(text)


def test_auto_is_open_and_loses_nothing():
    text = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}},
        "zero_optimization": {"stage": 2},
    }
    conversion = converted(json.dumps(text))
    whys = {one.key: one.why for one in conversion.key_results if one.verdict is KeyVerdict.OPEN}
    assert "train.microbatch is left open here too" in whys["train_micro_batch_size_per_gpu"]
    assert "optimizer.clip_norm = 1.0 here, its default" in whys["gradient_clipping"]
    assert "0.0002 here, from scheduler.params.warmup_max_lr" in whys["optimizer.params.lr"]
    assert "fp16.enabled" in whys
    assert conversion.lost_keys == ()


def test_accelerate_completes_its_deepspeed_config():
    conversion = converted("distributed_type: DEEPSPEED\ndeepspeed_config: {zero3_init_flag: true}")
    assert conversion.run.optimizer.clip_norm == 1.0
    assert conversion.run.sharding.strategy == "shard_grad_op"


@pytest.mark.parametrize(
    ("zero", "tier"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer:cpu"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "params+optimizer:cpu"),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"}},
            "params+optimizer:nvme",
        ),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "auto"),
        ({"stage": 2, "cpu_offload": True}, "optimizer:cpu"),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, "params+optimizer:cpu"),
        ({"stage": 3, "offload_optimizer": {"device": "none"}}, "none"),
        ({"stage": 3}, "auto"),
    ],
)
def test_offload_of_deepspeed_is_a_tier(zero, tier):
    conversion = converted(json.dumps({"zero_optimization": zero}))
    assert conversion.run.offload.tier == tier
    assert not [one for one in conversion.key_results if one.verdict is KeyVerdict.NOT_SUPPORTED]


@pytest.mark.parametrize(
    ("kind", "rate"), [("WarmupLR", 2e-5), ("WarmupDecayLR", 1e-3), ("WarmupCosineLR", 2e-5)]
)
def test_warmup_decay_lr_alone_has_a_default_peak(kind: str, rate: float):
    """WarmupDecayLR alone has a default for warmup_max_lr."""
    optimizer = {"type": "AdamW", "params": {"lr": 2e-5}}
    text = json.dumps({"train_batch_size": 8, "optimizer": optimizer, "scheduler": {"type": kind}})
    assert converted(text).run.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, ("adamw", 1e-3, 0.0)),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, ("torch.optim.Adam", 1e-3, 0.0)),
        ({"type": "Adam", "params": {"adam_w_mode": 0, "lr": "auto"}}, ("torch.optim.Adam", 3e-3, 0.0)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, ("adamw", 1e-3, 0.01)),
        ({"type": "Adagrad"}, ("torch.optim.Adagrad", 1e-2, 0.0)),
        ({"type": "SGD", "params": {"lr": 0.1}}, ("sgd", 0.1, 0.0)),
    ],
)
@pytest.mark.parametrize("scheduler", [{}, {"type": "WarmupLR"}])
def test_an_optimizer_of_deepspeed_has_the_defaults_of_its_class(optimizer, settings, scheduler):
    text = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}
    section = converted(json.dumps(text)).run.optimizer
    assert (section.name, section.learning_rate, section.weight_decay) == settings


@pytest.mark.parametrize(
    ("params", "rate", "lost"),
    [
        ({}, 0.02, ()),
        ({"lr": 0.01, "momentum": 0.9, "ns_method": "gram"}, 0.01, ()),
        ({"lr": 1e-3, "muon_lr": 0.03, "adam_lr": 1e-4}, 0.03, ("optimizer.params.adam_lr",)),
    ],
)
def test_muon_of_deepspeed_is_muon_with_jordans_factor(params: dict, rate: float, lost: tuple[str, ...]):
    text = {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": params}}
    conversion = converted(json.dumps(text))
    section = conversion.run.optimizer
    assert (section.name, section.muon.scale, section.learning_rate) == ("muon", "original", rate)
    assert section.muon.momentum == params.get("momentum", 0.95)
    assert (section.eps, section.weight_decay, section.options) == (1e-10, 0.0, {})
    assert conversion.lost_keys == lost


def test_the_peak_of_a_scheduler_stands_in_the_comment_of_the_rate():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}}
    text = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": scheduler}
    origins = converted(json.dumps(text)).origins
    assert origins["optimizer.learning_rate"] == "scheduler.params.warmup_max_lr"


@pytest.mark.parametrize("enabled", [True, "true", 1, "1"])
def test_a_switch_of_deepspeed_is_on_as_pydantic_reads_it(enabled):
    text = {"train_batch_size": 8, "bf16": {"enabled": enabled}}
    assert converted(json.dumps(text)).run.precision.mode == "bf16"


def test_deepspeed_without_a_scheduler_keeps_the_rate():
    text = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    schedule = converted(json.dumps(text)).run.schedule
    assert (schedule.kind, schedule.warmup_steps) == ("constant", 0)
    with_trainer = converted(json.dumps(text | {"gradient_clipping": "auto"}))
    assert "schedule.kind" not in with_trainer.settings


def test_only_state_of_adamw_is_offloaded():
    text = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "optimizer": {"type": "SGD"}}
    conversion = converted(json.dumps(text))
    assert conversion.run.offload.tier == "auto"
    assert verdict_of(conversion, "zero_optimization.cpu_offload") is KeyVerdict.NOT_SUPPORTED


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}",
        "[training]\nenable_cpu_offload = true",
        "output_dir: a\nper_device_train_batch_size: 1\nfsdp: full_shard offload",
    ],
)
def test_offload_of_fsdp_is_a_tier(text):
    assert converted(text).run.offload.tier == "params+optimizer:cpu"


def test_torchtitans_decay_ratio_of_zero_is_a_constant_rate():
    conversion = converted("[lr_scheduler]\ndecay_ratio = 0.0\nmin_lr_factor = 0.1\ndecay_type = 'cosine'")
    assert conversion.run.schedule.kind == "constant"
    assert converted("[lr_scheduler]\nwarmup_steps = 2").run.schedule.kind == "linear"


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        ("fsdp_version: 1, fsdp_sharding_strategy: SHARD_GRAD_OP", "shard_grad_op"),
        ("fsdp_version: 1, fsdp_reshard_after_forward: false", "full_shard"),
        ("fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false", "full_shard"),
        ("fsdp_version: 2, fsdp_reshard_after_forward: false", "shard_grad_op"),
        ("fsdp_version: 2, fsdp_sharding_strategy: NO_SHARD", "full_shard"),
        (
            "fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false",
            "shard_grad_op",
        ),
    ],
)
def test_fsdps_version_chooses_the_key_of_the_strategy(keys: str, strategy: str):
    conversion = converted(f"distributed_type: FSDP\nfsdp_config: {{{keys}}}")
    assert conversion.run.sharding.strategy == strategy
    assert conversion.lost_keys == ()


def test_torchtitan_shards_over_ranks_that_replicas_and_tensor_parallelism_leave():
    text = "[parallelism]\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2"
    section = convert_config(text, name="config", ranks=16).run.sharding
    assert (section.shard_degree, section.tensor_degree) == (4, 2)


@pytest.mark.parametrize(
    ("text", "warmup"),
    [
        ("[training]\nsteps = 100\n[lr_scheduler]", 100),
        ("[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 300", 100),
        ("[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 7", 7),
        ("[training]\nsteps = 1000", 200),
    ],
)
def test_torchtitans_warmup_is_at_most_as_long_as_the_run(text: str, warmup: int):
    conversion = converted(text)
    assert conversion.run.schedule.warmup_steps == warmup
    assert "unknown" not in {result.verdict.value for result in conversion.key_results}


@pytest.mark.parametrize(
    "text",
    [
        "[lr_scheduler]\ndecay_ratio = 0.4\ndecay_type = 'sqrt'",
        "[lr_scheduler]\ndecay_ratio = 0.4\ndecay_type = 'cosine'",
        "[lr_scheduler]\ndecay_type = 'sqrt'",
        '{"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}}',
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}}',
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [1e-5]}}}',
    ],
)
def test_a_schedule_without_counterpart_is_reported_as_lost(text: str):
    assert converted(text).lost_keys


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("[model]\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise'\n[training]", "fp8_rowwise"),
        ("[model]\nconverters = ['quantize.linear.float8']\n[training]", "fp8"),
        ("[model]\nconverters = ['float8']\n[training]\nenable_cpu_offload = true", "fp8_rowwise"),
        ("distributed_type: FSDP\nmixed_precision: fp8", "fp8"),
    ],
)
def test_fp8_is_a_precision(text, mode):
    conversion = converted(text)
    assert conversion.run.precision.mode == mode
    assert conversion.lost_keys == ()


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 4", (4, 1)),
        ("[training]\nlocal_batch_size = 2\n[parallelism]\ncontext_parallel_degree = 4", (1, 4)),
        (
            "[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 2\n"
            "context_parallel_degree = 2",
            (2, 2),
        ),
        ("base_model: a\nsequence_len: 64\nmicro_batch_size: 2\ncontext_parallel_size: 4", (1, 4)),
        ("base_model: a\nsequence_len: 64\nmicro_batch_size: 2\nsequence_parallel_degree: 4", (1, 4)),
        ("base_model: a\nsequence_len: 64\nmicro_batch_size: 2\ntensor_model_parallel_size: 4", (4, 1)),
        ('{"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4}', (1, 4)),
        ('{"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}', (4, 1)),
    ],
)
def test_ranks_that_share_a_sequence_or_matmuls_do_not_multiply_the_batch(text, degrees):
    conversion = convert_config(text, name="config", ranks=16)
    assert conversion.run.train.global_batch == 8
    section = conversion.run.sharding
    assert (section.tensor_degree, section.context_degree) == degrees
    assert conversion.lost_keys == ()


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 4}", (4, 1)),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 4}", (4, 1)),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 4}", (1, 4)),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 4}", (1, 4)),
        ("base_model: a\nsequence_len: 64\nsequence_parallel_size: '4'\nheads_k_stride: 1", (1, 4)),
    ],
)
def test_degrees_of_tensor_and_context_parallelism_are_set(text, degrees):
    section = converted(text).run.sharding
    assert (section.tensor_degree, section.context_degree) == degrees


@pytest.mark.parametrize(
    "text",
    [
        (
            "[training]\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
            "data_parallel_shard_degree = {shard}\ncontext_parallel_degree = 4"
        ),
        (
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
            "  parallelism_config_dp_shard_size: {shard}\n  parallelism_config_cp_size: 4"
        ),
        (
            "base_model: a\nsequence_len: 64\nmicro_batch_size: 2\ndp_replicate_size: 2\n"
            "dp_shard_size: {shard}\ncontext_parallel_size: 4"
        ),
    ],
)
@pytest.mark.parametrize("shard", [1, 2])
def test_parameters_are_sharded_over_ranks_that_share_sequences(text, shard):
    section = converted(text.format(shard=shard)).run.sharding
    assert (section.strategy, section.shard_degree) == ("hybrid_shard", 4 * shard)


def test_axolotl_is_not_taken_for_accelerate():
    text = "base_model: a/b\nsequence_len: 512\nmicro_batch_size: 2\ndeepspeed: zero3.json\nfsdp_config:\n"
    conversion = converted(text)
    assert conversion.format is ConfigFormat.AXOLOTL
    assert conversion.settings["model.hf"] == "a/b"
    assert conversion.lost_keys == ("deepspeed",)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {_component_: torch.optim.AdamW}\ngradient_accumulation_steps: 8",
        "max_duration: 1ep\nfsdp_config: {sharding_strategy: FULL_SHARD}",
        "checkpoint = {'optimizer': optimizer, 'fp16': None}",
    ],
)
def test_a_config_of_another_tool_is_of_no_known_format(text):
    with pytest.raises(SpecError, match="no format"):
        converted(text)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}', []),
        ("distributed_type: MEGATRON_LM", ["distributed_type"]),
        ("distributed_type: FSDP\nmixed_precision: int4", ["mixed_precision"]),
        ("base_model: a/b\nsequence_len: 512\nload_in_4bit: true", ["load_in_4bit"]),
        ("sequence_len: 512\nrl: dpo\nlearning_rate: 0.1", ["rl"]),
        ("sequence_len: 512\noptimizer: lion", ["optimizer"]),
        ("sequence_len: 512\nadapter: ia3\ntrain_on_inputs: false", ["adapter", "train_on_inputs"]),
        ("model_name_or_path: a\nstage: dpo\npref_beta: 0.1", ["stage", "pref_beta"]),
        ("model_name_or_path: a\nstage: sft\nfinetuning_type: full\ntrain_on_prompt: true", []),
        ("model_name_or_path: a\nlabel_smoothing_factor: 0.1", ["label_smoothing_factor"]),
        ("model_name_or_path: a\ndataset_mixer: {a: 0.5, b: 1.0}", ["dataset_mixer.a"]),
        ('{"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lion"}}', ["optimizer.type"]),
        (
            '{"zero_optimization": {"stage": 3}, "data_efficiency": {"enabled": true}}',
            ["data_efficiency.enabled"],
        ),
        ('[training]\nsteps = 9\n[optimizer]\nname = "Lion"', ["optimizer.name"]),
        ('{"train_batch_size": 8, "elasticity": {"enabled": true}}', ["elasticity.enabled"]),
        ('{"train_batch_size": 8, "pipeline": {"stages": 2}}', ["pipeline.stages"]),
    ],
)
def test_exit_code_reports_lost_keys(text, lost, tmp_path, capsys):
    path = tmp_path / "config"
    path.write_text(text)
    assert main(["convert", str(path)]) == (SpecError.exit_code if lost else 0)
    shown = capsys.readouterr()
    assert "# From config" in shown.out
    assert bool(lost) == ("does not train as these keys request" in shown.err)
    assert all(f"# LOST: {key} = " in shown.out for key in lost)


def test_code_of_a_model_is_trusted_by_its_user_alone():
    text = "model_name_or_path: a/b\nnum_train_epochs: 1\ntrust_remote_code: true\nreinit_weights: true"
    conversion = converted(text)
    assert verdict_of(conversion, "trust_remote_code") is KeyVerdict.NOT_SUPPORTED
    assert conversion.settings.get("model.weights") == "none"


def test_a_config_that_says_nothing_of_model_or_data_is_noted():
    noted = [
        " ".join(converted(text).decisions)
        for text in ("sequence_len: 64", "sequence_len: 64\nbase_model: b")
    ]
    assert 'set [model] hf = "…" and [data] source = "…"' in noted[0]
    assert 'the default until you set [data] source = "…"' in noted[1]


def test_epochs_are_a_duration_unless_steps_are():
    text = "output_dir: a\nmodel_name_or_path: b\n"
    assert converted(f"{text}num_train_epochs: 1.5").run.train.epochs == 1.5
    assert converted(text).run.train.epochs == 3, "the Trainer's default"
    assert converted("sequence_len: 64\nbase_model: b").run.train.epochs == 1, "axolotl's default"
    both = converted(f"{text}num_train_epochs: 1.5\nmax_steps: 20")
    assert (both.run.train.steps, both.run.train.epochs) == (20, None)
    assert verdict_of(both, "num_train_epochs") is KeyVerdict.NOT_NEEDED


def test_a_decoder_has_positions_for_the_sequences():
    assert (
        converted(
            "output_dir: a\nmax_steps: 9\nlr_scheduler_type: linear\nmax_length: 9000"
        ).run.model.max_sequence
        == 9000
    )


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("base_model: a/b\nsequence_len: 512\nadapter: qlora\nload_in_4bit: true", "nf4"),
        ("base_model: a/b\nsequence_len: 512\nadapter: qlora", "nf4"),
        ("base_model: a/b\nsequence_len: 512\nadapter: lora\nload_in_8bit: true", "int8"),
        ("base_model: a/b\nsequence_len: 512\nadapter: lora\nload_in_8bit: false", None),
        (
            "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\nquantization_bit: 4",
            "nf4",
        ),
        (
            "model_name_or_path: a\nuse_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4",
            "nf4",
        ),
    ],
)
def test_a_quantised_base_is_the_dtype_of_frozen_weights(text, base):
    conversion = converted(text)
    assert conversion.settings.get("adapter.base_dtype") == base
    lost = [one.key for one in conversion.key_results if one.is_lost]
    assert not any("bit" in key or "bnb" in key or key == "adapter" for key in lost)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("adapter: qlora\nload_in_4bit: true\nbnb_4bit_quant_type: fp4", "bnb_4bit_quant_type"),
        ("adapter: lora\ngptq: true", "gptq"),
    ],
)
def test_a_base_in_a_format_that_is_not_here_is_lost(setting, key):
    conversion = converted(f"base_model: a/b\nsequence_len: 512\n{setting}")
    assert [one.key for one in conversion.key_results if one.is_lost] == [key]

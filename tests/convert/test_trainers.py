"""Defaults of transformers' Trainer, TRL, LLaMA-Factory, axolotl and Accelerate, and which keys they read."""

import pytest

from fullshard.cli.main import main
from fullshard.convert.conversion import Conversion, convert_config
from fullshard.errors import SpecError


def converted(text: str) -> Conversion:
    return convert_config(text, name="config")


FACTORY = "model_name_or_path: a\nstage: sft\nnum_train_epochs: 1\n"
TRL = "model_name_or_path: a\nnum_train_epochs: 1\n"


@pytest.mark.parametrize(
    ("text", "packing", "mask", "length"),
    [
        (TRL, "none", False, 1024),
        (TRL + "packing: true\nmax_length: 64", "best_fit", True, 64),
        (TRL + "packing: true\npacking_strategy: wrapped", "concat", False, 1024),
        (FACTORY, "none", False, 2048),
        (FACTORY + "packing: true", "best_fit", False, 2048),
        (FACTORY + "neat_packing: true", "best_fit", True, 2048),
        (FACTORY.replace("sft", "pt"), "concat", False, 2048),
        (FACTORY.replace("sft", "pt") + "packing: false", "none", False, 2048),
        ("base_model: a\nval_set_size: 0.1", "none", False, 512),
        ("base_model: a\nval_set_size: 0.1\nsample_packing: true", "best_fit", True, 512),
    ],
)
def test_documents_are_packed_and_apart_as_in_the_trainer(text, packing, mask, length):
    data = converted(text).run.data
    assert (data.packing, data.document_mask, data.sequence_length) == (packing, mask, length)


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        (TRL + "use_peft: true", (16, 32.0, 0.05, ("q_proj", "v_proj"))),
        (TRL + "use_peft: true\nlora_r: 4\nlora_target_modules: all-linear", (4, 32.0, 0.05, "all-linear")),
        (FACTORY + "finetuning_type: lora", (8, 16.0, 0.0, "all-linear")),
        (FACTORY + "finetuning_type: lora\nlora_rank: 64", (64, 128.0, 0.0, "all-linear")),
        (FACTORY + "finetuning_type: lora\nlora_rank: 64\nlora_alpha: 8", (64, 8.0, 0.0, "all-linear")),
    ],
)
def test_an_adapter_has_the_defaults_of_its_tool(text, adapter):
    section = converted(text).run.adapter
    assert (section.rank, section.alpha, section.dropout, section.targets) == adapter


@pytest.mark.parametrize(
    ("text", "mode", "rate"),
    [
        (TRL, "fp32", 5e-5),
        (TRL + "max_length: 64", "bf16", 2e-5),
        (TRL + "packing: true\nbf16: false", "fp32", 2e-5),
        (TRL + "bf16: false\nfp16: true", "fp16", 5e-5),
        (TRL + "bf16: true", "bf16", 5e-5),
        (FACTORY, "auto", 5e-5),
        (FACTORY + "bf16: false\nfp16: false", "fp32", 5e-5),
        ("base_model: a\nsequence_len: 64\nbf16: auto", "auto", 5e-5),
    ],
)
def test_precision_and_rate_are_the_tools_if_the_file_leaves_them_out(text, mode, rate):
    run = converted(text).run
    assert (run.precision.mode, run.optimizer.learning_rate) == (mode, rate)


def test_a_strategy_that_fsdp_turns_on_is_not_lost():
    conversion = converted(TRL + "fsdp: true\nfsdp_config: {version: 2.0, reshard_after_forward: false}")
    assert conversion.run.sharding.strategy == "shard_grad_op"
    assert conversion.lost_keys == ()


def test_cosine_min_lr_ratio_is_of_cosine_alone():
    text = "base_model: a\nsequence_len: 64\ncosine_min_lr_ratio: 0.2\n"
    assert converted(text).run.schedule.min_lr_ratio == 0.2
    assert converted(text + "lr_scheduler: linear").run.schedule.min_lr_ratio == 0


def test_ranks_that_contradict_the_file_are_refused():
    with pytest.raises(SpecError, match="is not num_processes"):
        convert_config("distributed_type: FSDP\nnum_processes: 8", name="config", ranks=16)


def test_batch_size_of_axolotl_is_one_ranks():
    text = "base_model: a\nsequence_len: 64\nmicro_batch_size: 4\nbatch_size: 32"
    assert convert_config(text, name="config", ranks=8).run.train.global_batch == 256


def test_the_warmup_that_a_tool_has_by_default_is_that_of_the_run():
    axolotl = converted("base_model: a\nsequence_len: 64")
    assert axolotl.run.schedule.warmup_steps == 0.03
    assert any("of at most 100 steps" in note for note in axolotl.notes)
    assert converted(TRL).run.schedule.warmup_steps == 0
    assert converted("base_model: a\nsequence_len: 64\nmax_steps: 200").run.schedule.warmup_steps == 6


def test_several_datasets_are_sources_and_each_test_dataset_is_held_out_beside_its_like():
    items = ["{path: a.jsonl, type: chat_template}", "{path: b.parquet, type: completion, field: c}"]
    tests = "{path: d.parquet, type: completion, field: c}"
    text = f"base_model: m\nsequence_len: 64\ndatasets: [{', '.join(items)}]\ntest_datasets: [{tests}]"
    conversion = converted(text)
    chats, texts = conversion.run.data.sources
    assert conversion.lost_keys == ()
    assert (chats.source, chats.paths, chats.records, chats.validation_paths) == (
        *("jsonl", ("a.jsonl",), "messages", ()),
    )
    assert chats.roles == {"human": "user", "gpt": "assistant"}
    assert (texts.source, texts.text_field, texts.validation_paths) == ("parquet", "c", ("d.parquet",))
    assert (conversion.run.data.train_on, conversion.run.data.tokenizer) == ("assistant", "m")


@pytest.mark.parametrize(
    ("item", "test"),
    [
        ("field_messages: messages, message_property_mappings: {role: role, content: content}, ", ""),
        ("", "field_messages: messages, message_property_mappings: {role: role, content: content}, "),
        *[("roles_to_train: [assistant], train_on_eos: turn, ",) * 2],
    ],
)
def test_a_test_dataset_is_held_out_whichever_of_both_has_the_default_fields(item, test):
    text = (
        f"base_model: m\nsequence_len: 64\ndatasets: [{{{item}path: a.jsonl, type: chat_template}}]\n"
        f"test_datasets: [{{{test}path: b.jsonl, type: chat_template}}]"
    )
    found = converted(text)
    assert found.lost_keys == ()
    assert found.run.data.validation_paths == ("b.jsonl",)


def test_a_test_split_of_a_dataset_by_name_is_for_the_user_to_save():
    item = "path: a/b, name: c, type: completion"
    text = (
        f"base_model: m\nsequence_len: 64\ndatasets: [{{{item}}}]\ntest_datasets: [{{{item}, split: test}}]"
    )
    data = converted(text).run.data
    assert (data.source, data.name, data.subset, data.split) == ("datasets", "a/b", "c", "train")
    assert "test_datasets.0.path" in converted(text).lost_keys


def test_the_number_of_ranks_and_keys_that_need_a_decision_come_first(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(
        "base_model: m\nsequence_len: 64\nnum_epochs: 1\nrl: dpo\nchat_template: chatml"
    )
    assert main(["convert", str(tmp_path / "a.yaml")]) == SpecError.exit_code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(" ")]
    assert lines[0].startswith("decide: the number of ranks")
    assert lines[1].startswith("decide: what is trained")
    assert [line.split()[0] for line in lines[2:5]] == ["rl", "chat_template", "base_model"]
    main(["convert", str(tmp_path / "a.yaml"), "--ranks", "2"])
    assert "number of ranks" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("base_model: a\nsequence_len: 64", 4),
        ("base_model: a\nsequence_len: 64\nsave_total_limit: null", 4),
        ("base_model: a\nsequence_len: 64\nsave_total_limit: 1", 1),
        (TRL, 0),
        (FACTORY, 0),
        (FACTORY + "save_total_limit: 3", 3),
    ],
)
def test_a_run_keeps_as_many_checkpoints_as_the_tool(text, kept):
    conversion = converted(text)
    assert conversion.run.checkpoint.keep == kept
    written = "save_total_limit" not in text or "null" in text
    assert any(note.startswith("checkpoint.keep = ") for note in conversion.notes) == written


@pytest.mark.parametrize(
    ("kind", "offloading", "recompute"),
    [
        ("offload", "", ("full", "host")),
        ("offload_disk", "", ("full", "host")),
        ("unsloth", "", ("full", "host")),
        ("true", "", ("full", "device")),
        ("true", "activation_offloading: true", ("full", "host")),
        ("false", "activation_offloading: legacy", ("offload", "device")),
        ("false", "activation_offloading: false", ("none", "device")),
    ],
)
def test_every_kind_of_gradient_checkpointing_recomputes(kind, offloading, recompute):
    section = converted(f"{TRL}gradient_checkpointing: {kind}\n{offloading}").run.recompute
    assert (section.mode, section.inputs) == recompute
    assert converted(f"{TRL}gradient_checkpointing: false").run.recompute.mode == "none"


@pytest.mark.parametrize(("recomputes", "inputs"), [("true", "host"), ("false", "device")])
def test_accelerate_offloads_the_inputs_of_what_it_recomputes(recomputes, inputs):
    name = "fsdp_activation_checkpointing"
    text = f"{{fsdp_version: 2, {name}: {recomputes}, {name}_offload: true}}"
    run = converted(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {text}\n").run
    assert run.recompute.inputs == inputs


SECTIONS = """
fsdp_config: {fsdp_offload_params: true, activation_checkpointing: true, fsdp_sharding_strategy: NO_SHARD}
deepspeed_config: {zero_stage: 1, gradient_clipping: 0.5}
megatron_lm_config: {megatron_lm_tp_degree: 4}
"""


def test_the_batch_of_a_deepspeed_section_counts_accumulation_and_ranks():
    section = "{zero_stage: 3, train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 4}"
    run = converted(f"distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {section}\n").run
    assert (run.train.microbatch, run.train.global_batch) == (2, 32)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("MULTI_GPU", ("no_shard", "auto", "auto", 1.0, 1)),
        ("NO", ("no_shard", "auto", "auto", 1.0, 1)),
        ("FSDP", ("no_shard", "params+optimizer:cpu", "full", 1.0, 1)),
        ("DEEPSPEED", ("zero1", "auto", "auto", 0.5, 1)),
        ("MEGATRON_LM", ("auto", "auto", "auto", 1.0, 4)),
    ],
)
def test_accelerate_reads_the_section_of_its_type_alone(kind, settings):
    run = converted(f"distributed_type: {kind}{SECTIONS}").run
    assert (
        run.sharding.strategy,
        run.offload.tier,
        run.recompute.mode,
        run.optimizer.clip_norm,
        run.sharding.tensor_degree,
    ) == settings


def test_accelerate_computes_in_fp32_unless_asked():
    assert converted("distributed_type: FSDP").run.precision.mode == "fp32"
    assert converted("distributed_type: FSDP\nmixed_precision: bf16").run.precision.mode == "bf16"
    deepspeed = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: a.json}"
    assert converted(deepspeed).run.precision.mode == "auto"


AXOLOTL = "base_model: a\nlearning_rate: 2e-4\n"
EMBEDDINGS = ("*embed_tokens*", "*lm_head*")
LR_GROUPS = "lr_groups: [{name: o, modules: [self_attn.o_proj, b], lr: 1e-6}]"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        (AXOLOTL + "embedding_lr: 1e-4", [(EMBEDDINGS, 0.5, 0.0)]),
        (AXOLOTL + "embedding_lr: 1e-4\nembedding_lr_scale: 3", [(EMBEDDINGS, 3.0, 0.0)]),
        (AXOLOTL + "embedding_lr: 1e-4\nadapter: lora", []),
        (
            AXOLOTL + "embedding_lr: 1e-4\nadapter: lora\nlora_modules_to_save: [lm_head]",
            [(("*lm_head*",), 0.5, 0.0)],
        ),
        (AXOLOTL + LR_GROUPS, [(EMBEDDINGS, 1.0, 0.0), (("*self_attn.o_proj*", "*b*"), 0.005, None)]),
        (AXOLOTL + "adapter: lora\nloraplus_lr_ratio: 16\nembedding_lr: 1", [(("*.lora_B.*",), 16.0, None)]),
        (FACTORY + "finetuning_type: lora\nloraplus_lr_ratio: 4.0", [(("*.lora_B.*",), 4.0, None)]),
        (AXOLOTL, []),
    ],
)
def test_rates_of_some_parameters_are_groups(text, groups):
    found = converted(text)
    assert [(g.match, g.lr_factor, g.weight_decay) for g in found.run.optimizer.groups] == groups
    assert not [key for key in found.lost_keys if "lr" in key]


def test_lora_plus_does_not_decay_in_axolotl():
    decay = "adapter: lora\nloraplus_lr_ratio: 16\nweight_decay: 0.5"
    assert converted(AXOLOTL + decay).run.optimizer.weight_decay == 0
    assert converted(FACTORY + decay.replace("adapter", "finetuning_type")).run.optimizer.weight_decay == 0.5


@pytest.mark.parametrize(
    "text",
    [
        f"{FACTORY}optim: adamw_torch\nuse_muon: true\n",
        "base_model: a\nsequence_len: 64\nmicro_batch_size: 1\noptimizer: muon\n",
    ],
    ids=["LLaMA-Factory", "axolotl"],
)
def test_muon_is_muon_and_its_factor_is_named(text: str) -> None:
    found = converted(text)
    assert found.run.optimizer.name == "muon"
    assert any("optimizer.muon.scale" in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        f"{FACTORY}optim: adafactor\n",
        "base_model: a\nsequence_len: 64\nmicro_batch_size: 1\noptimizer: adafactor\n",
    ],
    ids=["LLaMA-Factory", "axolotl"],
)
def test_adafactor_is_adafactor(text: str) -> None:
    found = converted(text)
    assert found.run.optimizer.name == "adafactor"
    assert "optim" not in "".join(found.lost_keys)

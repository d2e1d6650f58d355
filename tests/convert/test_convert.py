"""Configs of other tools: each key is spoken of, and what comes out is a run."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.convert.conversion import Conversion, convert_config, parse_config
from fullshard.convert.rules import ConfigFormat, KeyVerdict, default_run_setting, load_rules
from fullshard.errors import SpecError
from fullshard.spec.run import Run, Strategy
from fullshard.system.small_files import format_toml_value

CONFIGS = sorted(path for path in Path(__file__).parent.joinpath("configs").iterdir() if path.is_file())
UNKNOWN = {
    "axolotl_fsdp2.yaml": {"sequence_length"},
    "trainer_lora.yaml": {"max_lenght"},
    "accelerate_hybrid.yaml": {"fsdp_config.fsdp_use_orig_parms"},
    "deepspeed_zeropp_nvme.json": {"zero_optimization.stage4_dream"},
}
SETTINGS = {
    "accelerate_fsdp1.yaml": "sharding.strategy=full_shard recompute.mode=full run.ranks=2",
    "accelerate_fsdp2.yaml": "sharding.strategy=shard_grad_op sharding.units.min_parameters=2000 "
    "run.compile=True",
    "accelerate_hybrid.yaml": "sharding.strategy=hybrid_shard sharding.shard_degree=2",
    "accelerate_deepspeed.yaml": "sharding.strategy=full_shard optimizer.clip_norm=1.0",
    "deepspeed_zero1.json": "sharding.strategy=zero1 optimizer.name=torch.optim.Adam optimizer.clip_norm=0.0",
    "deepspeed_zero2_auto.json": "sharding.strategy=shard_grad_op schedule.kind=constant precision.mode=auto",
    "deepspeed_zero3.json": "sharding.strategy=full_shard precision.mode=bf16 train.global_batch=8 "
    "train.microbatch=2 train.steps=100 optimizer.clip_norm=0.5 schedule.kind=linear "
    "schedule.min_lr_ratio=0.0",
    "deepspeed_zeropp_nvme.json": "sharding.strategy=full_shard precision.mode=fp16 "
    "optimizer.betas=(0.9,0.999) offload.tier=params+optimizer:nvme "
    "offload.path=/local_nvme train.global_batch=4",
    "axolotl_fsdp2.yaml": "model.hf=some/model-8b sharding.strategy=shard_grad_op precision.mode=bf16 "
    "train.microbatch=3 train.global_batch=6 train.steps=200 data.sequence_length=4096 recompute.mode=full "
    "data.packing=best_fit optimizer.learning_rate=2e-05 schedule.warmup_steps=20 schedule.kind=cosine "
    "offload.tier=params+optimizer:cpu optimizer.weight_decay=0.01 optimizer.betas=(0.9,0.999)",
    "axolotl_chat.yaml": "model.hf=some/model-1b data.source=jsonl data.paths=('chats/train.jsonl',) "
    "data.validation_paths=('chats/held_out.jsonl',) data.records=messages data.messages_field=conversations "
    "data.role_field=from data.train_on=assistant data.tokenizer=some/model-1b schedule.warmup_steps=0.1 "
    "train.validate_every=0.125 checkpoint.every=0.5 log.trackers=('wandb',) adapter.rank=16",
    "axolotl_dpo.yaml": "data.name=some/preferences data.validation_fraction=0.0",
    "llama_factory_sft.yaml": "adapter.rank=8 schedule.warmup_steps=0.1 data.validation_fraction=0.1 "
    "checkpoint.every=500 train.validate_every=500 train.epochs=3.0",
    "llama_factory_dpo.yaml": "adapter.rank=8 data.validation_fraction=0.0",
    "trl_sft.yaml": "data.source=datasets data.name=some/chats data.subset=english data.split=train_sft "
    "data.packing=best_fit schedule.warmup_steps=0.03 train.validate_every=0 checkpoint.every=0",
    "trl_orpo.yaml": "data.name=some/preferences precision.mode=bf16",
    "trainer_lora.yaml": "sharding.strategy=hybrid_shard adapter.rank=16 adapter.targets=('q_proj','v_proj') "
    "schedule.kind=cosine schedule.min_lr_ratio=0.1 schedule.warmup_steps=10 train.global_batch=8 "
    "data.packing=none log.trackers=('wandb',) checkpoint.every=100 precision.mode=bf16 recompute.mode=none",
    "torchtitan_2024.toml": "sharding.strategy=hybrid_shard sharding.shard_degree=2 schedule.kind=constant "
    "schedule.warmup_steps=50 train.microbatch=4 run.compile=False run.seed=7 checkpoint.every=500 "
    "offload.tier=params+optimizer:cpu model.layers=80 recompute.mode=full",
    "torchtitan_llama3_8b.toml": "model.layers=32 recompute.mode=selective recompute.save_matmuls=2 "
    "optimizer.learning_rate=0.0003 schedule.kind=linear schedule.min_lr_ratio=0.0 data.sequence_length=8192",
    "torchtitan_hybrid.toml": "sharding.strategy=hybrid_shard_zero2 sharding.shard_degree=2 "
    "schedule.kind=wsd recompute.mode=full optimizer.betas=(0.9,0.999) checkpoint.mode=async "
    "train.global_batch=16",
}


def converted(path: Path, *, ranks: int | None = None) -> Conversion:
    return convert_config(path.read_text(), name=path.name, ranks=ranks)


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def tree_of(path: Path) -> dict[str, Any]:
    readers = {".json": json.loads, ".yaml": yaml.safe_load, ".toml": tomllib.loads}
    return readers[path.suffix](path.read_text())


def keys_of(path: Path) -> set[str]:
    return set(leaves(tree_of(path)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_has_one_result(path):
    said = [one.key for one in converted(path).key_results]
    assert len(said) == len(set(said))
    assert set(said) == keys_of(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_unknown_keys(path):
    unknown = {one.key for one in converted(path).key_results if one.verdict is KeyVerdict.UNKNOWN}
    assert unknown == UNKNOWN.get(path.name, set())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_keys_without_a_setting_have_a_reason(path):
    for one in converted(path).key_results:
        sets = one.verdict in (KeyVerdict.TAKEN, KeyVerdict.RENAMED)
        assert bool(one.sets) == sets
        assert one.why or sets, one


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "torchtitan", "trainer"])
def test_every_rule_of_a_table_says_one_thing_and_sets_a_key_that_exists(name):
    for key, rule in load_rules(name).items():
        assert sum(map(bool, (rule.not_needed, rule.unsupported, rule.sets))) == 1, key
        assert "$" not in rule.not_needed + rule.unsupported + rule.why + rule.instead, key
        if rule.sets:
            default_run_setting(rule.sets)


def value_of(run: Run, target: str) -> str:
    value: Any = run
    for part in target.split("."):
        value = getattr(value, part)
    return str(value).replace(" ", "")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_converted_run_has_the_settings_of_the_config(path):
    run = converted(path).run
    for setting in SETTINGS[path.name].split():
        target, _, value = setting.partition("=")
        assert value_of(run, target) == value, target


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_printed_run_loads_as_the_converted_run(path, tmp_path):
    conversion = converted(path)
    (tmp_path / "run.toml").write_text(conversion.run_toml_text())
    assert Run.load(tmp_path / "run.toml") == conversion.run


@pytest.mark.parametrize(
    "path", [one for one in CONFIGS if one.suffix == ".json"], ids=lambda path: path.name
)
@pytest.mark.parametrize(
    "section", [(), ("zero_optimization",), ("zero_optimization", "offload_param"), ("aio",)]
)
def test_surprising_key_is_unknown(path, section):
    tree = tree_of(path)
    inner = tree
    for part in section:
        inner = inner.setdefault(part, {})
    inner["surprise"] = 1
    conversion = convert_config(json.dumps(tree), name="a.json")
    found = next(one for one in conversion.key_results if one.key == ".".join((*section, "surprise")))
    assert found.verdict is KeyVerdict.UNKNOWN


ODD = [
    *(None, "", [], {}, -1, 0, 1, 3.5, True, False, "auto", "none", "1e-4", [1, 2], [0.9, 0.99]),
    *(10**30, 10**400, float("nan"), float("inf"), -8, "a\nb"),
]


def mappings(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for value in tree.values():
        if isinstance(value, dict):
            yield from mappings(value)


@given(data=st.data())
@settings(max_examples=80)
def test_any_value_is_reported_or_refused(data):
    path = data.draw(st.sampled_from(CONFIGS))
    found, tree = parse_config(path.read_text(), name=path.name, format=None)
    inner = data.draw(st.sampled_from(list(mappings(tree))))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(st.sampled_from(ODD))
    text = json.dumps(tree) if found is not ConfigFormat.TORCHTITAN else toml_value_text(tree)
    try:
        conversion = convert_config(text, name=path.name, format=found)
    except SpecError:
        return
    assert {one.key for one in conversion.key_results} == set(leaves(tree))


BOMBS = {
    "json": "[" * 5000,
    "toml": "[training]\nsteps = " + "1" * 5000,
    "yaml": "fsdp_config:\n"
    + "a: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
    "a list in itself": "fsdp_config: &a [*a]",
    "an integer": '{"train_batch_size": 1' + "0" * 400 + "}",
    "half a letter": '{"train_batch_size": 4, "wandb": {"team": "\\ud800"}}',
    "quotes": '{"' + '\\"' * 300_000,
    "a backslash": '{"' + '\\"' * 300_000 + "\\",
    "comments": "{" + "/*" * 300_000,
    "placeholders": "{" + "${" * 300_000,
    "templates": "{" + "{{" * 300_000,
    "a placeholder in a text": json.dumps({"train_batch_size": 4, "wandb": {"team": "${" * 300_000}})[:-1],
    "many keys": json.dumps({"train_batch_size": 4} | {f"key{i}": i for i in range(6000)}),
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_hostile_config_text_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        convert_config(text, name="config")


def test_odd_values_are_refused_or_give_a_run_toml_that_loads() -> None:
    for text in (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2001-01-01, x: !!binary gIGC, y: !!set {a}}",
        '{"train_batch_size": 1e999, "gradient_clipping": "nan", "bf16": {"enabled": "\\u007f"}}',
    ):
        try:
            conversion = convert_config(text, name="config")
        except SpecError:
            continue
        conversion.model_dump_json()
        assert Run.parse(tomllib.loads(conversion.run_toml_text()), source="it") == conversion.run


def test_a_comment_and_a_text_of_toml_hold_no_control_characters() -> None:
    text = '{"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", '
    text += '"nvme_path": "a\\u007f\\u0001"}}}'
    conversion = convert_config(text, name="a\x00\x7fb.json")
    assert tomllib.loads(conversion.run_toml_text())["offload"]["path"] == "a\x7f\x01"


def toml_value_text(tree: dict[str, Any]) -> str:
    """Each key of the top as one line; what TOML has no word for becomes an empty string."""
    return "\n".join(f"{key} = {format_toml_value(_without_none(value))}" for key, value in tree.items())


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items()}
    return "" if value is None or value in (10**30, 10**400) else value


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("accelerate_fsdp1.yaml", KeyVerdict.NOT_NEEDED),
        ("trainer_lora.yaml", KeyVerdict.NOT_NEEDED),
        ("accelerate_hybrid.yaml", KeyVerdict.NOT_SUPPORTED),
    ],
)
def test_only_prefetch_of_one_unit_is_supported(name: str, verdict: KeyVerdict) -> None:
    path = Path(__file__).parent / "configs" / name
    found = [one for one in converted(path).key_results if "prefetch" in one.key]
    assert found
    assert {one.verdict for one in found} == {verdict}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: 4}",
            "reshard_after_forward",
        ),
        ('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}', "zero_hpz_partition_size"),
    ],
)
def test_parameters_kept_over_fewer_ranks_are_full_shard(text: str, key: str) -> None:
    conversion = convert_config(text, name="config")
    [found] = [one for one in conversion.key_results if one.key.endswith(key)]
    assert found.verdict is KeyVerdict.NOT_SUPPORTED
    assert 'sharding.strategy = "hybrid_shard"' in found.why
    assert conversion.run.sharding.strategy is Strategy.FULL_SHARD


def test_batches_multiply_to_the_whole():
    text = '{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}'
    assert convert_config(text, name="a.json", ranks=8).run.train.global_batch == 96
    open_ranks = convert_config(text, name="a.json")
    assert "--ranks" in open_ranks.decisions[0]
    assert "# DECIDE: the number of ranks" in open_ranks.run_toml_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}', "contradict"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "two precisions"),
        ('{"zero_optimization": {"stage": 3', "cannot be read"),
        ("[sharding]\nstrategy = 'zero1'", "already"),
        ("print('hello')", "cannot be read"),
        ('{"a": 1} // a comment', "known here"),
        ('{"gradient_clipping": -1}', "optimizer.clip_norm"),
        ('{"zero_optimization": {"stage": 9}}', "zero_optimization.stage"),
        ('{"train_batch_size": NaN}', "train_batch_size"),
        ('{"train_batch_size": -8}', "train_batch_size"),
        ('{"train_micro_batch_size_per_gpu": Infinity}', "train_micro_batch_size_per_gpu"),
        ('{"gradient_accumulation_steps": true}', "gradient_accumulation_steps"),
        ('{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, NaN]}}}', "optimizer.params.betas"),
        ("deepspeed_config: {zero_stage: 4}\nfsdp_config: {}", "zero_stage"),
        ("num_processes: 0\nfsdp_config: {}", "num_processes"),
        ("[training]\nlocal_batch_size = -8", "training.local_batch_size"),
        ("[training]\nsteps = 0", "training.steps"),
        ("base_model: a\nsequence_len: 0", "sequence_len"),
    ],
)
def test_invalid_configs_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        convert_config(text, name="a.json")


def test_broken_yaml_is_refused_with_the_line_of_its_error():
    with pytest.raises(SpecError, match=r"(?s)a\.yml cannot be read.*line 2"):
        convert_config("a: b\nc: [d", name="a.yml")


def test_a_format_that_is_asked_for_is_the_one_that_is_read():
    assert (
        convert_config("debug: true", name="a.yaml", format=ConfigFormat.ACCELERATE).format
        is ConfigFormat.ACCELERATE
    )
    with pytest.raises(SpecError, match="no config of torchtitan"):
        convert_config('{"fp16": {"enabled": true}}', name="a", format=ConfigFormat.TORCHTITAN)


@pytest.mark.parametrize(
    ("text", "key", "verdict"),
    [
        ('{"data_efficiency": {"enabled": false, "seed": 1}}', "data_efficiency.seed", KeyVerdict.NOT_NEEDED),
        (
            '{"data_efficiency": {"enabled": true, "seed": 1}}',
            "data_efficiency.seed",
            KeyVerdict.NOT_SUPPORTED,
        ),
        ('{"zero_optimization": {"zero_quantized_weights": false}}', None, KeyVerdict.NOT_NEEDED),
        ('{"zero_optimization": {"zero_quantized_weights": true}}', None, KeyVerdict.RENAMED),
    ],
)
def test_disabled_feature_is_not_needed(text, key, verdict):
    said = {
        one.key: one for one in convert_config(text, name="a.json", format=ConfigFormat.DEEPSPEED).key_results
    }
    assert said[key or "zero_optimization.zero_quantized_weights"].verdict is verdict


def test_quantized_gradients_are_those_of_two_levels():
    text = '{"zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}'
    section = convert_config(text, name="a.json", format=ConfigFormat.DEEPSPEED).run.communication
    assert (section.reduce, section.reduce_within) == ("int8", "fp32")


def test_first_of_contradicting_keys_counts_and_the_other_is_reported():
    text = "distributed_type: FSDP\nparallelism_config: {cp_size: 2, sp_size: 4}"
    conversion = convert_config(text, name="a.yaml")
    assert conversion.run.sharding.context_degree == 2
    assert conversion.key_results[2].verdict is KeyVerdict.NOT_SUPPORTED
    assert "cp_size" in conversion.key_results[2].why

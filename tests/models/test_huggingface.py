"""A config.json becomes a module without weights, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import SpecError
from fullshard.models.build import check_sequence_length, check_vocabulary
from fullshard.models.huggingface import (
    build_hf_config,
    build_hf_model,
    is_causal_lm,
    unused_balance_loss_factor_note,
    weight_dtype_in_config,
)
from fullshard.models.meta_init import construct_with_meta_parameters
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from tests.fakes.architectures_hf import CONFIGS, VOCABULARY, write_config

transformers = pytest.importorskip("transformers")


def section(name: str, directory: Path, **options: Any) -> HuggingFaceModel:
    write_config(name, directory)
    return HuggingFaceModel(hf=str(directory), options=options)


def test_a_model_is_built_without_weights_and_without_a_cache(tmp_path: Path) -> None:
    model = build_hf_model(section("llama", tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.config.use_cache is False


def test_parameters_are_fp32_for_any_dtype_of_the_file(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = HuggingFaceModel(hf=str(tmp_path))
    assert {parameter.dtype for parameter in build_hf_model(own).parameters()} == {torch.float32}
    assert weight_dtype_in_config(own) == torch.bfloat16


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_infinities_are_read_as_transformers_writes_them(kind: str, tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING[kind](num_hidden_layers=4).save_pretrained(tmp_path)
    for options in ({}, {"num_hidden_layers": 3}):
        config = build_hf_config(HuggingFaceModel(hf=str(tmp_path), options=options))
        assert list(config.time_step_limit) == [0.0, float("inf")]


LLAMA = CONFIGS["llama"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_attention_heads": 0}, "is not valid"),
        ({"model_type": ["llama"]}, "model_type, a text"),
        ({"vocab_size": 10**30}, "vocab_size is too large"),
        ({"vocab_size": 10**15, "hidden_size": 10**9}, "transformers cannot build"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is too large"),
        ({"hidden_act": "os.system"}, "transformers cannot build"),
        ({"rope_parameters": [1]}, "is not valid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_of_an_impossible_model_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    with pytest.raises(SpecError, match=says):
        build_hf_model(HuggingFaceModel(hf=str(tmp_path)))


def test_a_model_of_too_many_parameters_or_too_large_tables_is_refused_while_it_is_constructed() -> None:
    for construct, says in (
        (lambda: nn.ParameterList(torch.empty(0) for _ in range(10**9)), "too many parameters"),
        (lambda: torch.ones(10**6, 10**6, dtype=torch.bool), "a table that is too large"),
        (lambda: torch.arange(10**12), "a table that is too large"),
    ):
        with pytest.raises(SpecError, match=says):
            construct_with_meta_parameters(construct, most_parameters=100)


def test_a_config_that_names_no_class_is_of_a_causal_language_model(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIGS["llama"].items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(build_hf_model(HuggingFaceModel(hf=str(tmp_path)))).__name__ == "LlamaForCausalLM"


def test_options_override_values_of_the_config(tmp_path: Path) -> None:
    model = build_hf_model(section("gpt2", tmp_path, num_hidden_layers=2, n_inner=40))
    assert (len(model.transformer.h), model.transformer.h[0].mlp.c_fc.nf) == (2, 40)


def test_scaling_of_positions_keeps_the_base_of_the_rotation(tmp_path: Path) -> None:
    built = section("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    build_hf_model(built).config.save_pretrained(tmp_path)
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = build_hf_model(HuggingFaceModel(hf=str(tmp_path), options=scaled)).config
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["factor"]) == (5e5, 2.0)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_scaling_of_positions_replaces_that_of_an_older_config(name: str, tmp_path: Path) -> None:
    old = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | old))
    options = {name: {"rope_type": "dynamic", "factor": 2.0}}
    config = build_hf_model(HuggingFaceModel(hf=str(tmp_path), options=options)).config
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("dynamic", 2.0, 5e5)


def test_options_change_the_lists_that_a_config_makes_of_them(tmp_path: Path) -> None:
    section("smollm3", tmp_path)
    build_hf_model(HuggingFaceModel(hf=str(tmp_path))).config.save_pretrained(tmp_path)
    options = {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16}
    config = build_hf_model(HuggingFaceModel(hf=str(tmp_path), options=options)).config
    assert config.no_rope_layers == [1, 0, 1]
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_factor_of_a_balance_loss_that_is_not_computed_is_noted(asked: bool, tmp_path: Path) -> None:
    options = {"router_aux_loss_coef": 5.0} | ({"output_router_logits": True} if asked else {})
    model = build_hf_model(section("mixtral", tmp_path, **options))
    assert (unused_balance_loss_factor_note(model, options) is None) == asked
    assert unused_balance_loss_factor_note(model, {}) is None
    assert (unused_balance_loss_factor_note(model, {"text_config": options}) is None) == asked


def test_an_option_of_a_part_is_a_table(tmp_path: Path) -> None:
    model = build_hf_model(section("clip", tmp_path, text_config={"num_hidden_layers": 1}))
    layers = [len(tower.encoder.layers) for tower in (model.text_model, model.vision_model)]
    assert layers == [1, 3]


@pytest.mark.parametrize("layers", [2, 5])
def test_lists_of_one_entry_a_layer_follow_the_number_of_layers(layers: int, tmp_path: Path) -> None:
    config = CONFIGS["smollm3"] | {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_hf_model(HuggingFaceModel(hf=str(tmp_path), options={"num_hidden_layers": layers}))
    assert len(model.model.layers) == len(model.config.no_rope_layers) == layers


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"options": {"num_hidden_layer": 2}}, "model.options.num_hidden_layers"),
        ({"options": {"dtype": "bfloat16"}}, "adapter.base_dtype"),
        ({"options": {"_attn_implementation": "eager"}}, "model.attention"),
        ({"options": {"model_type": "qwen2"}}, "model.hf"),
        ({"options": {"num_attention_heads": 3}}, "not valid"),
        ({"options": {"num_hidden_layers": 10**9}}, "num_hidden_layers is too large"),
        ({"architecture": "LlamaForCausalML"}, 'model.architecture = "LlamaForCausalLM"'),
        ({"attention": "none_such"}, "none_such"),
    ],
)
def test_settings_that_transformers_cannot_build_are_refused(
    own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config("llama", tmp_path)
    with pytest.raises(SpecError, match=message):
        build_hf_model(HuggingFaceModel(hf=str(tmp_path), **own))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "none of them"}, "has no model 'none of them'"),
        ({"hidden_size": 8}, "is not a config.json of a model"),
        ({"model_type": "llama", "architectures": ["SomebodysOwn"]}, "has no model class 'SomebodysOwn'"),
    ],
)
def test_a_config_that_transformers_does_not_know_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=message):
        build_hf_model(HuggingFaceModel(hf=str(tmp_path)))


@pytest.mark.parametrize(("name", "causal"), [("gpt2", True), ("t5", False), ("bert", False), ("vit", False)])
def test_models_that_predict_the_next_token_are_recognised(name: str, causal: bool, tmp_path: Path) -> None:
    assert is_causal_lm(build_hf_model(section(name, tmp_path))) is causal


def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    model = build_hf_model(section("gpt2", tmp_path))
    fits, longer = (
        Run.load(overrides=[f"model.hf={tmp_path}", f"data.sequence_length={length}"]) for length in (32, 33)
    )
    check_sequence_length(model, fits)
    with pytest.raises(SpecError, match="max_position_embeddings = 32"):
        check_sequence_length(model, longer)


def test_rows_longer_than_the_positions_of_an_encoder_are_refused(tmp_path: Path) -> None:
    """Except data from Python, whose rows have lengths of their own."""
    model = build_hf_model(section("bert", tmp_path))
    longest = model.config.max_position_embeddings
    longer = [f"model.hf={tmp_path}", f"data.sequence_length={longest + 1}"]
    with pytest.raises(SpecError, match=f"max_position_embeddings = {longest}"):
        check_sequence_length(model, Run.load(overrides=longer))
    own = ["data.source=python", 'data.factory="package.module:make"']
    check_sequence_length(model, Run.load(overrides=[*longer, *own]))


def test_rows_longer_than_the_positions_behind_the_padding_row_are_refused(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        **CONFIGS["roberta"] | {"max_position_embeddings": 34, "pad_token_id": 1}
    )
    model = transformers.RobertaForMaskedLM(config)
    fits, longer = (Run.load(overrides=["model.hf=x", f"data.sequence_length={size}"]) for size in (32, 33))
    check_sequence_length(model, fits)
    model(torch.zeros(1, 32, dtype=torch.long))
    with pytest.raises(SpecError, match=r"first 2 are not used\n.*sequence_length = 32, .* = 35"):
        check_sequence_length(model, longer)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.zeros(1, 33, dtype=torch.long))


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model, run = build_hf_model(section("llama", tmp_path)), Run.load(overrides=[f"model.hf={tmp_path}"])
    check_vocabulary(run, token_count=VOCABULARY, model=model)
    check_vocabulary(run, token_count=None, model=model)
    with pytest.raises(SpecError, match=f"tokens up to {VOCABULARY}, and a vocabulary of {VOCABULARY}"):
        check_vocabulary(run, token_count=VOCABULARY + 1, model=model)

"""Exported models load in transformers and peft with the same tensors and outputs."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import save
from fullshard.cli.main import main
from fullshard.data.tokenizer import open_tokenizer
from fullshard.errors import CheckpointError, FullshardError, SpecError
from fullshard.models.build import build_model
from fullshard.models.huggingface import build_hf_model
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import add_end_tokens, describe_for_transformers, export_hf, find_end_tokens
from fullshard.weights.names import llama_weight_map
from fullshard.weights.pretrained import load_pretrained
from tests.checkpoint.states import assert_same
from tests.checkpoint.states import saved as saved_numbers
from tests.checkpoint.test_strangers import rewrite_manifest_text
from tests.data.samples import CHAT, save_tokenizer
from tests.fakes.architectures_hf import CONFIGS
from tests.fakes.plans import plan_of
from tests.fakes.sampling import sampled
from tests.weights.hugging_face import hugging_face, outcome, whole


def saved(directory: Path, name: str, *settings: str) -> dict[str, Tensor]:
    """Imported on these ranks and saved by them; its tensors, whole."""
    plan = plan_of(dist.get_world_size(), f"model.hf={directory / 'in'}", *settings)
    model = shard(build_hf_model(HuggingFaceModel(hf=str(directory / "in"))), plan, init="none")
    load_pretrained(model, directory / "in", plan=plan)
    save(TrainState(model, build_optimizer(model, plan)), directory / "run" / "checkpoints", plan=plan)
    return {n: whole(t) for n, t in model.state_dict().items()}


def loaded_by_transformers(directory: Path, like: nn.Module) -> nn.Module:
    return type(like).from_pretrained(directory).eval()


@pytest.mark.parametrize("name", sampled(CONFIGS, here=["llama"]))
def test_save_export_from_pretrained_gives_the_same_tensors_and_logits(ranks, tmp_path, name):
    model = hugging_face(name, tmp_path / "in")
    ranks(3).run(saved, tmp_path, name)
    export_hf(tmp_path / "run" / "checkpoints", tmp_path / "out", shard_bytes=30_000)
    back = loaded_by_transformers(tmp_path / "out", model)
    assert_same(back.state_dict(), {n: t.detach() for n, t in model.state_dict().items()})
    assert torch.equal(outcome(back, name), outcome(model, name))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "use_cache" not in config
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    assert config["dtype"] == "float32"
    assert {part["dtype"] for part in parts if "dtype" in part} == {"float32"}
    assert not any("torch_dtype" in part for part in parts)


def test_an_export_in_bf16_rounds_each_number_and_brings_the_tokenizer(ranks, tmp_path):
    model = hugging_face("llama", tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    tokenizer = f"data.tokenizer={tmp_path / 'in' / 'tokenizer.json'}"
    ranks(2).run(saved, tmp_path, "llama", "sharding.strategy=zero1", tokenizer)
    command = [
        "ckpt",
        "export",
        str(tmp_path / "run"),
        str(tmp_path / "out"),
        "--format",
        "hf",
        "--dtype",
        "bf16",
    ]
    assert main(command) == 0
    back = loaded_by_transformers(tmp_path / "out", model)
    assert_same(back.state_dict(), {n: t.detach().bfloat16() for n, t in model.state_dict().items()})
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_the_chat_template_that_was_trained_with_is_exported(ranks, tmp_path):
    hugging_face("llama", tmp_path / "in")
    for name, text in (("tokenizer.json", "{}"), ("chat_template.jinja", "theirs"), ("own.jinja", "ours")):
        (tmp_path / ("own.jinja" if name == "own.jinja" else f"in/{name}")).write_text(text)
    more = "additional_chat_templates/tool_use.jinja"
    (tmp_path / "in" / more).parent.mkdir()
    (tmp_path / "in" / more).write_text("calls")
    chat = ("data.source=jsonl", "data.records=messages", 'data.paths=["chat.jsonl"]')
    files = (f"data.tokenizer={tmp_path / 'in'}", f"data.chat_template={tmp_path / 'own.jinja'}")
    ranks(2).run(saved, tmp_path, "llama", *chat, *files)
    export_hf(tmp_path / "run" / "checkpoints", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "ours"
    assert not (tmp_path / "out" / more).exists()  # the one template was also that of calls
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    rewrite_manifest_text(path, (path / "manifest.json").read_text().replace("own.jinja", "id_rsa"))
    (tmp_path / "id_rsa").write_text("secret")  # a checkpoint of somebody else names any file
    (tmp_path / "in" / "generation_config.json").write_text("[" * 100_000)
    export_hf(path, tmp_path / "others")
    assert not [one for one in (tmp_path / "others").iterdir() if b"secret" in one.read_bytes()]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "in").symlink_to(tmp_path / "in")
    ranks(2).run(saved, tmp_path / "own", "llama", *chat, files[0])
    export_hf(tmp_path / "own" / "run" / "checkpoints", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "chat_template.jinja").read_text() == "theirs"
    assert (tmp_path / "theirs" / more).read_text() == "calls"


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
POSITIONS = {
    "llama": (
        {"rope_parameters": {"rope_theta": 700.0, "original_max_position_embeddings": 8, **LLAMA3}},
        {"rope_theta": 700.0, "rope_scaling": {"original_max_position_embeddings": 8, **LLAMA3}},
    ),
    "gemma3": ({}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}),
    "gpt_neox": ({}, {"rotary_emb_base": 10_000.0, "rotary_pct": 0.5}),
    "phi": ({}, {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_have_the_names_of_transformers_4_too_and_transformers_5_reads_the_same_model(name):
    transformers = pytest.importorskip("transformers")
    changes, expected = POSITIONS[name]
    before = transformers.AutoConfig.for_model(**(CONFIGS[name] | changes))
    recorded = {**json.loads(before.to_json_string()), "architectures": CONFIGS[name]["architectures"]}
    written = describe_for_transformers(recorded, None, doing="").config
    assert {key: written.get(key) for key in expected} == expected
    again = type(before).from_dict(written)
    assert again.rope_parameters == before.rope_parameters


def decoder_logits(directory: Path, *settings: str) -> Tensor:
    plan = plan_of(dist.get_world_size(), *settings)
    model = shard(build_model(plan.run), plan)
    save(TrainState(model, build_optimizer(model, plan)), directory / "checkpoints", plan=plan)
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12))


@pytest.mark.parametrize("tied", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_the_reference_decoder_is_a_llama(ranks, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    sizes = (
        "model.d_model=32",
        "model.layers=2",
        "model.d_ff=40",
        "model.rope_theta=500",
        f"model.tied={tied}",
    )
    logits = ranks(2).run(decoder_logits, tmp_path, *sizes)[0]
    export_hf(tmp_path / "checkpoints", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 500
        assert torch.allclose(back(torch.arange(24).reshape(2, 12)).logits, logits, atol=1e-6)


def test_models_that_transformers_lacks_are_refused(tmp_path):
    saved_numbers(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="only models that transformers knows"):
        export_hf(tmp_path / "checkpoints", tmp_path / "out")


def test_names_that_llama_lacks_are_refused_with_the_format_that_takes_them():
    with pytest.raises(CheckpointError, match=r"(?s)the model cannot.*--format safetensors"):
        llama_weight_map({"blocks.0.a.bias": (2,)})


def test_other_dtypes_of_an_export_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(SpecError, match="no dtype of an export"):
        export_hf(tmp_path / "none", tmp_path / "out", dtype="fp16")


def test_a_directory_that_holds_weights_is_left_alone(ranks, tmp_path):
    hugging_face("llama", tmp_path / "in")
    ranks(2).run(saved, tmp_path, "llama")
    before = (tmp_path / "in" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds weights already"):
        export_hf(tmp_path / "run" / "checkpoints", tmp_path / "in")
    assert (tmp_path / "in" / "model.safetensors").read_bytes() == before


def saved_with_adapters(directory: Path) -> dict[str, Tensor]:
    settings = ("adapter.rank=3", "adapter.alpha=5", f"model.hf={directory / 'in'}")
    plan = plan_of(dist.get_world_size(), *settings)
    model = shard(build_model(plan.run), plan, init="none")
    load_pretrained(model, directory / "in", plan=plan)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:  # else the adapters would change nothing
                parameter.to_local().fill_(0.01 * number)
    save(TrainState(model, build_optimizer(model, plan)), directory / "checkpoints", plan=plan)
    return {n: whole(t) for n, t in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft, of transformers
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapters_load_in_peft_and_are_merged_as_peft_does(ranks, tmp_path, name):
    peft = pytest.importorskip("peft")
    model = hugging_face(name, tmp_path / "in")
    trained = ranks(2).run(saved_with_adapters, tmp_path)[0]
    adapted = {key.partition(".lora_")[0] for key in trained if ".lora_A." in key}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=sorted(adapted), fan_in_fan_out=name == "gpt2")
    by_peft = peft.get_peft_model(type(model).from_pretrained(tmp_path / "in"), config)
    by_peft.load_state_dict({f"base_model.model.{key}": value for key, value in trained.items()})
    expected = by_peft.merge_and_unload().state_dict()
    export_hf(tmp_path / "checkpoints", tmp_path / "out")
    got = loaded_by_transformers(tmp_path / "out", model).state_dict()
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(got[key], tensor, rtol=1e-6, atol=1e-7), key
    assert any(not torch.equal(got[key], tensor) for key, tensor in model.state_dict().items())


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
HOSTILE = [
    {"plan": {"strategy": 7}},
    {"values": {"huggingface": {}}},
    {"values": {"huggingface": {"architectures": [], "model_type": "llama"}}},
    {"values": {"huggingface": LLAMA | {"architectures": ["os"]}}},
    {"values": {"huggingface": LLAMA | {"architectures": [["LlamaForCausalLM"]]}}},
    {"values": {"huggingface": LLAMA | {"model_type": ["llama"]}}},
    {"values": {"huggingface": LLAMA | {"num_attention_heads": 0}}},
    {"values": {"huggingface": LLAMA | {"hidden_size": "many"}}},
    {"values": {"huggingface": LLAMA | {"hidden_size": 10**30}}},
]


@pytest.mark.parametrize("changed", HOSTILE, ids=str)
def test_a_manifest_that_describes_no_model_is_refused(tmp_path, changed):
    path = saved_numbers(tmp_path / "run", 1)
    manifest = read_manifest(path).model_copy(update=changed)
    (path / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(FullshardError):
        export_hf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("records", "ends"), [("text", "documents end"), ("messages", "turns end")])
@pytest.mark.parametrize("source", [True, False])
def test_configs_have_the_token_that_training_data_ends_with(tmp_path, caplog, records, ends, source):
    pytest.importorskip("transformers")
    tokenizer = save_tokenizer(tmp_path / "tok", template=CHAT)
    end = open_tokenizer(tokenizer).tokens_after_document[-1]
    data = [f"data.tokenizer={tokenizer}", "data.source=jsonl", 'data.paths=["a"]', f"data.records={records}"]
    found = find_end_tokens(Run.load(overrides=data))
    assert found == {end: ends}
    config = {"eos_token_id": 7}
    beside = {"generation_config.json": b'{"eos_token_id": [7, 8], "top_p": 0.5}'} if source else {}
    add_end_tokens(config, beside, ends=found)
    if source:
        made = json.loads(beside["generation_config.json"])
        assert made == {"eos_token_id": [7, 8, end], "top_p": 0.5}
    assert config == {"eos_token_id": [7, end]}
    assert f"{ends} with {end} in training" in caplog.text

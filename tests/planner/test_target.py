"""MODEL of `fullshard plan MODEL`, and the sequences of a step."""

import json
from pathlib import Path

import pytest

from fullshard.errors import PlanError, SpecError
from fullshard.planner.target import choose_global_batch, choose_hardware, resolve_model_to_plan
from fullshard.spec.pretrained import read_presets
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from tests.fakes.hardware import hardware_of


def write_config(directory: Path, config: dict[str, object]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("preset", read_presets(), ids=lambda preset: preset.name)
def test_a_preset_is_a_run_of_that_model(preset):
    run = resolve_model_to_plan(preset.name).load_run([])
    assert run.model == preset.model
    longest = preset.model.max_sequence if isinstance(preset.model, DecoderConfig) else 8192
    assert run.data.sequence_length == min(8192, longest)


def test_settings_of_the_user_override_the_preset():
    run = resolve_model_to_plan("llama3-8b").load_run(["data.sequence_length=512", "model.layers=2"])
    assert (run.data.sequence_length, run.decoder_config.layers, run.decoder_config.d_model) == (512, 2, 4096)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "llava", "text_config": {"max_position_embeddings": 77}}, 77),
        ({"model_type": "vit", "image_size": 224}, 1),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
    ],
)
def test_config_gives_the_length_of_sequences(config: dict[str, object], length: int, tmp_path: Path):
    path = write_config(tmp_path, config)
    run = resolve_model_to_plan(str(path)).load_run([])
    assert isinstance(run.model, HuggingFaceModel)
    assert (run.model.hf, run.data.sequence_length) == (str(path), length)


def test_run_file_keeps_its_batch(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nglobal_batch = 12\n")
    subject = resolve_model_to_plan(str(path))
    assert subject.load_run([]).train.global_batch == 12
    assert not subject.chosen_here


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lama3-8b", "llama3-8b"),
        ("org/absent", "no repository"),
        ("gpt2", "config.json"),
        ("absent.json", "no such file"),
        ("./absent", "no such file"),
    ],
)
def test_unknown_name_is_refused(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SpecError) as raised:
        resolve_model_to_plan(name)
    assert says in str(raised.value)


@pytest.mark.parametrize("text", ["{}", '{"layers": 3}', "no json"])
def test_a_file_that_is_no_model_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(SpecError):
        resolve_model_to_plan(str(path))


def run_of(length: int, *overrides: str) -> Run:
    return Run.load(overrides=[f"data.sequence_length={length}", f"model.max_sequence={length}", *overrides])


def test_tokens_per_step_are_whole_sequences():
    assert choose_global_batch(run_of(8192), tokens=128 * 8192, ranks=8, per_node=8) == (128, None)
    sequences, note = choose_global_batch(run_of(8192), tokens=4_000_000, ranks=8, per_node=8)
    assert sequences == 488
    assert note is not None
    assert "488.28 sequences" in note
    assert "3,997,696" in note
    sequences, _ = choose_global_batch(
        run_of(8192, "train.microbatch=3"), tokens=4_000_000, ranks=8, per_node=8
    )
    assert sequences % 24 == 0


def test_default_batch_is_a_million_tokens_or_one_sequence_per_rank():
    assert choose_global_batch(run_of(8192), tokens=None, ranks=8, per_node=8) == (128, None)
    sequences, note = choose_global_batch(run_of(8192), tokens=None, ranks=16384, per_node=1)
    assert sequences == 16384
    assert note is not None
    assert "134M tokens a step" in note


def test_fewer_tokens_than_ranks_can_share_are_refused():
    with pytest.raises(PlanError, match="too few for 16,384 ranks"):
        choose_global_batch(run_of(8192), tokens=16_000_000, ranks=16384, per_node=1)


def test_a_hardware_toml_of_too_many_ranks_is_refused(tmp_path: Path):
    hardware_of(2**20, 8).save(tmp_path / "hardware.toml")
    with pytest.raises(SpecError, match="too many ranks"):
        choose_hardware(str(tmp_path / "hardware.toml"), ranks=None, run=Run())

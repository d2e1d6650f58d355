"""Code that lies beside a model or a tokenizer runs only where the run asks for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.data.chat_template import ChatTemplate
from fullshard.errors import CheckpointError, DataError, SpecError
from fullshard.models.huggingface import build_hf_model, is_causal_lm
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.weights.names import build_meta_model
from tests.data.samples import CHAT, save_tokenizer
from tests.fakes.architectures_hf import CONFIGS

pytest.importorskip("transformers")

OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
# It needs the code for its config, for the class that it names, for the class that it does not name.
NEEDY: list[dict[str, Any]] = [
    CONFIGS["llama"] | {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": CLASSES},
    CONFIGS["llama"] | {"architectures": ["OwnForCausalLM"], "auto_map": CLASSES},
    {"model_type": "vit", "auto_map": CLASSES},
]


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Appears beside the code when the code runs; transformers' copy of the code stays in `tmp_path`."""
    for name in ("transformers.dynamic_module_utils.HF_MODULES_CACHE", "transformers.utils.HF_MODULES_CACHE"):
        monkeypatch.setattr(name, str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers may ask, and a pipe may answer
    path = tmp_path / "it-ran"
    (tmp_path / "own.py").write_text(OWN.format(marker=str(path)))
    return path


def section(directory: Path, config: dict[str, Any], **more: Any) -> HuggingFaceModel:
    (directory / "config.json").write_text(json.dumps(config))
    return HuggingFaceModel(hf=str(directory), **more)


@pytest.mark.parametrize("config", NEEDY)
def test_code_beside_a_model_does_not_run_unless_it_is_trusted(config, tmp_path, marker):
    with pytest.raises(SpecError, match=r"model\.trust_remote_code = true"):
        build_hf_model(section(tmp_path, config))
    assert not marker.exists()


def test_a_model_that_transformers_knows_runs_no_code_beside_it(tmp_path, marker):
    model = build_hf_model(section(tmp_path, CONFIGS["llama"] | {"auto_map": CLASSES}))
    assert not marker.exists()
    assert not hasattr(model.config, "auto_map")


def test_trusted_code_beside_a_model_runs(tmp_path, marker):
    model = build_hf_model(section(tmp_path, NEEDY[0], trust_remote_code=True))
    assert marker.exists()
    assert (type(model).__name__, is_causal_lm(model)) == ("OwnForCausalLM", True)


@pytest.mark.parametrize(
    ("architecture", "message"), [("OwnForCausalLM", "Python code"), ("TrainingArguments", "transformers")]
)
def test_a_config_in_a_checkpoint_makes_only_models_of_transformers(architecture, message, marker):
    config = CONFIGS["llama"] | {"architectures": [architecture], "auto_map": {}}
    config |= {"auto_map": CLASSES} if architecture.startswith("Own") else {}
    with pytest.raises(CheckpointError, match=message):
        build_meta_model(config, needed_for="exporting")
    assert not marker.exists()


def test_code_beside_a_tokenizer_runs_only_if_trusted(tmp_path, marker):
    path = save_tokenizer(tmp_path, template=CHAT)
    file = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(DataError, match=r"data\.trust_remote_code = true"):
        ChatTemplate(path)
    assert not marker.exists()
    ChatTemplate(path, trust_remote_code=True)
    assert marker.exists()

"""A config.json becomes a module without weights; without transformers, the extra is named."""

import importlib.util
import json
from pathlib import Path

import pytest

from fullshard.errors import MissingExtraError, SpecError
from fullshard.models.huggingface import meta_model

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 100}
INSTALLED = importlib.util.find_spec("transformers") is not None


def write(directory: Path, config: dict[str, object]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.skipif(INSTALLED, reason="transformers is installed")
def test_without_transformers_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"fullshard\[hf\]"):
        meta_model(write(tmp_path, GPT2))


@pytest.mark.skipif(not INSTALLED, reason="needs transformers")
def test_a_model_is_built_without_weights(tmp_path: Path) -> None:
    model = meta_model(write(tmp_path, GPT2))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not INSTALLED, reason="needs transformers")
def test_a_config_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no causal language model"):
        meta_model(write(tmp_path, {"model_type": "none of them"}))

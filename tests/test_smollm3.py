"""The worked example: its config is the preset's, its arithmetic is right, and it trains at reduced width."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.spec.pretrained import preset_or_none, read_config
from fullshard.spec.records.measurement import model_flops_per_token
from fullshard.spec.run import Run

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm3"


def figures(page: str) -> set[int]:
    """Whole numbers with commas between thousands."""
    found = re.findall(r"\b\d{1,3}(?:,\d{3})+\b", (ROOT / "docs" / page).read_text())
    return {int(one.replace(",", "")) for one in found}


def test_the_config_is_the_presets():
    config, preset = read_config(EXAMPLE / "config.json"), preset_or_none("smollm3-3b")
    assert preset is not None
    model = preset.model
    assert (config["num_hidden_layers"], config["hidden_size"]) == (model.layers, model.d_model)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (model.heads, model.kv_heads)
    assert (config["intermediate_size"], config["vocab_size"]) == (model.d_ff, model.vocabulary)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (model.rope_theta, model.norm_eps)
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (
        model.tied,
        model.max_sequence,
    )


def test_the_arithmetic_of_the_page_is_right():
    layers, d, key_value, feed, vocabulary, length = 36, 2048, 512, 11008, 128256, 8192
    block = 2 * d * d + 2 * d * key_value + 3 * d * feed + 2 * d
    whole = layers * block + d + vocabulary * d
    flops = model_flops_per_token(whole, layers=layers, d_model=d, sequence_length=length)
    without_head = model_flops_per_token(
        whole - vocabulary * d, layers=layers, d_model=d, sequence_length=length
    )
    more = model_flops_per_token(whole + 4 * block, layers=40, d_model=d, sequence_length=length)
    pairs = 12 * layers * d * length
    assert {block, whole, flops, flops - pairs, pairs, flops - pairs // 2, without_head, more} <= figures(
        "flops.md"
    )


@pytest.mark.parametrize("name", ["run.toml", "reduced.toml"])
def test_its_runs_load(name):
    run = Run.load(EXAMPLE / name)
    assert run.data.packing == "best_fit"
    assert run.data.document_mask


def test_its_stories_are_always_the_same(tmp_path, capsys):
    for directory in ("one", "other"):
        runpy.run_path(str(EXAMPLE / "stories.py"))["main"](str(tmp_path / directory), 20)
    one, other = ((tmp_path / name / "stories.jsonl").read_text() for name in ("one", "other"))
    assert one == other
    assert all("{" not in json.loads(line)["text"] for line in one.splitlines())


@pytest.mark.long
def test_it_trains_at_reduced_width(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "smollm3")
    command = [sys.executable, "examples/smollm3/stories.py", "stories"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    settings = ["train.steps=4", "data.cache=cache", "train.validate_sequences=2"]
    command = [sys.executable, "-m", "fullshard", "train", "examples/smollm3/reduced.toml", "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=280, capture_output=True, text=True)
    measurement = json.loads(done.stdout)
    assert measurement["last_loss"] < measurement["first_loss"]
    assert measurement["strategy"] == "full_shard"

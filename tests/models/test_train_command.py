"""`fullshard train` with models that people bring: from weights, resumed, and on batches of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.spec.records.measurement import Measurement
from tests.fakes.architectures_hf import write_config
from tests.models.test_architectures_hf import of_transformers

SMALL = [
    "data.sequence_length=16",
    "train.global_batch=4",
    "train.validate_sequences=4",
    "run.device=cpu",
    "run.ranks=2",
]


def train(directory: Path, *settings: str, resume: bool = False) -> str:
    """Runs `fullshard train`; returns its standard error and output."""
    sets = [part for each in (*SMALL, f"run.dir={directory}", *settings) for part in ("--set", each)]
    argv = [sys.executable, "-m", "fullshard", "train", *(["--resume"] if resume else []), *sets]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.long
def test_a_model_of_transformers_trains_from_its_weights_and_resumes(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_config("llama", source)
    model = of_transformers("llama", vocab_size=256)
    model.save_pretrained(source)
    settings = (f"model.hf={source}", "model.weights=require", "data.source=stdlib")
    said = train(tmp_path / "run", *settings, "train.steps=3")
    assert f"tensors from {source}" in said
    assert "resumed at step 3 of 4" in train(tmp_path / "run", *settings, "train.steps=4", resume=True)
    measured = Measurement.load(tmp_path / "run" / "measurement.json")
    assert measured.flops_per_token is not None


@pytest.mark.long
def test_a_model_with_batches_of_a_factory_trains(tmp_path: Path) -> None:
    write_config("t5", tmp_path)
    given = ("data.source=python", "data.factory=tests.models.own:Given", "data.options.name=t5")
    train(tmp_path / "run", f"model.hf={tmp_path}", *given, "train.steps=2")

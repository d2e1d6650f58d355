"""The checks of a model complain about no family of transformers that is as it should be."""

import json
from pathlib import Path

import pytest

from fullshard.jobs.checks.every_check import iterate_findings
from fullshard.jobs.checks.model_trial import ModelTrial, build_model_trial
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.families import FAMILIES
from tests.fakes.sampling import sampled


def plan_of_family(name: str, directory: Path, *, own_batches: bool) -> Plan:
    (directory / "config.json").write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
    settings = [f"model.hf={directory}", "precision.mode=fp32", "data.sequence_length=12"]
    if own_batches:
        factory = "data.factory=tests.fakes.families:FamilyBatches"
        settings += ["data.source=python", factory, f"data.options.name={name}"]
    return Plan.from_run(Run.load(overrides=settings), world_size=2)


def complaints(name: str, directory: Path) -> list[str]:
    """Problems that the checks of the model find, on random tokens if it is a causal language model."""
    plan = plan_of_family(
        name, directory, own_batches=not FAMILIES[name]["architectures"][0].endswith("CausalLM")
    )
    return [one.text for one in iterate_findings(build_model_trial(plan), group="model") if one.is_problem]


@pytest.mark.parametrize("name", sampled(FAMILIES, here=["llama"]))
def test_no_complaint_about_any_family(name: str, tmp_path: Path) -> None:
    assert complaints(name, tmp_path) == []


def test_a_copy_of_a_large_model_is_small_enough_to_compute_with(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 500}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"] | sizes | heads), encoding="utf-8")
    run = Run.load(overrides=[f"model.hf={tmp_path}", "data.sequence_length=12", "precision.mode=fp32"])
    trial = build_model_trial(Plan.from_run(run, world_size=2))
    assert isinstance(trial, ModelTrial)
    assert "a copy with few layers, 64 wide" in trial.description
    assert sum(one.numel() for one in trial.build().parameters()) < 1_000_000

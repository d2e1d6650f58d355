"""An export of adapters computes the trained outputs or is refused, also at the start of the run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from fullshard.models.adapters import iterate_adapted_layers
from fullshard.models.build import build_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import export_hf, layer_merging_by_name
from fullshard.weights.export_peft import describe_impossible_exports, export_peft
from fullshard.weights.pretrained import load_pretrained
from fullshard.weights.tensor_source import Weights
from tests.fakes.plans import plan_of
from tests.weights.hugging_face import hugging_face, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of much


def random_adapters(directory: Path, *settings: str) -> tuple[nn.Module, Run]:
    """The model in `directory` with adapters, everything that is trained random, saved as a checkpoint."""
    plan = plan_of(1, f"model.hf={directory / 'base'}", "adapter.rank=4", "adapter.alpha=6", *settings)
    model = materialize(build_model(plan.run), seed=0)
    load_pretrained(model, directory / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    save(TrainState(model, torch.optim.SGD(model.parameters())), directory / "checkpoints", plan=plan)
    return model.eval(), plan.run


def loaded_export(form: str, directory: Path, base: type[Any], *, weights: Weights = "model") -> nn.Module:
    if form == "hf":
        export_hf(directory / "checkpoints", directory / "hf", weights=weights)
        return base.from_pretrained(directory / "hf").eval()
    peft = pytest.importorskip("peft")
    export_peft(directory / "checkpoints", directory / "peft", weights=weights)
    return peft.PeftModel.from_pretrained(base.from_pretrained(directory / "base"), directory / "peft").eval()


@pytest.mark.parametrize(
    ("name", "settings", "refused"),
    [
        ("llama", [], set()),
        ("llama", ['adapter.trained=["norm"]'], set()),
        pytest.param("llama", ['adapter.trained=["lm_head", "embed_tokens"]'], set(), marks=pytest.mark.long),
        ("llama", ["adapter.options={rank_pattern = {q_proj = 2}, alpha_pattern = {k_proj = 9}}"], set()),
        pytest.param("llama", ["adapter.options={layers_to_transform = [0]}"], set(), marks=pytest.mark.long),
        ("llama", ["adapter.options={lora_bias = true}", 'adapter.targets=["q_proj"]'], {"hf"}),
        pytest.param("gpt2", ['adapter.options={bias = "all"}'], set(), marks=pytest.mark.long),
        ("gpt2", ['adapter.options={bias = "lora_only"}'], set()),
        ("gpt2", ['adapter.targets=["wte"]'], {"hf"}),
        ("gpt2", ['adapter.trained=["wte"]'], set()),
        pytest.param("gpt2", ['adapter.trained=["ln_1", "ln_f"]'], set(), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_export_computes_the_outputs_of_the_trained_model_or_is_refused(
    tmp_path: Path, name: str, settings: list[str], refused: set[str]
) -> None:
    original = hugging_face(name, tmp_path / "base")
    model, run = random_adapters(tmp_path, *settings)
    expected = outcome(model, name)
    assert not torch.allclose(expected, outcome(original, name), atol=1e-2)
    lines = describe_impossible_exports(run, model)
    assert {line.partition("--format ")[2].partition(":")[0] for line in lines} == refused
    for form in ("peft", "hf"):
        if form in refused:
            with pytest.raises(CheckpointError):
                loaded_export(form, tmp_path, type(original))
        else:
            got: Tensor = outcome(loaded_export(form, tmp_path, type(original)), name)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_averages_of_adapters_are_exported_in_both_formats(tmp_path: Path) -> None:
    original = hugging_face("llama", tmp_path / "base")
    model, run = random_adapters(tmp_path, 'adapter.trained=["norm"]', "ema.decay=0.5")
    expected = outcome(model, "llama")
    state = TrainState(model, torch.optim.SGD(model.parameters()), ema=True)
    assert state.average is not None
    state.average.begin()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(3)
    shutil.rmtree(tmp_path / "checkpoints")
    save(state, tmp_path / "checkpoints", plan=Plan.from_run(run, world_size=1))
    for form in ("peft", "hf"):
        back = loaded_export(form, tmp_path, type(original), weights="ema")
        torch.testing.assert_close(outcome(back, "llama"), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(outcome(model, "llama"), expected, atol=1e-2)


def test_a_run_that_saves_adapters_alone_reports_that_they_cannot_be_merged(tmp_path: Path) -> None:
    hugging_face("llama", tmp_path / "base")
    model, run = random_adapters(tmp_path)
    assert describe_impossible_exports(run, model) == []
    (line,) = describe_impossible_exports(run.with_overrides(["adapter.save=adapters"]), model)
    assert "--format hf" in line


def test_an_adapter_that_is_not_added_to_its_layer_is_not_merged(tmp_path: Path) -> None:
    hugging_face("llama", tmp_path / "base")
    run = plan_of(1, f"model.hf={tmp_path / 'base'}", "adapter.rank=4").run
    model = build_model(run)
    base = build_model(run.model_copy(update={"adapter": Run().adapter}))
    layer: Any = next(layer for _, layer in iterate_adapted_layers(model))
    assert layer_merging_by_name(model, base=base)
    layer.lora_variant["default"] = object()  # as DoRA sets it
    with pytest.raises(CheckpointError, match="cannot be merged"):
        layer_merging_by_name(model, base=base)

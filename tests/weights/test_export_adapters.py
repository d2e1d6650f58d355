"""An export of adapters computes the trained outputs or is refused, also at the start of the run."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from fullshard.models.adapters import iterate_adapted_layers
from fullshard.models.build import build_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import export_hf, layer_merging_by_name
from fullshard.weights.export_peft import describe_impossible_exports, export_peft
from fullshard.weights.pretrained import load_pretrained
from fullshard.weights.tensor_source import Weights
from tests.fakes.architectures_hf import VOCABULARY
from tests.fakes.data import Rows
from tests.fakes.plans import plan_of
from tests.weights.hugging_face import hugging_face, outcome, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of much


def random_adapters(directory: Path, *settings: str) -> tuple[nn.Module, Run]:
    """The model in `directory` with adapters, all that is not frozen random, saved as a checkpoint."""
    plan = plan_of(1, f"model.hf={directory / 'base'}", "adapter.rank=4", "adapter.alpha=6", *settings)
    model = materialize(build_model(plan.run), seed=0)
    load_pretrained(model, directory / "base")
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    for name, one in model.state_dict().items():  # with buffers
        if name not in frozen:
            one.add_(torch.randn_like(one) / 8)
    save(TrainState(model, torch.optim.SGD(model.parameters())), directory / "checkpoints", plan=plan)
    return model.eval(), plan.run


def loaded_export(form: str, directory: Path, base: type[Any], *, weights: Weights = "model") -> nn.Module:
    if form == "hf":
        export_hf(directory / "checkpoints", directory / "hf", weights=weights)
        return base.from_pretrained(directory / "hf").eval()
    peft = pytest.importorskip("peft")
    export_peft(directory / "checkpoints", directory / "peft", weights=weights)
    return peft.PeftModel.from_pretrained(base.from_pretrained(directory / "base"), directory / "peft").eval()


STACKS = 'target_parameters = ["experts.gate_up_proj", "experts.down_proj"]'
GATED = 'targets=["o_proj", "gate_proj", "up_proj", "down_proj"]'
DORA, ROOT = "options={use_dora = true}", "use_rslora = true"
QUICK_KINDS: list[tuple[str, list[str], set[str]]] = [
    ("llama", ['trained=["norm"]'], set()),
    ("llama", ["options={rank_pattern = {q_proj = 2}, alpha_pattern = {k_proj = 9}}"], set()),
    ("llama", ["options={lora_bias = true}", 'targets=["q_proj"]'], {"hf"}),
    ("llama", [DORA, 'trained=["norm", "lm_head"]'], {"hf"}),
    ("gpt2", [f'options={{bias = "lora_only", {ROOT}}}'], set()),
    ("gpt2", ['targets=["wte"]'], {"hf"}),
    ("gpt2", ['trained=["wte"]'], set()),
    ("mixtral", ['targets=["q_proj", "w1", "w2", "w3"]', 'trained=["norm"]'], set()),
    ("gpt_oss", ['targets=["q_proj"]', f"options={{{STACKS}}}"], set()),
    ("deepseek_v3", ['targets=["o_proj"]', 'trained=["gate"]'], set()),  # with a buffer
    ("mamba2", ['targets=["in_proj"]'], set()),  # with an infinity in its config
]
LINEAR_KINDS: list[tuple[str, list[str], set[str]]] = [
    *((name, [], set()) for name in ("llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "opt")),
    *((name, [], set()) for name in ("t5", "bart", "bert", "vit", "clip", "whisper", "llava", "cohere")),
    ("recurrent_gemma", [], set()),
    ("mamba", ['targets=["in_proj", "x_proj"]'], set()),
    ("llama", ["options={layers_to_transform = [0]}"], set()),
    ("llama", ['targets=["embed_tokens", "q_proj", "lm_head"]'], set()),
    ("llama", ["options={target_parameters = ['q_proj.weight']}", 'targets=["v_proj"]'], set()),
    ("gpt2", ['targets=["lm_head", "c_attn"]'], {"hf"}),
    ("gpt2", ['targets=["wpe", "c_attn"]', 'options={task_type = "CAUSAL_LM"}'], set()),
    ("falcon", [], {"hf"}),  # its linear modules have a forward of their own
    ("vit", ['targets=["projection", "q_proj"]'], {"hf"}),
    ("vit", ['options={task_type = "SEQ_CLS"}'], {"peft"}),  # for which peft expects a trained classifier
    ("vit", ['options={task_type = "SEQ_CLS"}', 'trained=["classifier"]'], set()),
]
EXPERT_KINDS: list[tuple[str, list[str], set[str]]] = [
    ("mixtral", ['targets=["gate"]'], set()),
    ("mixtral", ['targets=["w2"]', f"options={{{ROOT}}}"], set()),
    ("mixtral", ["options={target_parameters = ['experts.down_proj', 'mlp.gate.weight']}"], set()),
    ("mixtral", ['trained=["experts"]', 'targets=["q_proj"]', f"options={{{STACKS}}}"], set()),
    ("qwen3_moe", ['targets=["gate_proj", "up_proj", "down_proj"]'], set()),
    ("qwen3_moe", [f"options={{{STACKS}, rank_pattern = {{'experts.down_proj' = 2}}}}"], set()),
    ("qwen3_moe", ["targets=[]", f"options={{{STACKS}, alpha_pattern = {{gate_up_proj = 3}}}}"], set()),
    ("olmoe", [f"options={{{STACKS}, init_lora_weights = 'gaussian'}}"], set()),
    ("gpt_oss", ['trained=["lm_head", "router"]', f"options={{{STACKS}, bias = 'all'}}"], set()),
    *((name, [GATED], set()) for name in ("olmoe", "deepseek_v3", "jamba", "qwen3_next")),
    *((name, ["targets=[]", f"options={{{STACKS}}}"], set()) for name in ("granitemoe", "phimoe")),
]
DORA_KINDS: list[tuple[str, list[str], set[str]]] = [
    ("llama", [f"options={{use_dora = true, {ROOT}, alpha_pattern = {{q_proj = 3}}}}"], {"hf"}),
    ("llama", ['targets=["embed_tokens", "q_proj"]', DORA], {"hf"}),
    ("llama", ['targets=["q_proj"]', 'trained=["layers.0"]', DORA], {"hf"}),
    ("gpt2", ['targets=["wte", "c_attn"]', DORA], {"hf"}),
    ("qwen3", ['trained=["q_norm", "k_norm"]', DORA], {"hf"}),
    ("vit", ['targets=["projection"]', DORA], {"hf"}),
    *((name, [DORA], {"hf"}) for name in ("gemma3", "phi3", "falcon", "deepseek_v3", "t5", "bert")),
]
TRAINED_KINDS: list[tuple[str, list[str], set[str]]] = [
    ("llama", ['trained=["lm_head", "embed_tokens"]'], set()),
    ("llama", ['trained=["self_attn"]', 'targets=["q_proj"]'], set()),
    ("llama", [f"options={{{ROOT}, rank_pattern = {{q_proj = 2}}}}"], set()),
    ("gpt2", ['trained=["ln_1", "ln_f"]', 'options={bias = "all"}'], set()),
    ("qwen2", ['targets=["o_proj"]', f'options={{bias = "all", {ROOT}}}'], set()),  # of other modules
    ("qwen2", ['trained=["lm_head"]'], set()),  # tied, as in all of these
    ("qwen2", ['trained=["lm_head"]', 'targets=["q_proj", "embed_tokens"]'], {"hf"}),
    ("gemma3", ['trained=["lm_head", "norm"]', 'targets=["q_proj", "embed_tokens"]'], {"hf"}),
    ("t5", ['trained=["shared", "relative_attention_bias"]'], set()),
    ("bart", ['trained=["shared", "layernorm_embedding"]', 'options={bias = "all"}'], set()),
    ("bert", ['trained=["predictions"]', 'targets=["query"]', 'options={bias = "lora_only"}'], set()),
    ("opt", ['trained=["fc1", "final_layer_norm"]', "options={lora_bias = true}"], {"hf"}),
]
LONG_KINDS = [*LINEAR_KINDS, *EXPERT_KINDS, *DORA_KINDS, *TRAINED_KINDS]
KINDS = [*QUICK_KINDS, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG_KINDS)]


@pytest.mark.parametrize(("name", "settings", "refused"), KINDS, ids=str)
def test_an_export_is_the_trained_model_or_is_refused(
    tmp_path: Path, name: str, settings: list[str], refused: set[str]
) -> None:
    """peft's, to the bit; the merged one as peft merges."""
    original = hugging_face(name, tmp_path / "base")
    model, run = random_adapters(tmp_path, *(f"adapter.{one}" for one in settings))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pattern keys did not match")
        lines = describe_impossible_exports(run, model)
    assert (", DoRA of" in "".join(lines)) is any("use_dora" in one for one in settings)
    assert {line.partition("--format ")[2].partition(":")[0] for line in lines} == refused
    model.requires_grad_(
        False
    )  # as what is loaded: torch may choose another matmul for weights with gradients
    expected = outcome(model, name)
    assert not torch.allclose(expected, outcome(original, name), atol=1e-2)
    for form in refused:
        with pytest.raises(CheckpointError):
            loaded_export(form, tmp_path, type(original))
    if "peft" not in refused:
        adapted: Any = loaded_export("peft", tmp_path, type(original))
        assert torch.equal(outcome(adapted, name), expected)
    if not refused:
        merged = loaded_export("hf", tmp_path, type(original))
        torch.testing.assert_close(outcome(merged, name), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            merged.state_dict(), adapted.merge_and_unload().state_dict(), rtol=0, atol=1e-6
        )


def train_and_save(run: Run, base: Path, directory: Path) -> dict[str, Tensor]:
    """Returns the trained parameters, whole."""
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(build_model(run), plan, init="none")
    load_pretrained(model, base, plan=plan)
    for _, layer in iterate_adapted_layers(model):
        for magnitude in layer.lora_magnitude_vector.values():
            norms = torch.linalg.norm(whole(layer.base_layer.weight), dim=1)
            assert torch.equal(whole(magnitude.weight), norms)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    for _ in train(state, plan):
        pass
    save(state, directory, plan=plan)
    return {name: whole(one) for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", ["adapter.options={use_dora = true}", 'adapter.trained=["norm"]']),
        ("mixtral", ['adapter.targets=["q_proj", "w1", "w2", "w3"]']),
    ],
)
def test_peft_loads_the_model_that_two_ranks_trained(
    name: str, settings: list[str], tmp_path: Path, ranks: Any
) -> None:
    original = hugging_face(name, tmp_path / "base")
    small = ["train.steps=3", "data.sequence_length=9", "optimizer.learning_rate=0.1"]
    adapted = [f"model.hf={tmp_path / 'base'}", "adapter.rank=4", "schedule.warmup_steps=0"]
    plan = plan_of(1, *small, *adapted, *settings)
    trained, _ = ranks(2).run(train_and_save, plan.run, tmp_path / "base", tmp_path / "checkpoints")
    model = materialize(build_model(plan.run), seed=0).eval()
    load_pretrained(model, tmp_path / "base")
    model.load_state_dict(trained, strict=False)
    expected = outcome(model, name)
    assert not torch.allclose(expected, outcome(original, name), atol=1e-2)
    assert torch.equal(outcome(loaded_export("peft", tmp_path, type(original)), name), expected)


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


def test_a_base_that_is_not_that_of_the_files_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hugging_face("llama", tmp_path / "base")
    model, run = random_adapters(tmp_path, "model.options={num_hidden_layers = 2}")
    packed = run.with_overrides(["adapter.base_dtype=nf4"])
    first, line = describe_impossible_exports(packed, model)
    assert "adapter.base_dtype = 'nf4'" in first
    assert "model.options = {'num_hidden_layers': 2}" in line
    export_peft(tmp_path / "checkpoints", tmp_path / "peft")
    assert line in caplog.text


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

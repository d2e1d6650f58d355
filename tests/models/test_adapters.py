"""LoRA, sharded: the steps that peft's own takes unsharded, on a base that costs its bytes and no more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.errors import ShardError, SpecError
from fullshard.models.adapted_parameters import name_in_base
from fullshard.models.adapters import adapters_off, warn_of_unexpected_adapter_targets
from fullshard.models.build import build_model
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.architectures import whole
from tests.fakes.architectures_hf import CONFIGS, VOCABULARY, write_config
from tests.fakes.data import Rows, global_batch
from tests.fakes.families import MIXTURES

STEPS = 3
TINY = ["model.d_model=32", "model.layers=2", "model.d_ff=48", f"model.vocabulary={VOCABULARY}"]


def run_of(*settings: str) -> Run:
    fixed = ["train.steps=3", "train.global_batch=4", "data.sequence_length=9", "precision.mode=fp32"]
    small = ["adapter.rank=4", "adapter.alpha=12", "schedule.warmup_steps=0", "schedule.kind=constant"]
    return Run.load(overrides=[*fixed, *small, *settings])


def state_of(run: Run) -> tuple[TrainState, Plan]:
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(build_model(run), plan)
    return TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY)), plan


def sharded_steps(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and whole trained parameters after them; frozen ones are as they were."""
    state, plan = state_of(run)
    before = {n: whole(p) for n, p in state.model.named_parameters() if not p.requires_grad}
    losses = [step.loss for step in train(state, plan)]
    for name, parameter in state.model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            assert parameter not in state.optimizer.state
            assert torch.equal(whole(parameter), before[name]), name
    return losses, {n: whole(p).detach() for n, p in state.model.named_parameters() if p.requires_grad}


def steps_of_peft(run: Run, targets: list[str], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """peft's own model on the same values, one process, torch's optimizer and clipping."""
    peft = pytest.importorskip("peft")  # takes seconds, wherever tests are collected
    ours = materialize(build_model(run), seed=run.run.seed)
    base = materialize(build_model(run.model_copy(update={"adapter": Run().adapter})), seed=run.run.seed)
    turned = any(type(m).__name__ == "Conv1D" for n, m in base.named_modules() if n.endswith(tuple(targets)))
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, fan_in_fan_out=turned, **options)
    model: nn.Module = peft.inject_adapter_in_model(config, base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.load_state_dict(ours.state_dict())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    section = run.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
    )
    losses: list[float] = []
    for step in range(STEPS):
        batch = global_batch(
            step, sequences=run.train.global_batch, length=run.data.sequence_length, vocabulary=VOCABULARY
        )
        total, count = next_token_loss(model, batch)
        (total / count).backward()
        nn.utils.clip_grad_norm_(trained.values(), section.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    return losses, {name: p.detach() for name, p in trained.items()}


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("decoder", 1),
        pytest.param("gpt2", 1, marks=pytest.mark.long),
        ("mixtral", 1),
        ("decoder", 2),
        ("phi3", 2),
        pytest.param("qwen2", 4, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("zero1", marks=pytest.mark.long)])
def test_the_steps_are_those_of_peft(
    model: str, tensor: int, strategy: str, ranks: Any, tmp_path: Any
) -> None:
    if model == "decoder":
        settings = TINY
    else:
        write_config(model, tmp_path)
        settings = [f"model.hf={tmp_path}"]
    if tensor > 1:  # sums in another order; with a small eps, Adam's division magnifies the difference
        settings = [*settings, f"sharding.tensor_parallel={tensor}", "data.sequence_length=8"]
        settings.append("optimizer.eps=1e-4")
    run = run_of(*settings, f"sharding.strategy={strategy}")
    adapted = [name for name, _ in build_model(run).named_modules() if name.endswith(".lora_A")]
    assert adapted
    losses, trained = steps_of_peft(run, [name.removesuffix(".lora_A") for name in adapted])
    for own_losses, own in ranks(max(tensor, 2)).run(sharded_steps, run):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own.keys() == trained.keys()
        for name, expected in trained.items():
            torch.testing.assert_close(
                own[name], expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
            )


STACKS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
FULL, HYBRID = ["recompute.mode=full"], ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"]
KINDS = {
    "mixtral": (["q_proj", "w1", "w2", "w3"], {}),
    "gpt_oss": (["q_proj"], STACKS),
    "qwen3_moe": (["gate_proj", "up_proj", "down_proj"], {"use_rslora": True}),
    "llama": (["q_proj", "down_proj"], {"use_dora": True}),
    "gpt2": (["c_attn", "wte"], {"use_dora": True}),  # transposed, and a tied embedding
}
LAYOUTS = [(1, []), (2, FULL), (3, FULL), (2, ["sharding.strategy=zero1"]), (4, HYBRID)]
COMPILED = (1, [*FULL, "run.compile=true"])  # in pieces, around the sums
QUICK_CROSS = [("mixtral", 3), ("gpt_oss", 2), ("qwen3_moe", 1), ("llama", 3), ("gpt2", 2), ("llama", 4)]


@pytest.mark.filterwarnings("ignore:.*pattern keys did not match:RuntimeWarning")  # peft, of its own keys
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            model,
            layout,
            marks=[] if (model, layout[0]) in QUICK_CROSS and layout != COMPILED else pytest.mark.long,
        )
        for model in KINDS
        for layout in (*LAYOUTS, *([COMPILED] if model == "gpt_oss" else []))
    ],
    ids=str,
)
def test_adapters_of_each_kind_take_the_steps_of_peft(
    model: str, layout: tuple[int, list[str]], ranks: Any, tmp_path: Any
) -> None:
    (targets, options), (count, settings) = KINDS[model], layout
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS, **MIXTURES}[model]))
    listed = json.dumps(options).replace(":", "=")
    fixed = [f"model.hf={tmp_path}", f"adapter.targets={json.dumps(targets)}", f"adapter.options={listed}"]
    fixed += ["train.global_batch=12", "optimizer.eps=1e-4", "optimizer.weight_decay=0"]
    run = run_of(*fixed, *settings)
    losses, trained = steps_of_peft(run, targets, **options)
    for own_losses, own in ranks(count).run(sharded_steps, run):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own.keys() == trained.keys()
        for name, expected in trained.items():
            torch.testing.assert_close(own[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def steps_from(directory: Path, run: Run) -> dict[str, Tensor]:
    """Continues from the checkpoint in `directory`, if any, and saves there. Returns the saved tensors."""
    state, plan = state_of(run)
    load(state, directory, missing_ok=True)
    for _ in train(state, plan):
        pass
    save(state, directory, plan=plan)
    return {name: whole(one).detach() for name, one in state.tensors().items() if not name.startswith("rng")}


def test_adapted_experts_continue_on_other_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    write_config("mixtral", tmp_path)
    fixed = [f"model.hf={tmp_path}", f"adapter.targets={json.dumps(KINDS['mixtral'][0])}"]
    run = run_of(*fixed, "train.global_batch=12", "optimizer.eps=1e-4")
    expected = ranks(2).run(steps_from, tmp_path / "whole", run)[0]
    for count, steps in ((2, 1), (3, 2), (1, 3)):
        own = run.with_overrides([f"train.steps={steps}"])
        found = ranks(count).run(steps_from, tmp_path / "parts", own)[0]
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6, msg=name)


def test_adapted_experts_that_are_off_compute_as_their_base(tmp_path: Any) -> None:
    write_config("mixtral", tmp_path)
    targets = f"adapter.targets={json.dumps(KINDS['mixtral'][0])}"
    plain, adapted = (
        materialize(build_model(run_of(f"model.hf={tmp_path}", *one)), seed=0)
        for one in (["adapter.rank=0"], [targets])
    )
    base = plain.state_dict()
    adapted.load_state_dict(
        {name: base.get(name_in_base(name), t) for name, t in adapted.state_dict().items()}
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(0.1)
        tokens = torch.randint(0, VOCABULARY, (2, 9))
        expected = plain(tokens).logits
        assert not torch.equal(adapted(tokens).logits, expected)
        with adapters_off(adapted):
            assert torch.equal(adapted(tokens).logits, expected)


def standing_bytes(run: Run) -> dict[str, int]:
    """After a step, on a rank: what its parameters and their optimizer state take."""
    state, plan = state_of(run)
    next(train(state, plan))

    def nbytes(tensor: Tensor) -> int:
        return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes

    return {
        "parameters": sum(map(nbytes, state.model.parameters())),
        "optimizer": sum(nbytes(t) for kept in state.optimizer.state.values() for t in kept.values()),
    }


def test_a_frozen_base_takes_the_bytes_that_are_predicted(ranks: Callable[..., Any]) -> None:
    run = run_of(*TINY, "adapter.base_dtype=bf16", "sharding.strategy=full_shard")
    plan = Plan.from_run(run, world_size=2)
    terms = peak_bytes(describe(build_model(run), plan, loss=next_token_loss), plan)
    frozen = sum(p.numel() for p in build_model(run).parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in build_model(run).parameters() if p.requires_grad)
    found = ranks(2).run(standing_bytes, run)
    assert terms.parameter_shards + terms.frozen_shards == found[0]["parameters"]
    assert terms.optimizer_state == found[0]["optimizer"]
    assert terms.parameter_shards == pytest.approx(4 * trained / 2, rel=0.02)
    assert terms.frozen_shards == pytest.approx(2 * frozen / 2, rel=0.02)


def test_adapters_begin_as_nothing_and_modules_may_be_trained_beside() -> None:
    plain = materialize(build_model(run_of(*TINY, "adapter.rank=0")), seed=0)
    adapted = materialize(build_model(run_of(*TINY, 'adapter.trained=["head"]')), seed=0)
    values = plain.state_dict()
    own = {name: values.get(name.replace(".base_layer", ""), t) for name, t in adapted.state_dict().items()}
    adapted.load_state_dict(own)
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    assert torch.equal(plain(tokens), adapted(tokens))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"head.weight"}


@pytest.mark.parametrize("targets", ["all-linear", '["query"]'])
@pytest.mark.parametrize("layers", ["[1]", "1", '[1], layers_pattern = "blocks"'])
def test_adapters_are_in_the_layers_to_transform(targets: str, layers: str) -> None:
    options = f"adapter.options={{layers_to_transform = {layers}}}"
    model = build_model(run_of(*TINY, f"adapter.targets={targets}", options))
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert adapted
    assert {name.split(".")[1] for name in adapted} == {"1"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (['adapter.targets=["q_projection"]'], "has no module 'q_projection'"),
        (["adapter.options={alora_invocation_tokens = [1]}"], "add nothing outside of peft's own model"),
        (["adapter.options={layer_replication = [[0, 1], [0, 1]]}"], "get_peft_model"),
        (["adapter.options={no_such = 1}"], "no_such"),
        (["adapter.options={layers_to_transform = [0, 2]}"], "no target in layer 2"),
        (['adapter.options={layers_pattern = "blocks"}'], "`layers_to_transform` must also be"),
        (["adapter.options={inference_mode = true}"], "freezes the adapters"),
        (["adapter.options={use_qalora = true}"], "quantised weights"),
        (["adapter.options={ensure_weight_tying = true}"], "are not sharded as such"),
        (["adapter.options={rank_pattern = {queri = 8}}"], "has no target 'queri'"),
        (["adapter.options={alpha_pattern = {query = 8, queri = 8}}"], "has no target 'queri'"),
        (['adapter.options={target_parameters = ["no.such"]}'], "has no parameter 'no.such'"),
        (
            ["adapter.options={target_parameters = ['query.weight'], layers_to_transform = [0]}"],
            "for modules alone",
        ),
    ],
)
def test_impossible_adapters_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        build_model(run_of(*TINY, *settings))


def sharding_error(run: Run) -> str:
    """Returns the error with which a model of `run` is sharded."""
    with pytest.raises(ShardError) as caught:
        state_of(run)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("mixtral", ["sharding.expert_parallel=2"], "sharding.expert_parallel = 2"),
        ("mixtral", ["sharding.tensor_parallel=2", "data.sequence_length=8"], "sharding.tensor_parallel = 2"),
        ("mixtral", ["sharding.units.min_parameters=100"], "another unit than its base weight"),
        ("llama", ["sharding.tensor_parallel=2", "data.sequence_length=8"], "a variant of LoRA"),
    ],
)
def test_adapters_that_compute_with_whole_weights_are_not_divided(
    model: str, settings: list[str], says: str, ranks: Any, tmp_path: Any
) -> None:
    write_config(model, tmp_path)
    options = "{use_dora = true}" if model == "llama" else json.dumps(STACKS).replace(":", "=")
    fixed = [f"model.hf={tmp_path}", 'adapter.targets=["q_proj"]', f"adapter.options={options}"]
    for error in ranks(2).run(sharding_error, run_of(*fixed, *settings)):
        assert says in error


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("mixtral", '"all-linear"', "leaves experts.gate_up_proj, experts.down_proj frozen"),
        ("mixtral", '["q_proj"]', ""),
        (
            "qwen3_moe",
            '["gate_proj", "up_proj", "down_proj"]',
            "peft takes mlp.gate_proj, mlp.up_proj, mlp.down_",
        ),
        ("clip", '"all-linear"', "18 of text_model.encoder.layers, 18 of vision_model.encoder.layers"),
    ],
)
def test_places_that_targets_adapt_or_leave_frozen_are_logged(
    name: str, targets: str, message: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(name, tmp_path)
    dense = ["model.options={mlp_only_layers = [0]}"] if name == "qwen3_moe" else []
    run = run_of(f"model.hf={tmp_path}", f"adapter.targets={targets}", *dense)
    warn_of_unexpected_adapter_targets(build_model(run), run.adapter)
    assert message in caplog.text if message else not caplog.text


def test_stacked_weights_that_targets_mean_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    block = nn.ParameterDict({"gate_up_proj": torch.zeros(2, 3, 4)})
    section = run_of('adapter.targets=["gate_proj"]').adapter
    warn_of_unexpected_adapter_targets(nn.ModuleDict({"layers": nn.ModuleList([block])}), section)
    assert "leaves 0.gate_up_proj frozen" in caplog.text

"""Muon on shards is Muon on whole matrices, bit for bit, and moves no more than its formula."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.checkpoint import load, save
from fullshard.errors import CheckpointError, PlanError, SpecError
from fullshard.parallel.hidden_matrices import find_hidden_matrices
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import OptimizerSection
from fullshard.training.groups import group_lines, match_groups
from tests.training import given_gradients
from tests.training.given_gradients import (
    CASES,
    DECAY,
    DECODER,
    MIXTURE,
    ODD,
    RATE,
    STEPS,
    Tensors,
    assert_training_does_not_depend_on_ranks_nor_on_microbatches,
    bits_by_decision,
    bits_of_skipped_step,
    differing,
    gradients,
    keys_after_another_kind,
    resumed_on_fewer_ranks,
    state_after_updates,
    state_of,
    updated_here,
)
from tests.training.runs import same_bits, whole
from tests.training.same_numbers import build

MATRIX = "blocks.0.attention.query.weight"


def run_of(ranks: int, model: str, strategy: str = "full_shard", **more: Any) -> Run:
    return given_gradients.run_of("muon", ranks, model, strategy=strategy, **more)


def orthogonalised(matrix: Tensor, dtype: torch.dtype, *, steps: int = 5) -> Tensor:
    x = matrix.to(dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.add((2.0315 * (gram @ gram)).add(gram, alpha=-4.775) @ x, x, alpha=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def normalised(o: Tensor, v: Tensor, decay: float) -> Tensor:
    """NorMuon's update of O. `v` is overwritten."""
    v.lerp_(torch.linalg.vector_norm(o, dim=-1, keepdim=True).square() / o.shape[-1], 1 - decay)
    new = o / v.sqrt()
    return new * (o.norm(dim=(-2, -1), keepdim=True) / new.norm(dim=(-2, -1), keepdim=True))


def updated_by_reference(
    run: Run,
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    nesterov: bool = True,
    rms: bool = True,
    row_decay: float = 0.0,
) -> Tensors:
    """Returns what `updated_here` does, of Muon's matrices."""
    module = materialize(build(model, run), seed=run.run.seed)
    names, found = list(find_hidden_matrices(module)), Tensors()
    values = {name: one.detach() for name, one in module.named_parameters()}
    for step in range(STEPS):
        given = gradients(module, step)
        for name in names:
            buffer = found.setdefault(f"{name} momentum_buffer", torch.zeros_like(values[name]))
            buffer.lerp_(given[name], 1 - 0.95)
            update = given[name].lerp(buffer, 0.95) if nesterov else buffer
            matrices = update.unbind() if update.ndim == 3 else [update]
            every = [orthogonalised(one, dtype) for one in matrices]
            if row_decay:
                v = found.setdefault(f"{name} row_var", torch.zeros(*update.shape[:-1], 1))
                vs = v.unbind() if v.ndim == 3 else [v]
                every = [normalised(one, of, row_decay) for one, of in zip(every, vs, strict=True)]
            o = torch.stack(every).view(update.shape)
            rows, columns = update.shape[-2:]
            factor = 0.2 * max(rows, columns) ** 0.5 if rms else max(1.0, rows / columns) ** 0.5
            values[name].mul_(1 - RATE * DECAY).add_(o, alpha=-RATE * factor)
    return found | {name: values[name] for name in names}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_of_given_gradients_is_bitwise_that_of_whole_matrices(
    case: tuple[Any, ...], ranks: Any
) -> None:
    count, model, strategy, more = case
    run = run_of(count, model, strategy, **more)
    wanted = updated_by_reference(run, model)
    for found in ranks(count).run(updated_here, run, model):
        assert differing(found, wanted) == []


NORMUON = "optimizer.muon.row_decay=0.9"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_of_whole_matrices_travels_bit_for_bit(case: tuple[Any, ...], ranks: Any) -> None:
    count, model, strategy, more = case
    run = run_of(count, model, strategy, **more, extra=[NORMUON])
    wanted = updated_by_reference(run, model, row_decay=0.9)
    for found in ranks(count).run(updated_here, run, model):
        assert differing(found, wanted) == []


@pytest.mark.parametrize(
    ("extra", "reference"),
    [
        ("optimizer.muon.dtype=bf16", {"dtype": torch.bfloat16}),
        ("optimizer.muon.nesterov=false", {"nesterov": False}),
        ("optimizer.muon.scale=original", {"rms": False}),
    ],
)
def test_each_setting_does_what_its_formula_says(extra: str, reference: dict[str, Any], ranks: Any) -> None:
    run = run_of(2, DECODER, extra=[extra])
    found = ranks(2).run(updated_here, run, DECODER)[0]
    assert differing(found, updated_by_reference(run, DECODER, **reference)) == []


# Resumed, skipped, accumulated #
@pytest.mark.parametrize(("extra", "row_decay"), [((), 0.0), ((NORMUON,), 0.9)])
def test_a_resume_on_fewer_ranks_is_bitwise_the_run_without_a_break(
    extra: tuple[str, ...], row_decay: float, ranks: Any, tmp_path: Path
) -> None:
    found = resumed_on_fewer_ranks(ranks, tmp_path, name="muon", extra=extra)
    assert differing(found, updated_by_reference(run_of(1, ODD), ODD, row_decay=row_decay)) == []


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [
        ("muon", "adamw", {"exp_avg", "exp_avg_sq", "step"}),
        ("adamw", "muon", {"momentum_buffer"}),
    ],
)
def test_a_parameter_of_another_kind_resumes_with_state_of_that_kind_alone(
    first: str, second: str, keys: set[str], ranks: Any, tmp_path: Path
) -> None:
    found = ranks(2).run(keys_after_another_kind, "muon", (first, second), MATRIX, tmp_path)
    assert found == [keys] * 2


def resumed_from_adamw(tmp_path: Path) -> None:
    state, plan = state_of(run_of(1, DECODER, extra=["optimizer.name=adamw"]), DECODER)
    save(state, tmp_path, plan=plan)
    load(state_of(run_of(1, DECODER), DECODER)[0], tmp_path)


def test_a_resume_from_adamw_is_refused(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="AdamW in the checkpoint, MuonAdamW here"):
        ranks(1).run(resumed_from_adamw, tmp_path)


def test_a_step_that_the_device_skips_leaves_every_bit(ranks: Any) -> None:
    run = run_of(2, ODD, extra=[NORMUON])
    assert ranks(2).run(bits_of_skipped_step, run, ODD) == [[], []]


def test_host_and_device_decide_alike(ranks: Any) -> None:
    run = run_of(2, ODD)
    device, host = (ranks(2).run(bits_by_decision, run, ODD, how)[1] for how in ("device", "host"))
    assert same_bits(device, host)


def test_training_does_not_depend_on_ranks_nor_on_microbatches(ranks: Any) -> None:
    assert_training_does_not_depend_on_ranks_nor_on_microbatches("muon", ranks)


def adamw_parameters(name: str) -> Tensors:
    """Parameters outside of the matrices, after given gradients."""
    found = whole(state_after_updates(run_of(2, DECODER, extra=[f"optimizer.name={name}"]), DECODER).model)
    return {
        key: one
        for key, one in found.items()
        if key not in find_hidden_matrices(build(DECODER, run_of(2, DECODER)))
    }


def test_all_other_parameters_are_updated_as_by_adamw(ranks: Any) -> None:
    assert same_bits(*(ranks(2).run(adamw_parameters, name)[0] for name in ("muon", "adamw")))


# Which, and what is refused #
def kinds_of(model: nn.Module, *groups: dict[str, Any]) -> dict[str, str]:
    section = OptimizerSection.model_validate({"name": "muon", "groups": groups})
    return {
        name: "muon" if name in group.matrices else "adamw"
        for group in match_groups(model, section)
        for name in group.parameters
    }


class Hard(nn.Module):
    """A block with all that Muon leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(HardBlock() for _ in range(2))
        self.layers[0].tied.weight = self.embedding.weight
        self.head = nn.Linear(6, 8)


class HardBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied, self.frozen = nn.Linear(6, 6), nn.Linear(6, 8, bias=False), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.conv, self.position = nn.Conv1d(6, 6, 3), nn.Embedding(8, 6)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.qkv_proj = nn.Linear(6, 18, bias=False)
        self.scale = nn.Parameter(torch.ones(6, 6))


def test_muon_takes_linear_weights_of_blocks_and_stacks_of_experts() -> None:
    hard = {name for name, kind in kinds_of(Hard()).items() if kind == "muon"}
    untied = {"layers.1.tied.weight"}
    assert hard == untied | {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("linear", "qkv_proj")}
    mixture = kinds_of(build(MIXTURE, run_of(1, MIXTURE)))
    assert mixture["blocks.0.feed_forward.experts.gate"] == "muon"
    assert "adamw" == mixture["head.weight"] == mixture["embedding.weight"]
    assert all(kind == "adamw" for name, kind in mixture.items() if "router" in name)
    assert all(
        kind == "adamw" for name, kind in kinds_of(build(ODD, run_of(1, ODD))).items() if "router" in name
    )


def test_a_group_may_choose_its_kind() -> None:
    found = kinds_of(
        Hard(), {"match": ["*lora_A*"], "kind": "muon"}, {"match": ["*.linear.*"], "kind": "adamw"}
    )
    assert found["layers.0.lora_A.default.weight"] == "muon"
    assert found["layers.0.linear.weight"] == "adamw"
    assert found["layers.0.qkv_proj.weight"] == "muon"


def test_the_lines_of_a_run_say_what_is_muons() -> None:
    section = OptimizerSection.model_validate({"name": "muon", "groups": [{"match": ["head.*"]}]})
    assert group_lines(Hard(), section) == [
        "group head.*, AdamW, 56 in 2 tensors, rate 0.003, weight decay by default",
        "group all others, Muon, 336 in 5 tensors, rate 0.003, weight decay by default",
        "group all others, AdamW, 480 in 13 tensors, rate 0.003, weight decay by default",
        "Muon takes fused matrices as one: layers.0.qkv_proj.weight, layers.1.qkv_proj.weight",
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": ["*conv.weight"], "kind": "muon"}], r"Muon updates matrices.*[\s\S]*\[6, 6, 3\]"),
        ([{"match": ["*.bias"], "kind": "muon"}], "Muon updates matrices"),
        ([{"match": ["*.linear.weight"], "betas": [0.5, 0.6]}], "which Muon has not"),
        ([{"match": ["*"], "kind": "adamw"}], "Muon has no matrix to update"),
    ],
)
def test_groups_that_muon_cannot_have_are_refused(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kinds_of(Hard(), *groups)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.name=muon", "offload.tier=optimizer:cpu"], "muon and soap need whole matrices"),
        (["optimizer.name=muon", "precision.mode=bf16_pure"], "rounds its updates stochastically"),
        (["optimizer.name=muon", "optimizer.options={momentum=0.9}"], r"in \[optimizer.muon\]"),
        (["optimizer.muon.steps=6"], 'needs name = "muon"'),
        (['optimizer.groups=[{match = ["*"], kind = "adamw"}]'], 'needs name = "muon"'),
        (["optimizer.name=muon", "optimizer.muon.momentum=1.0"], "momentum"),
        (["optimizer.name=muon", "optimizer.muon.steps=0"], "steps"),
    ],
)
def test_settings_that_do_not_work_with_muon_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises((SpecError, PlanError), match=message):
        Plan.from_run(Run.load(overrides=settings), world_size=2)

"""SOAP on shards is SOAP on whole matrices, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.distributed.tensors import local_tensor
from fullshard.errors import PlanError, SpecError
from fullshard.parallel.hidden_matrices import find_hidden_matrices
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import OptimizerSection
from fullshard.training.gradients import host_waits_before_each_update, update_parameters
from fullshard.training.groups import group_lines, match_groups
from tests.training import given_gradients
from tests.training.given_gradients import (
    CASES,
    DECAY,
    DECODER,
    ODD,
    RATE,
    STEPS,
    Tensors,
    differing,
    gradients,
    keys_after_another_kind,
    resumed_on_fewer_ranks,
    set_gradients,
    state_of,
    trained,
    updated_here,
)
from tests.training.runs import local_bits, same_bits
from tests.training.same_numbers import build

MATRIX = "blocks.0.attention.query.weight"
EVERY_STEP = "optimizer.soap.precondition_frequency=1"
KEYS = {"exp_avg", "exp_avg_sq", "left_gram", "left_basis", "right_gram", "right_basis"}


def run_of(ranks: int, model: str, strategy: str = "full_shard", **more: Any) -> Run:
    extra = (EVERY_STEP, *more.pop("extra", ()))
    return given_gradients.run_of("soap", ranks, model, strategy=strategy, extra=extra, **more)


class Soap:
    """SOAP of one matrix, as its paper has it, in the operations that give equal bits."""

    def __init__(self, value: Tensor, *, frequency: int, most: int) -> None:
        self.value, self.frequency, self.t = value, frequency, 0
        self.m, self.v = torch.zeros_like(value), torch.zeros_like(value)
        sides = {side: n for side, n in zip(("left", "right"), value.shape, strict=True) if n <= most}
        self.gram = {side: torch.zeros(n, n) for side, n in sides.items()}
        self.basis = {side: torch.zeros(n, n) for side, n in sides.items()}

    def rotated(self, x: Tensor, back: bool = False) -> Tensor:
        if "left" in self.basis:
            x = (self.basis["left"] if back else self.basis["left"].T) @ x
        if "right" in self.basis:
            x = x @ (self.basis["right"].T if back else self.basis["right"])
        return x

    def update(self, g: Tensor) -> None:
        if self.t:
            self.m.lerp_(g, 1 - 0.9)
            self.v.lerp_(self.rotated(g).square(), 1 - 0.95)
            root = (self.v / (1 - 0.95**self.t)).sqrt() + 1e-4
            update = self.rotated(self.rotated(self.m) / (1 - 0.9**self.t) / root, back=True)
            self.value.mul_(1 - RATE * DECAY).add_(update, alpha=-RATE)
        for side, gram in self.gram.items():
            gram.lerp_(g @ g.T if side == "left" else g.T @ g, 1 - 0.95)
            if self.t == 0:
                self.basis[side] = torch.linalg.eigh(gram).eigenvectors.flip(1).contiguous()
            elif self.t % self.frequency == 0:
                product = gram @ self.basis[side]
                order = (product * self.basis[side]).sum(0).argsort(descending=True)
                self.v = self.v[order] if side == "left" else self.v[:, order]
                self.basis[side] = torch.linalg.qr(product[:, order]).Q.contiguous()
        self.t += 1

    def state(self) -> Tensors:
        bases = {f"{s}_gram": one for s, one in self.gram.items()} | {
            f"{s}_basis": one for s, one in self.basis.items()
        }
        return {"exp_avg": self.m, "exp_avg_sq": self.v} | bases


def updated_by_reference(run: Run, model: str, *, frequency: int = 1, most: int = 10_000) -> Tensors:
    """Returns what `updated_here` does, of SOAP's matrices."""
    module = materialize(build(model, run), seed=run.run.seed)
    found = Tensors()
    for name, parameter in find_hidden_matrices(module).items():
        value = parameter.detach()
        matrices = value.flatten(0, -3).unbind() if value.ndim > 2 else [value]
        soaps = [Soap(one, frequency=frequency, most=most) for one in matrices]
        if not soaps[0].gram:
            continue  # AdamW's
        for step in range(STEPS):
            given = gradients(module, step)[name].view(-1, *value.shape[-2:])
            for one, gradient in zip(soaps, given.unbind(), strict=True):
                one.update(gradient.clone())
        found[name] = value
        for key in soaps[0].state():
            every = [one.state()[key] for one in soaps]
            found[f"{name} {key}"] = torch.stack(every) if value.ndim > 2 else every[0]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_of_given_gradients_is_bitwise_that_of_whole_matrices(
    case: tuple[Any, ...], ranks: Any
) -> None:
    count, model, strategy, more = case
    run = run_of(count, model, strategy, **more)
    wanted = updated_by_reference(run, model)
    for found in ranks(count).run(updated_here, run, model):
        assert differing(found, wanted) == []


@pytest.mark.parametrize(
    ("setting", "reference"),
    [
        ("precondition_frequency=2", {"frequency": 2}),
        ("max_precondition_dim=12", {"most": 12}),
    ],
)
def test_each_setting_does_what_its_formula_says(setting: str, reference: dict[str, Any], ranks: Any) -> None:
    run = run_of(2, DECODER, extra=[f"optimizer.soap.{setting}"])
    found = ranks(2).run(updated_here, run, DECODER)[0]
    assert differing(found, updated_by_reference(run, DECODER, **reference)) == []


def test_a_resume_on_fewer_ranks_is_bitwise_the_run_without_a_break(ranks: Any, tmp_path: Path) -> None:
    found = resumed_on_fewer_ranks(ranks, tmp_path, name="soap", extra=[EVERY_STEP])
    assert differing(found, updated_by_reference(run_of(1, ODD), ODD)) == []


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [
        ("soap", "adamw", {"exp_avg", "exp_avg_sq", "step"}),
        ("adamw", "soap", {"step", *KEYS}),
    ],
)
def test_a_parameter_of_another_kind_resumes_with_state_of_that_kind_alone(
    first: str, second: str, keys: set[str], ranks: Any, tmp_path: Path
) -> None:
    found = ranks(2).run(keys_after_another_kind, "soap", (first, second), MATRIX, tmp_path)
    assert found == [keys] * 2


def bits_after_scaled_step(run: Run, factor: float) -> tuple[bool, Tensors]:
    """(whether the host waits for each decision, bits of this rank after gradients / factor, scaled)."""
    state, plan = state_of(run, ODD)
    for step in range(2):
        set_gradients(state.model, step)
        given = [one.grad for one in state.model.parameters() if one.grad is not None]
        for one in given:
            local_tensor(one).div_(factor)
        update_parameters(state.optimizer, given, factor=factor)
    return host_waits_before_each_update(state.optimizer, plan), local_bits(state)


def test_the_host_decides_on_each_step_and_scales_its_gradients(ranks: Any) -> None:
    run = run_of(2, ODD)
    (waits, clipped), (_, plain) = (ranks(2).run(bits_after_scaled_step, run, one)[1] for one in (0.25, 1.0))
    assert waits
    assert same_bits(clipped, plain)


def test_training_with_accumulated_and_clipped_gradients_takes_every_step_alike_on_all_ranks(
    ranks: Any,
) -> None:
    run = run_of(2, DECODER, accumulation=(4, "last_microbatch"))
    assert same_bits(*ranks(2).run(trained, run, DECODER))


def test_groups_choose_kinds_and_betas_and_the_lines_of_a_run_say_them() -> None:
    groups = [
        {"match": ["*.query.weight"], "betas": [0.5, 0.6]},
        {"match": ["head.weight"], "kind": "soap"},
        {"match": ["*.key.weight"], "kind": "adamw"},
    ]
    section = OptimizerSection.model_validate({"name": "soap", "groups": groups})
    lines = group_lines(build(DECODER, run_of(1, DECODER)), section)
    kinds = [line.split(", ")[1] for line in lines]
    assert kinds == ["SOAP", "SOAP", "AdamW", "SOAP", "AdamW"]
    assert "betas [0.5, 0.6]" in lines[0]


def test_groups_that_soap_cannot_have_are_refused() -> None:
    section = OptimizerSection.model_validate(
        {"name": "soap", "groups": [{"match": ["*norm*"], "kind": "soap"}]}
    )
    with pytest.raises(SpecError, match="SOAP updates matrices"):
        match_groups(build(DECODER, run_of(1, DECODER)), section)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.name=soap", "offload.tier=optimizer:cpu"], "muon and soap need whole matrices"),
        (["optimizer.name=soap", "precision.mode=bf16_pure"], "rounds its updates stochastically"),
        (["optimizer.name=soap", "optimizer.options={eps=1.0}"], r"in \[optimizer.soap\]"),
        (["optimizer.soap.max_precondition_dim=6"], 'needs name = "soap"'),
        (["optimizer.name=muon", "optimizer.groups=[{match=['*'], kind='soap'}]"], 'needs name = "soap"'),
        (["optimizer.groups=[{match=['*'], kind='adamw'}]"], '"muon" or "soap"'),
        (
            ["optimizer.name=moun", "optimizer.groups=[{match=['*'], kind='muon'}]"],
            r"'moun'[\s\S]*try: muon, or",
        ),
        (["optimizer.name=shampoo"], "adamw, sgd, muon, soap"),
        (["optimizer.name=soap", "optimizer.soap.precondition_frequency=0"], "precondition_frequency"),
    ],
)
def test_settings_that_do_not_work_with_soap_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises((SpecError, PlanError), match=message):
        Plan.from_run(Run.load(overrides=settings), world_size=2)

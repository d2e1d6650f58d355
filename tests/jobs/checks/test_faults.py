"""Each fault is found by the check that is meant for it, and what has no fault is not complained about."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.jobs.checks.data import DataTrial, build_data_trial, check_vocabulary_range
from fullshard.jobs.checks.machine import RunContext, quick_problems
from fullshard.jobs.checks.model_trial import build_model_trial
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from tests.fakes.architectures_hf import write_config
from tests.jobs.checks.faults import (
    DATA,
    ENVIRONMENT,
    FAULTS,
    GROUP_OF,
    MODELS,
    SETTINGS,
    STORAGE,
    Fault,
    context_of,
    plan_of_decoder,
    problems,
    quiet_machine,
    space_of,
)

# Quick ones of the model and of the data; all others of these take a second each.
SAMPLE = {"tokens shifted by one", "mean of means", "tensor that is no buffer", "same rows on all ranks"}
QUICK = [*SETTINGS, *ENVIRONMENT, *STORAGE, *(one for one in (*MODELS, *DATA) if one.name in SAMPLE)]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, id=one.name, marks=() if one in QUICK else pytest.mark.long) for one in FAULTS],
)
def test_fault_is_found_by_its_check(fault: Fault, tmp_path: Path) -> None:
    found = problems(fault.make(tmp_path), group=GROUP_OF[fault.check])
    assert fault.check in found
    assert found[fault.check].fix or found[fault.check].why


def test_bytes_for_a_model_that_has_a_tokenizer_are_a_failure(tmp_path: Path) -> None:
    settings = [f"model.hf={write_config('llama', tmp_path).parent}", "data.source=stdlib"]
    trial = DataTrial(AbsentData(), Run.load(overrides=settings), ranks=1, vocabulary=None)  # type: ignore[arg-type]
    assert check_vocabulary_range(trial).is_problem is False
    (tmp_path / "tokenizer.json").touch()
    finding = check_vocabulary_range(trial)
    assert finding.is_problem
    assert f"data.tokenizer = '{tmp_path}'" in str(finding.fix)


class AbsentData:
    """Data without batches."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[None]:
        return iter(())


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {one.check for one in FAULTS} == set(GROUP_OF)


def test_no_complaint_without_a_fault(tmp_path: Path) -> None:
    plan = plan_of_decoder("none")
    run = context_of(quiet_machine(tmp_path), f"run.dir={tmp_path}/run")
    parts: dict[str, object] = dict.fromkeys(("settings", "machine", "storage"), run)
    parts |= {"model": build_model_trial(plan), "data": build_data_trial(plan)}
    assert {group: problems(part, group=group) for group, part in parts.items()} == {g: {} for g in parts}


def test_model_that_raises_is_one_failure() -> None:
    plan = plan_of_decoder("none", "train.loss=tests.models.own:square_loss")
    found = problems(build_model_trial(plan), group="model")
    assert [one.status for one in found.values()] == ["failure"]
    assert "raises KeyError: 'x'" in next(iter(found.values())).got


def test_quick_checks_warn_and_fail(tmp_path: Path) -> None:
    warned = quick_problems(context_of(quiet_machine(tmp_path), "run.restarts=2"))
    assert [(one.check, one.status) for one in warned] == [("settings", "warning")]
    failed = quick_problems(space_of(1000)(tmp_path))
    assert [(one.check, one.status) for one in failed] == [("checkpoint_space", "failure")]


@pytest.mark.parametrize("fault", SETTINGS, ids=lambda one: one.name)
def test_fixes_of_settings_are_settings_without_that_problem(fault: Fault, tmp_path: Path) -> None:
    context = fault.make(tmp_path)
    assert isinstance(context, RunContext)
    text = str(problems(context, group="settings")["settings"].fix)
    changed = context.run.with_overrides([one.replace(" = ", "=") for one in text.split("; ")])
    assert problems(replace(context, plan=Plan.from_run(changed, world_size=1)), group="settings") == {}


def test_several_problems_of_settings_name_a_key_each(tmp_path: Path) -> None:
    settings = ("schedule.min_lr_ratio=0", "train.steps=10", "run.restarts=1", "checkpoint.keep_every=5")
    found = problems(context_of(quiet_machine(tmp_path), *settings), group="settings")["settings"]
    keys = [one.partition(" = ")[0] for one in str(found.fix).split("; ")]
    assert keys == ["schedule.warmup_steps", "checkpoint.every"]


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_no_complaint_about_a_schedule_that_ends_at_zero(tmp_path: Path, kind: str) -> None:
    run = context_of(quiet_machine(tmp_path), f"schedule.kind={kind}", "schedule.min_lr_ratio=0")
    assert problems(run, group="settings") == {}


def test_a_problem_is_printed_with_reason_and_fix() -> None:
    found = Finding.warning("7 of 8", why="a reason", fix="a change").model_copy(update={"check": "name"})
    assert found.text == "name: 7 of 8\n  why: a reason\n  try: a change"

"""Notes about settings that have no effect."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.errors import PlanError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import (
    CODE_SETTINGS,
    check_plan_is_trusted_and_of_run,
    check_settings_work_together,
    settings_that_run_code,
    unused_setting_notes,
)
from fullshard.spec.value import list_section_types

CASES = [
    ("precision.fp8_min_features=64", "precision.mode=fp8_rowwise"),
    ("schedule.decay_fraction=0.5", "schedule.kind=wsd"),
    ("schedule.min_lr_ratio=0.5", "schedule.kind=linear"),
    ("ema.validation=true", "ema.decay=0.9"),
    ("communication.ranks_per_node=8", "communication.reduce_within=fp32"),
]


@pytest.mark.parametrize(("setting", "needed"), CASES)
def test_setting_without_effect_is_noted(setting, needed):
    missing = ["precision.mode=fp32", "schedule.kind=constant" if "min_lr" in setting else "run.seed=1"]
    (note,) = unused_setting_notes(Run.load(overrides=[*missing, setting]))
    assert note.startswith(setting.replace("=", " = ") + " has no effect: it needs ")
    assert unused_setting_notes(Run.load(overrides=["precision.mode=fp32", setting, needed])) == []


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("data.trust_remote_code", []),
        (
            "data.eos_token",
            ["data.source=jsonl", 'data.paths=["a"]', "data.records=tokens", "data.tokenizer=a"],
        ),
        ("train.validate_every", ["data.validation_fraction=0"]),
        ("data.packing", ["data.source=python", "data.factory=a:b"]),
        ("data.on_error", ["data.source=memmap", 'data.paths=["a"]']),
    ],
)
def test_settings_that_the_data_ignores_are_noted(setting: str, others: list[str]):
    values = {"train.validate_every": "7", "data.packing": "none", "data.on_error": "skip"}
    value = (values | {"data.eos_token": "a"}).get(setting, "true")
    run = Run.load(overrides=["precision.mode=fp32", f"{setting}={value}", *others])
    notes = [note for note in unused_setting_notes(run) if not note.startswith("data.validation")]
    assert [note.partition(" ")[0] for note in notes] == [setting]


@pytest.mark.parametrize("overrides", [[], ["data.validation_fraction=0", "train.validate_every=0"]])
def test_a_run_that_gets_what_it_asks_for_has_no_note(overrides: list[str]):
    assert unused_setting_notes(Run.load(overrides=["precision.mode=fp32", *overrides])) == []


RUNNING_CODE = [
    "model.python=evil:make",
    "model.hf=evil model.trust_remote_code=true",
    "model.hf=evil model.attention=evil/kernels",
    'model.hf=evil model.options={text_config={_attn_implementation="evil/kernels"}}',
    "data.source=python data.factory=evil:make",
    "data.trust_remote_code=true",
    "train.loss=evil:make",
    "optimizer.name=evil.Make",
    'log.trackers=["wandb","evil"]',
    "communication.hook=evil:Make",
    'evaluate=[{name="quiz",call="evil:make"}]',
]
# Texts and tables that stand for paths, names or words: nothing is imported by them.
_DATA_FIELDS = ("paths", "name", "subset", "split", "roles", "chat_template_kwargs")
_DATA_FIELDS += ("validation_paths",)
NO_CODE = {
    "run": ("dir",),
    "model": ("hf", "architecture"),
    "adapter": ("options", "targets", "trained"),
    "data": (*_DATA_FIELDS, "options", "tokenizer", "chat_template", "eos_token", "cache"),
    "data.sources": _DATA_FIELDS,
    "optimizer": ("options", "groups.match"),
    "sharding": ("tensor_parallel_styles", "units.names", "units.overrides.match"),
    "offload": ("path",),
    "checkpoint": ("dir", "keep_best"),
    "evaluate": ("name", "paths"),
}


def open_settings(section: type[Any], prefix: str = "") -> Iterator[str]:
    """The keys of a section that take any text or table, or a permission; names of fields are left out."""
    for name, field in section.model_fields.items():
        inner = list_section_types(field.annotation)
        for one in inner:
            yield from open_settings(one, f"{prefix}{name}.")
        takes_text = not inner and re.search(r"\b(str|Any)\b", str(field.annotation))
        if (takes_text and not name.endswith("_field")) or name.startswith("trust"):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("setting", RUNNING_CODE)
def test_a_plan_runs_code_only_if_the_user_names_the_same_code(setting: str) -> None:
    given = Run.load(overrides=setting.split())
    planned = Plan.from_run(given, world_size=2).run
    with pytest.raises(SpecError, match="names code to run"):
        check_plan_is_trusted_and_of_run(planned, Run(), plan="plan.json")
    check_plan_is_trusted_and_of_run(planned, given, plan="plan.json")


def test_every_setting_that_runs_code_is_listed() -> None:
    others = {f"{section}.{name}" for section, names in NO_CODE.items() for name in names}
    tables = ("evaluate.call", "evaluate.task")
    found = {"evaluate" if key in tables else key for key in open_settings(Run)}
    assert found == {*CODE_SETTINGS} | others
    named = {key for one in RUNNING_CODE for key in settings_that_run_code(Run.load(overrides=one.split()))}
    assert named == {*CODE_SETTINGS}


@pytest.mark.parametrize("name", ["adamw", "torch.optim.Adagrad"])
def test_an_optimizer_of_torch_is_not_code_that_a_plan_brings(name: str) -> None:
    assert settings_that_run_code(Run.load(overrides=[f"optimizer.name={name}"])) == {}


def test_a_plan_is_refused_for_a_run_with_other_settings() -> None:
    planned = Plan.from_run(Run(), world_size=2).run
    check_plan_is_trusted_and_of_run(
        planned, Run.load(overrides=["sharding.strategy=auto"]), plan="plan.json"
    )
    with pytest.raises(SpecError, match=r"train\.steps"):
        check_plan_is_trusted_and_of_run(planned, Run.load(overrides=["train.steps=3"]), plan="plan.json")


def test_code_of_a_plan_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("raise SystemExit('it ran')\n")
    run = Run.load(overrides=["train.loss=evil:make", "run.device=cpu"])
    Plan.from_run(run, world_size=2).save("plan.json")
    assert main(["train", "--plan", "plan.json"]) == SpecError.exit_code
    assert "train.loss = 'evil:make'" in capsys.readouterr().err


def test_options_of_an_adapter_that_import_a_module_are_refused() -> None:
    with pytest.raises(SpecError, match="megatron_core cannot be set"):
        Run.load(overrides=["adapter.rank=2", 'adapter.options={megatron_core="evil"}'])


def test_magnitudes_of_dora_are_not_offloaded() -> None:
    run = Run.load(
        overrides=["adapter.rank=2", "adapter.options={use_dora = true}", "offload.tier=optimizer:cpu"]
    )
    with pytest.raises(PlanError, match="DoRA needs its base weights"):
        check_settings_work_together(run)

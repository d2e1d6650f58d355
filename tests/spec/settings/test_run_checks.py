"""Notes about settings that have no effect."""

import pytest

from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import unused_setting_notes

CASES = [
    ("precision.fp8_min_features=64", "precision.mode=fp8_rowwise"),
    ("precision.loss_scale_window=10", "precision.mode=fp16"),
    ("schedule.decay_fraction=0.5", "schedule.kind=wsd"),
    ("schedule.min_lr_ratio=0.5", "schedule.kind=linear"),
    ("optimizer.momentum=0.5", "optimizer.name=SGD"),
]


@pytest.mark.parametrize(("setting", "needed"), CASES)
def test_a_setting_is_noted_exactly_if_what_it_needs_is_missing(setting, needed):
    missing = ["precision.mode=fp32", "schedule.kind=constant" if "min_lr" in setting else "run.seed=1"]
    (note,) = unused_setting_notes(Run.load(overrides=[*missing, setting]))
    assert note.startswith(setting.replace("=", " = ") + " has no effect: it needs ")
    assert unused_setting_notes(Run.load(overrides=["precision.mode=fp32", setting, needed])) == []


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("data.trust_remote_code", []),
        ("train.validate_every", ["data.validation_fraction=0"]),
        ("data.packing", ["data.source=python", "data.factory=a:b"]),
        ("data.on_error", ["data.source=memmap", 'data.paths=["a"]']),
    ],
)
def test_settings_that_the_data_ignores_are_noted(setting: str, others: list[str]):
    value = {"train.validate_every": "7", "data.packing": "none", "data.on_error": "skip"}.get(
        setting, "true"
    )
    run = Run.load(overrides=["precision.mode=fp32", f"{setting}={value}", *others])
    notes = [note for note in unused_setting_notes(run) if not note.startswith("data.validation")]
    assert [note.partition(" ")[0] for note in notes] == [setting]


def test_the_default_run_has_no_note():
    assert unused_setting_notes(Run.load(overrides=["precision.mode=fp32"])) == []

"""Settings that a run gives although they have no effect on it."""

import json
from collections.abc import Callable

from fullshard.spec.plan import DeviceType
from fullshard.spec.run import Run

# Settings, whether they have an effect, and what they need for it.
_CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[Run, DeviceType], bool], str], ...] = (
    (
        ("precision.fp8_min_features",),
        lambda run, _: run.precision.mode.startswith("fp8"),
        'precision.mode = "fp8" or "fp8_rowwise"',
    ),
    (
        ("precision.initial_loss_scale", "precision.loss_scale_window"),
        lambda run, _: run.precision.mode == "fp16",
        'precision.mode = "fp16"',
    ),
    (
        ("train.wait_each_step",),
        lambda _, device: device == "cuda",
        "ranks on GPUs, as CPU ranks wait for every step",
    ),
    (("schedule.decay_fraction",), lambda run, _: run.schedule.kind == "wsd", 'schedule.kind = "wsd"'),
    (
        ("schedule.min_lr_ratio",),
        lambda run, _: run.schedule.kind != "constant",
        "a schedule.kind that decays",
    ),
    (
        ("data.on_error", "data.processes", "data.packing", "data.validation_fraction", "data.records"),
        lambda run, _: run.data.source != "python",
        'another data.source than "python", whose factory makes the batches',
    ),
    (
        ("data.on_error", "data.processes"),
        lambda run, _: (
            run.data.source == "python" or any(s.source != "memmap" for s in run.data.sources or [run.data])
        ),
        "data that is tokenized here, not token files",
    ),
    (
        ("data.trust_remote_code",),
        lambda run, _: any(s.records == "messages" for s in run.data.sources or [run.data]),
        'data.records = "messages"',
    ),
    (
        ("train.validate_every", "train.validate_sequences"),
        lambda run, _: run.data.source == "python" or run.data.validation_fraction > 0,
        "data.validation_fraction > 0",
    ),
    (("optimizer.momentum",), lambda run, _: run.optimizer.name.lower() == "sgd", 'optimizer.name = "sgd"'),
)


def unused_setting_notes(run: Run, device: DeviceType) -> list[str]:
    """Returns a note for each setting that differs from its default and has no effect on ranks of `device`.

    The precision of `run` is resolved: not `auto`. Settings that the planner's choices may use are left out.
    """
    plain, notes = Run(), list[str]()
    for names, has_effect, needs in _CONDITIONS:
        for name in names:
            section, _, key = name.partition(".")
            value = getattr(getattr(run, section), key)
            if value != getattr(getattr(plain, section), key) and not has_effect(run, device):
                notes.append(f"{name} = {json.dumps(value)} has no effect: it needs {needs}")
    return notes

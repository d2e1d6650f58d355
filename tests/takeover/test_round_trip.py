"""Imports of exports for other trainers hold exactly the tensors that were exported."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.manifest import Manifest, read_manifest
from fullshard.checkpoint.save import save
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.takeover.names import match_names
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_state import StateFormat, export_state
from tests.takeover.test_formats import read_back, taken_over
from tests.takeover.tiny import RUN, STEPS, Batches, initial, loss_of

OPTIMIZERS = {
    "adamw": RUN + '[[optimizer.groups]]\nmatch = ["head*"]\nlr_factor = 0.5\nbetas = [0.8, 0.9]\n',
    "sgd": RUN.replace("betas = [0.9, 0.999]", 'name = "sgd"\noptions = { momentum = 0.9 }'),
    "muon": RUN.replace("betas =", 'name = "muon"\nbetas ='),
}
# Forms that hold the optimizer, and how many steps it made: Accelerate has no other count than AdamW's.
FORMS: dict[str, tuple[StateFormat, ...]] = {
    "adamw": get_args(StateFormat),
    "sgd": ("dcp", "torchtitan", "torch"),
    "muon": ("dcp", "torchtitan"),
}
SETTINGS = {"lr", "initial_lr", "betas", "weight_decay"}


def train_and_save(run: Path, directory: Path) -> None:
    plan = Plan.from_run(
        Run.load(run, overrides=[f"train.steps={STEPS}"]), world_size=dist.get_world_size(), device="cpu"
    )
    model = shard(initial(), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Batches())
    for _ in train(state, plan, loss=loss_of):
        pass
    save(state, directory, plan=plan)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: Any) -> Callable[[str], tuple[Path, Path]]:
    """Returns a run.toml, and the directory of a checkpoint of it after STEPS steps on 2 ranks."""

    @cache
    def of_optimizer(name: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(name)
        run = directory / "run.toml"
        run.write_text(OPTIMIZERS[name])
        ranks(2).run(train_and_save, run, directory / "saved")
        return run, directory / "saved"

    return of_optimizer


def read_tensors(directory: Path) -> tuple[Manifest, Mapping[str, torch.Tensor]]:
    """Returns the manifest, and the model and the optimizer's state."""
    ((_, files),) = location_of(directory).list_checkpoints()
    manifest = read_manifest(directory / f"step-{STEPS:08d}")
    kept = {n: one for n, one in manifest.tensors.items() if n.startswith(("model.", "optimizer."))}
    tensors = {name: torch.empty(one.shape, dtype=one.torch_dtype) for name, one in kept.items()}
    CheckpointReader(files, manifest).read_tensors(tensors)
    return manifest, tensors


@pytest.mark.parametrize(("optimizer", "form"), [(name, form) for name in FORMS for form in FORMS[name]])
def test_an_export_is_imported_without_a_difference(
    optimizer: str, form: StateFormat, saved: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    run, directory = saved(optimizer)
    export_state(location_of(directory), tmp_path / "out", form=form, optimizer=True, weights="model")
    found, snapshot, target = taken_over(tmp_path / "out", Run.load(run))
    manifest, expected = read_tensors(directory)
    imported = read_back(snapshot, target, tmp_path / "in")
    assert imported.keys() == expected.keys()
    assert [name for name, one in imported.items() if not torch.equal(one, expected[name])] == []
    assert found.step == STEPS
    assert found.tokens in (None, manifest.values["tokens"])
    settings = [*target.compare_settings(match_names(found, target.model), step=STEPS)]
    assert [one.key for one in settings if one.differs] == []
    for group in cast(list[dict[str, Any]], manifest.values["parameter_groups"]):
        there = [one for one in found.optimizer.groups if {*group["params"]} & {*one.names}]
        of_muon = {"betas"} if group.get("kind") == "muon" else set[str]()  # which it does not use
        for key in group.keys() & SETTINGS - of_muon:
            value = tuple(group[key]) if isinstance(group[key], list) else (group[key],)
            assert {one.settings[key] for one in there} == {value}, key

"""Checkpoints and generations that earlier commits wrote load, are exported, and hold what they held then.

`earlier/*.zip`: a checkpoint that two ranks saved after three steps of `tests.training.runs.Regression` with
AdamW, and beside it `expected.safetensors`: its tensors as they were when it was saved, and the losses of the
next two steps. `first`: without an index of shards, and `ranks`: a file for each rank, which are refused;
`indexed`: with shards.json, which lists each shard; `listed`: as that, of four ranks with replicas of shards;
`layouts`: of four such ranks, with layouts in shards.json, and tables as files of their own.
`earlier/drive-*.zip`: a rank's directory on a drive, with the generations of steps 1 and 2.
"""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.load import iterate_damage, load
from fullshard.errors import CheckpointError
from fullshard.offload.directories import DataFileRegion
from fullshard.training.loop import train
from fullshard.weights.export import export
from tests.checkpoint.states import State
from tests.offload.writer import holds, opened, put
from tests.training.runs import mean_square, run_of, sharded

EARLIER = Path(__file__).parent / "earlier"
STEP = "step-00000003"
RECORD = DataFileRegion(name="group 0", offset_bytes=0, length_bytes=4096)


def unpacked(name: str, directory: Path) -> Path:
    with zipfile.ZipFile(EARLIER / f"{name}.zip") as file:
        file.extractall(directory)
    return directory


def tensors_in(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def resumed(directory: Path) -> tuple[int, dict[str, Tensor], list[float]]:
    """Loads on these ranks; the step, whole tensors, and the losses of two steps more."""
    run = run_of("train.steps=6", "sharding.strategy=full_shard", "schedule.kind=constant")
    state, plan = sharded(run)
    assert load(state, directory)
    step = state.step
    whole = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in state.tensors().items()
        if name.split(".")[0] in ("model", "optimizer")
    }
    steps = train(state, plan, loss=mean_square)
    return step, whole, [next(steps).loss for _ in range(2)]


@pytest.mark.parametrize("name", ["indexed", "listed", "now", "layouts"])
def test_a_checkpoint_of_an_earlier_version_loads_bit_for_bit_resumes_and_is_exported(ranks, tmp_path, name):
    directory = unpacked(name, tmp_path)
    expected = tensors_in(directory / "expected.safetensors")
    with safe_open(directory / "expected.safetensors", "pt") as file:
        losses = [float.fromhex(loss) for loss in json.loads(file.metadata()["losses"])]
    assert not list(iterate_damage(directory / STEP))
    for step, whole, came in ranks(2).run(resumed, directory):
        assert step == 3
        assert came == pytest.approx(losses, rel=1e-6)  # another torch or processor may round otherwise
        assert whole.keys() == expected.keys()
        for tensor_name, tensor in expected.items():
            assert torch.equal(whole[tensor_name], tensor), tensor_name
    export(directory, tmp_path / "model.safetensors")
    model = {n.removeprefix("model."): one for n, one in expected.items() if n.startswith("model.")}
    exported = tensors_in(tmp_path / "model.safetensors")
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[tensor_name], one) for tensor_name, one in model.items())


@pytest.mark.parametrize("name", ["first", "ranks"])
def test_a_checkpoint_without_an_index_of_shards_is_refused_and_stays(tmp_path, name):
    directory = unpacked(name, tmp_path)
    for act in (lambda: load(State(0, {}), directory), lambda: list(iterate_damage(directory / STEP))):
        with pytest.raises(CheckpointError, match="an earlier version wrote it"):
            act()
    assert (directory / STEP).exists()


@pytest.mark.parametrize("name", ["drive-first", "drive-now"])
def test_a_generation_of_an_earlier_version_is_read_and_followed(tmp_path, name):
    directory = unpacked(name, tmp_path)
    with opened(directory, records=[RECORD]) as generations:
        found = generations.list_complete_generations()
        assert [one.step for one in found] == [2, 1]
        assert all(holds(generations, one) for one in found)
        assert put(generations, 3).slot == found[1].slot

"""The export holds the bits of the checkpoint's model, and appears whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError, SpecError
from fullshard.weights.export import export, full_state
from tests.checkpoint.states import (
    State,
    assert_same,
    numbers,
    ones_own,
    saved,
    saved_sharded,
    sharded,
)

EVERY_DTYPE = {
    f"model.{dtype}": torch.arange(3).to(dtype)
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    + (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
}


def model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}


def test_the_export_of_shards_is_the_model(ranks, tmp_path):
    ranks(3).run(saved_sharded, tmp_path, 1, (3,))
    export(tmp_path, tmp_path / "out" / "model.safetensors")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model(numbers(1)))


def test_every_dtype_is_exported_and_aligned(tmp_path):
    save(State(1, EVERY_DTYPE), tmp_path)
    export(tmp_path, tmp_path / "model.safetensors")
    got = load_file(tmp_path / "model.safetensors")
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in model(EVERY_DTYPE).items()}
    assert all(torch.equal(t.float(), torch.arange(3).to(t.dtype).float()) for t in got.values())
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in got.items())


def test_tied_names_stand_in_the_metadata(tmp_path):
    save(
        State(1, {"model.embedding.weight": torch.ones(2)}, {"tied": {"head.weight": "embedding.weight"}}),
        tmp_path,
    )
    export(tmp_path, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        assert list(file.keys()) == ["embedding.weight"]


def export_on_rank_zero_alone(directory: Path) -> None:
    if dist.get_rank() == 0:
        export(directory, directory / "model.safetensors")


def test_one_rank_can_export_while_the_others_do_not(ranks, tmp_path):
    saved(tmp_path, 1)
    ranks(2).run(export_on_rank_zero_alone, tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), model(numbers(1)))


def test_an_export_that_fails_leaves_the_existing_file(tmp_path):
    path = saved(tmp_path / "checkpoints", 1)
    target = tmp_path / "model.safetensors"
    target.write_text("before")
    (path / "__0_0.distcp").write_bytes(bytes((path / "__0_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match=f"{path}/__0_0.distcp holds other bytes than were saved"):
        export(path, target)
    assert target.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


@pytest.mark.parametrize("place", ["checkpoints", "file/model.safetensors"])
def test_a_target_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    saved(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match=r"a directory|not a directory"):
        export(tmp_path / "checkpoints", tmp_path / place)


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    save(State(1, {"optimizer.step": torch.ones(1)}), tmp_path)
    with pytest.raises(CheckpointError, match="holds no model"):
        export(tmp_path, tmp_path / "model.safetensors")


def test_dtypes_that_safetensors_lacks_are_refused(tmp_path):
    save(State(1, {"model.phase": torch.ones(1, dtype=torch.complex128)}), tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.phase cannot be exported"):
        export(tmp_path, tmp_path / "model.safetensors")


def test_several_files_hold_the_model_and_their_index_names_them(tmp_path):
    path = saved(tmp_path / "checkpoints", 1)
    target = tmp_path / "out"
    export(path, target, shard_bytes=100)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(target.glob("*.safetensors"))
    held = {name: load_file(file) for file in files for name in load_file(file)}
    assert_same({name: held[name][name] for name in held}, model(numbers(1)))
    assert set(index["weight_map"]) == set(held)
    assert all(name in load_file(target / file) for name, file in index["weight_map"].items())
    assert all(
        sum(t.nbytes for t in load_file(file).values()) <= 100 or len(load_file(file)) == 1 for file in files
    )
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model(numbers(1)).values())


def everything(mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return dict(full_state(State(2, sharded(2, mesh_shape))))


def test_ranks_stream_the_whole_state(ranks):
    for rank, whole in enumerate(ranks(3).run(everything, (3,))):
        assert_same(whole, numbers(2) | {f"random.rank{rank}": ones_own(2, rank)})


def test_full_state_refuses_a_model():
    """Raised by the call, not with the first tensor."""
    with pytest.raises(
        SpecError, match=r"(?s)got: Linear.*full_state\(fullshard.TrainState\(model, optimizer\)\)"
    ):
        full_state(torch.nn.Linear(2, 2))

"""A save is all or nothing, never over something that is there, and fails on all ranks alike."""

import logging
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from fullshard.checkpoint.files import WRITER
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import LocalLocation, latest_checkpoint, location_of
from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import save
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.direct_io import LARGE_BYTES
from tests.checkpoint.states import (
    State,
    assert_same,
    loaded,
    loaded_sharded,
    mixed,
    numbers,
    ones_own,
    saved,
    saved_sharded,
    sharded,
)


def listing(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((2,), (3,)),
        ((3,), (1,)),
        ((2, 2), (3,)),
        ((1,), (2, 2)),
    ],
)
def test_a_save_loads_on_any_other_mesh(ranks, tmp_path, saving, loading):
    world, loading_world = (torch.Size(shape).numel() for shape in (saving, loading))
    paths = ranks(world).run(saved_sharded, tmp_path, 3, saving)
    assert paths == [tmp_path / "step-00000003"] * world
    for rank, (state, whole) in enumerate(ranks(loading_world).run(loaded_sharded, tmp_path, loading)):
        own = ones_own(3 if rank < world else 0, rank)  # a rank that did not save keeps its value
        assert_same(whole, numbers(3) | {f"random.rank{rank}": own})
        assert (state.step, state.noted) == (3, {"tokens": 300})


def test_saves_of_ranks_and_of_one_process_load_in_each_other(ranks, tmp_path):
    saved(tmp_path, 4)
    for state, whole in ranks(2).run(loaded_sharded, tmp_path, (2,)):
        assert state.step == 4
        assert_same({n: t for n, t in whole.items() if ".rank" not in n}, numbers(4))
    ranks(2).run(saved_sharded, tmp_path, 5, (2,))
    assert_same(loaded(tmp_path).held, numbers(5))


def test_the_manifest_lists_tensors_values_and_files(ranks, tmp_path):
    (path, _) = ranks(2).run(saved_sharded, tmp_path, 7, (2,))
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world_size, manifest.torch_version) == (7, 2, torch.__version__)
    assert manifest.values == {"step": 7, "tokens": 700}
    assert manifest.tensors["model.few_rows"].shape == (2, 3)
    assert manifest.tensors["model.few_rows"].torch_dtype == torch.bfloat16
    assert set(manifest.tensors) == {*numbers(7), "random.rank0", "random.rank1"}
    files = {file.name: file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"}
    assert {name: file.size_bytes for name, file in manifest.files.items()} == files
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= files.keys()


def test_the_plan_stands_in_the_manifest(tmp_path):
    plan = Plan.from_run(Run(), world_size=1)
    assert Plan.model_validate(read_manifest(saved(tmp_path, 1, plan=plan)).plan) == plan


def test_replicas_are_written_once(ranks, tmp_path):
    (one, _, _, _) = ranks(4).run(saved_sharded, tmp_path / "a", 1, (4, 1))
    (two, _, _, _) = ranks(4).run(saved_sharded, tmp_path / "b", 1, (1, 4))
    weights = sum(t.nbytes for t in numbers(1).values())
    shards = [sum(file.stat().st_size for file in path.glob("*.distcp")) for path in (one, two)]
    assert all(weights < size < weights + 4 * 16 + 2560 * 4 * (len(numbers()) + 1) for size in shards)


class _Refuses(State):
    def tensors(self):
        if dist.get_rank() == 1:
            raise RuntimeError("the GPU fell off the bus")
        return super().tensors()


class _CannotBePickled(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class _RefusesWithItsOwnException(State):
    def values(self):
        raise _CannotBePickled("this", "that")


def buffers_after_a_load(directory: Path) -> list[int]:
    held = {f"model.mean{index}": torch.tensor(dist.get_rank()) for index in range(6)}
    path = save(State(1, held), directory)
    target = State(0, dict.fromkeys(held, torch.tensor(-1)))
    load(target, path)
    return [int(target.held[name]) for name in held]


def test_plain_tensors_that_differ_between_ranks_are_those_of_rank_zero(ranks, tmp_path):
    assert ranks(3).run(buffers_after_a_load, tmp_path) == [[0] * 6] * 3


def refused(kind: type[State], directory: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        save(kind(2, sharded(2, (2,))), directory)
    return str(raised.value)


def test_a_rank_that_fails_fails_all_and_nothing_is_touched(ranks, tmp_path):
    saved(tmp_path, 1)
    before = listing(tmp_path)
    messages = ranks(2).run(refused, _Refuses, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "rank 1: taking the state to save failed.\n  got: RuntimeError: the GPU fell"
    )
    assert listing(tmp_path) == before


def test_an_exception_that_cannot_be_pickled_still_reaches_all(ranks, tmp_path):
    messages = ranks(2).run(refused, _RefusesWithItsOwnException, tmp_path)
    assert messages == ["taking the state to save failed.\n  got: _CannotBePickled: this and that"] * 2


def refused_by_the_file_system(directory: Path) -> str:
    """Rank 1 may write 4 KiB to a file."""
    tensors = {f"model.rank{dist.get_rank()}": torch.zeros(1 << 18)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError) as raised:
            save(State(2, tensors), directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(raised.value)


def test_a_rank_that_cannot_write_fails_all_with_the_reason(ranks, tmp_path):
    saved(tmp_path, 1)
    before = listing(tmp_path)
    messages = ranks(2).run(refused_by_the_file_system, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"rank 1: saving step 2 to {tmp_path} failed.\n  got: File too large")
    assert "why: a file may not grow so large there" in messages[0]
    assert listing(tmp_path) == before
    assert entries(tmp_path) == ["step-00000001"]


def disagree(directory: Path, on: str) -> str:
    rank = dist.get_rank()
    state = State(rank, numbers()) if on == "step" else State(1, numbers(), {"seen": rank})
    with pytest.raises(CheckpointError) as raised:
        save(state, directory)
    return str(raised.value)


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("step", "not at the same step.\n  got: rank 0 at 0, rank 1 at 1"),
        ("values", "do not hold the same values.\n  got: rank 1 differs from rank 0"),
    ],
)
def test_ranks_with_different_states_are_refused(ranks, tmp_path, on, message):
    assert all(message in said for said in ranks(2).run(disagree, tmp_path, on))
    assert not list(tmp_path.iterdir())


def save_to_a_directory_per_rank(directory: Path) -> str:
    here = directory / str(dist.get_rank())
    here.mkdir()
    os.chdir(here)
    with pytest.raises(CheckpointError) as raised:
        save(State(1, sharded(1, (2,))), "checkpoints")
    return str(raised.value)


def test_a_directory_that_ranks_do_not_share_is_refused(ranks, tmp_path):
    messages = ranks(2).run(save_to_a_directory_per_rank, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: the directory of checkpoints is not the same on all ranks.")
    assert not list(tmp_path.rglob(".tmp-*"))


def refused_partial(directory: Path) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(CheckpointError) as raised:
        save(State(1, {"model.sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])}), directory)
    return str(raised.value)


def test_partial_tensors_are_refused(ranks, tmp_path):
    assert all("'model.sum' cannot be saved" in said for said in ranks(2).run(refused_partial, tmp_path))


@pytest.mark.parametrize("tensor", [3.0, torch.empty(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_that_cannot_be_saved_are_refused_by_name(tmp_path, tensor):
    with pytest.raises(CheckpointError, match=r"'model\.odd' cannot be saved"):
        save(State(1, {"model.odd": tensor}), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), (1, 2), torch.ones(1), {1: "one"}])
def test_values_that_json_does_not_have_are_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="values cannot be saved"):
        save(State(1, numbers(), {"odd": value}), tmp_path)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    saved(tmp_path, 1)
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"not enough space.*\n  got: 100 B free, .* KiB needed"):
        saved(LocalLocation(tmp_path, free_bytes=lambda path: 100), 2)
    assert listing(tmp_path) == before


def most_padded():
    """Tensors just above the large size take the most padding for their bytes."""
    return {f"model.{i}": torch.zeros(LARGE_BYTES + 1, dtype=torch.uint8) for i in range(8)}


@pytest.mark.parametrize(
    ("make", "spare"),
    [(numbers, 2560 * 8), (mixed, 2560 * 9 + 4096 * 4), (most_padded, 2560 * 9 + 4096 * 8)],
)
def test_predicted_bytes_bound_the_written_bytes_closely(tmp_path, make, spare):
    state = State(1, make())
    size = sum(file.stat().st_size for file in save(state, tmp_path / "a").glob("*.distcp"))
    with pytest.raises(CheckpointError, match="not enough space"):
        save(state, LocalLocation(tmp_path / "b", free_bytes=lambda path: size))
    save(state, LocalLocation(tmp_path / "b", free_bytes=lambda path: size + spare))


def saved_with_free_bytes(directory: Path, mesh_shape: tuple[int, ...], free: int) -> str | None:
    try:
        save(State(1, sharded(1, mesh_shape)), LocalLocation(directory, free_bytes=lambda path: free))
    except CheckpointError as error:
        return error.what
    return None


def test_copies_on_other_ranks_need_no_space(ranks, tmp_path):
    weights = sum(tensor.nbytes for tensor in numbers(1).values())
    parts = len(numbers()) + 3 + 4  # three matrices in two parts each, and something of each rank's own
    needed = weights + 4 * 16 + 2560 * parts
    (refused, *_) = ranks(4).run(saved_with_free_bytes, tmp_path, (2, 2), needed - 1)
    assert refused == f"not enough space for {tmp_path}/step-00000001."
    assert ranks(4).run(saved_with_free_bytes, tmp_path, (2, 2), needed) == [None] * 4


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_checkpoint_directory_at_or_below_a_file_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="a file, not a directory") as raised:
        saved(tmp_path / place, 1)
    assert raised.value.fix == "a directory elsewhere"
    assert (tmp_path / "file").read_text() == "not a directory"


def test_an_existing_step_is_not_written_again(tmp_path, caplog):
    path = saved(tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    with caplog.at_level(logging.INFO, logger="fullshard"):
        assert saved(tmp_path, 1) == path
    assert f"{path} exists already" in caplog.messages
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def save_again_with_other_numbers(directory: Path) -> list[tuple[str, bool]]:
    """Saves step 1 of two states; returns the directories, and whether each holds the numbers of one."""
    found: list[tuple[str, bool]] = []
    for step in (1, 2):
        state = State(1, sharded(step, (dist.get_world_size(),)))
        path = Path(save(state, directory))
        target = State(0, sharded(0, (dist.get_world_size(),)))
        load(target, path)
        same = torch.equal(target.held["model.uneven"].to_local(), state.held["model.uneven"].to_local())
        found.append((path.name, same))
    return found


def test_an_existing_step_with_other_numbers_is_set_aside_and_kept(ranks, tmp_path):
    assert ranks(2).run(save_again_with_other_numbers, tmp_path) == [[("step-00000001", True)] * 2] * 2
    (aside,) = (name for name in entries(tmp_path) if name.startswith(".bad-step-00000001"))
    assert read_manifest(tmp_path / aside).step == 1


def test_a_step_of_another_model_is_refused(tmp_path):
    path = saved(tmp_path, 1)
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=f"{path} exists, and holds another model"):
        save(State(1, {"model.other": torch.ones(3)}), tmp_path)
    assert listing(tmp_path) == before


def test_a_broken_step_is_set_aside_and_kept(tmp_path, caplog):
    path = saved(tmp_path, 1)
    (path / "manifest.json").unlink()
    broken = listing(path)
    assert saved(tmp_path, 1) == path
    (aside,) = tmp_path.glob(".bad-step-00000001-*")
    assert listing(aside) == broken
    assert str(aside) in caplog.text
    assert latest_checkpoint(tmp_path) == path


def test_the_newest_k_whole_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    saved(tmp_path, 5, keep=2)
    assert entries(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    saved(tmp_path, 2, keep=1)  # rolled back: what is newer is not older than this
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000005"
    with pytest.raises(SpecError, match="negative"):
        saved(tmp_path, 6, keep=-1)


def test_remains_of_interrupted_saves_and_removals_are_removed(tmp_path):
    names = (".tmp-00000001-00000000", ".tmp-00000001-00000001", ".del-step-00000001-00000000")
    remains = [tmp_path / name for name in names]
    for path in remains:
        path.mkdir()
    (remains[0] / WRITER).write_text("{")
    foreign = tmp_path / ".tmp-00000001-00000002"
    foreign.mkdir()
    (foreign / "notes").touch()
    path = saved(tmp_path, 2)
    assert [one.exists() for one in (*remains, foreign)] == [False, False, False, True]
    assert latest_checkpoint(tmp_path) == path


def test_every_nth_step_is_kept_besides(tmp_path):
    for step in range(1, 8):
        saved(tmp_path, step, keep=2, keep_every=3)
    assert entries(tmp_path) == [f"step-0000000{step}" for step in (3, 6, 7)]


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path):
    saved(tmp_path, 1)
    with (
        LocalLocation(tmp_path).lock_for_writing(),
        pytest.raises(CheckpointError, match=f"another process is saving to {tmp_path}"),
    ):
        saved(tmp_path, 2)
    saved(tmp_path, 2)


def test_a_step_before_the_newest_is_saved_with_a_warning(tmp_path, caplog):
    saved(tmp_path, 5)
    assert "already" not in caplog.text
    saved(tmp_path, 2)
    assert "has step 5 already" in caplog.text


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3:///run", "gs://", "abfs:///run", "memory://"])
def test_a_url_without_a_bucket_is_no_place(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="names no bucket"):
        location_of(url)
    assert main(["ckpt", "list", url]) == SpecError.exit_code
    assert "names no bucket" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["s3:/bucket/run", Path("s3://bucket/run"), Path("memory://run")])
def test_a_url_that_lost_a_slash_is_no_directory(cut: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"://.* as text"):
        location_of(cut)

"""Remote tokens are those of a local copy, on any number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fullshard.data.build import build_packed_data
from fullshard.data.packed import PackedData
from fullshard.data.tokenizer import open_tokenizer
from fullshard.errors import DataError
from tests.data.samples import plan_of, run_of, save_tokenizer
from tests.data.test_memmaps import write_index
from tests.data.web import Web, serving

pytest.importorskip("aiohttp")
LENGTH, COUNT = 1024, 100_000
STEPS = range(3)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as running:
        yield running


@pytest.fixture
def tokens(tmp_path: Path, web: Web) -> Path:
    """Token files in a directory, which `web` serves."""
    directory = tmp_path / "tokens"
    directory.mkdir()
    numbers = np.random.default_rng(0).integers(0, 280, COUNT, dtype=np.uint16)
    numbers.tofile(directory / "a.bin")
    write_index(directory / "a.idx", [1000] * (COUNT // 1000), [*range(COUNT // 1000 + 1)])
    np.save(directory / "b.npy", numbers[: COUNT // 8 * 8].reshape(8, -1))
    np.save(directory / "c.npy", numbers)
    web.files = {f"/{path.name}": path.read_bytes() for path in directory.iterdir()}
    return directory


def data_of(cache: Path, *paths: str, **settings: object) -> PackedData:
    return build_packed_data(run_of(cache, source="memmap", paths=paths, sequence_length=LENGTH, **settings))


def rows_of(data: PackedData, *, world: int, microbatch: int) -> torch.Tensor:
    """The tokens and labels of `STEPS`, in the order of the samples."""
    plan = plan_of(world, microbatch, 8 // (world * microbatch))
    rows: list[torch.Tensor] = []
    for step in STEPS:
        turns = zip(*(data.microbatches(step, rank=rank, plan=plan) for rank in range(world)), strict=True)
        rows += [torch.stack((one["tokens"], one["labels"])) for turn in turns for one in turn]
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize(
    ("name", "packing"), [("a.bin", "best_fit"), ("b.npy", "concat"), ("c.npy", "concat")]
)
def test_batches_are_those_of_a_local_copy_on_any_number_of_ranks(
    tmp_path: Path, web: Web, tokens: Path, name: str, packing: str
):
    expected = rows_of(data_of(tmp_path / "c", f"{tokens}/{name}", packing=packing), world=1, microbatch=8)
    for world, microbatch in ((1, 8), (2, 2), (4, 1)):
        remote = data_of(tmp_path / "cache", f"{web.url}/{name}", packing=packing)
        assert torch.equal(rows_of(remote, world=world, microbatch=microbatch), expected)


def test_a_download_that_fails_is_tried_again_and_then_named(tmp_path: Path, web: Web, tokens: Path):
    data = data_of(tmp_path, f"{web.url}/c.npy?signature=SECRET")
    expected = rows_of(data, world=1, microbatch=8)
    answers = iter([500])
    web.status = lambda path: next(answers, 200)
    assert torch.equal(rows_of(data, world=1, microbatch=8), expected)
    assert list(answers) == []
    web.status = lambda path: 500
    with pytest.raises(DataError, match=r"c\.npy cannot be read(?s:.)*500") as raised:
        rows_of(data, world=1, microbatch=8)
    assert "SECRET" not in str(raised.value)


def test_a_tokenizer_saves_the_pass_over_all_tokens_and_checks_those_that_are_read(
    tmp_path: Path, web: Web, tokens: Path
):
    tokenizer = save_tokenizer(tmp_path / "tok")
    web.gets.clear()
    rows_of(data := data_of(tmp_path, f"{web.url}/a.bin", tokenizer=tokenizer), world=1, microbatch=8)
    assert data.vocabulary == open_tokenizer(tokenizer).vocabulary_size
    assert f"/a.bin bytes=0-{2 * COUNT - 1}" not in web.gets
    web.files["/a.bin"] = b"\xff" * len(web.files["/a.bin"])
    with pytest.raises(DataError, match="not a token(?s:.)*65535"):
        rows_of(data_of(tmp_path, f"{web.url}/a.bin", tokenizer=tokenizer), world=1, microbatch=8)


def test_a_remote_index_needs_its_tokens(web: Web, tokens: Path, tmp_path: Path):
    del web.files["/a.bin"]
    with pytest.raises(DataError, match=r"a\.bin cannot be read(?s:.)*only its \.idx"):
        data_of(tmp_path, f"{web.url}/a.idx")

"""A drive's rate: the same on all ranks, and nothing left behind; none where a rank cannot write."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from fullshard.jobs.calibrate.device import open_two_random_files, read_plus_write_bandwidth


def rate_of(directory: Path) -> float | None:
    return read_plus_write_bandwidth(directory, pieces=1)


def test_all_ranks_find_the_same_and_leave_nothing(ranks, tmp_path: Path):
    one, other = ranks(2).run(rate_of, tmp_path)
    assert one == other
    assert one > 0
    assert not list(tmp_path.iterdir())


def rate_where_one_has_none(directory: Path) -> float | None:
    return rate_of(directory if dist.get_rank() == 0 else directory / "missing")


def test_drive_rate_is_none_if_a_rank_cannot_write(ranks, tmp_path: Path):
    assert ranks(2).run(rate_where_one_has_none, tmp_path) == [None, None]
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_killed_while_it_measures_leaves_nothing(tmp_path: Path):
    with ExitStack() as open_files:
        open_two_random_files(tmp_path, open_files, pieces=1)
        assert not list(tmp_path.iterdir())

"""Chosen steps of chosen ranks are profiled, with shapes and stacks."""

import gzip
import json
from pathlib import Path

import torch

from fullshard.jobs.profiles import profile_if_chosen
from fullshard.spec.run import Run

SECTION = Run.load(overrides=["log.profile=[3]", "log.profile_ranks=[1]"]).log


def test_a_chosen_step_and_rank_is_profiled_and_no_other(tmp_path: Path):
    for step, rank in ((2, 1), (3, 0), (3, 1)):
        with profile_if_chosen(SECTION, step, rank=rank, directory=tmp_path, say=print):
            torch.ones(3, 5) @ torch.ones(5, 2)
    [path] = (tmp_path / "profiles").iterdir()
    assert path.name == "step-00000003-rank-00001.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    shapes = [one["args"]["Input Dims"] for one in events if one["name"] == "aten::mm"]
    assert shapes == [[[3, 5], [5, 2]]]
    assert any(one.get("cat") == "python_function" for one in events)


def test_a_profile_that_cannot_be_written_is_reported(tmp_path: Path):
    said: list[str] = []
    (tmp_path / "profiles").write_text("a file")
    with profile_if_chosen(SECTION, 3, rank=1, directory=tmp_path, say=said.append):
        pass
    assert "cannot be written" in said[0]

"""Resident memory of a CPU rank with its state on a drive is as planned, also under a limit near it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.resident import limit_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc"),
]


WIDE = ("model.d_model=768", "model.d_ff=2304", "model.layers=40")


@pytest.mark.parametrize("tier", ["optimizer:nvme", "params+optimizer:nvme"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resident_memory_is_as_planned(ranks: int, tier: str, tmp_path: Path):
    """A rank keeps its gradients and buffers, of 969 MB of state."""
    ended = start("measured", tmp_path, ranks=ranks, tier=tier)
    assert ended.returncode == 0, ended.stderr
    for rank in range(ranks):
        found = left(tmp_path, rank)
        assert found["peak"] == pytest.approx(found["planned"], rel=0.1)


@pytest.mark.parametrize(("ranks", "settings"), [(1, ()), (4, WIDE)], ids=["1", "4, eight times"])
def test_run_under_a_hard_limit_needs_the_tier(ranks: int, settings: tuple[str, ...], tmp_path: Path):
    """The whole of `fullshard train`: data, the memory meter, validation, checkpoint."""
    limit = limit_of("params+optimizer:nvme", *settings, ranks=ranks)
    tiered = partial(start, "limited", ranks=ranks, settings=settings, limit=limit)
    kept = tiered(tmp_path / "kept", tier="params+optimizer:nvme")
    assert kept.returncode == 0, kept.stderr
    assert all(left(tmp_path / "kept", rank)["space"] <= limit for rank in range(ranks))
    there = tiered(tmp_path / "there", tier="none")
    assert there.returncode != 0
    assert "memory" in there.stderr


def start(
    job: str,
    directory: Path,
    *,
    ranks: int,
    tier: str,
    settings: Sequence[str] = (),
    limit: int | None = None,
) -> "subprocess.CompletedProcess[str]":
    directory.mkdir(exist_ok=True)
    settings = [f"run.ranks={ranks}", f"train.global_batch={ranks}", f"offload.tier={tier}", *settings]
    if job == "limited":
        settings += ["train.steps=4", "train.validate_every=0", "train.validate_sequences=4"]
        settings += ["log.trace_every=0"]
    # Address space, unlike memory, is also what each thread's arena would reserve.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    own = os.environ | malloc | ({} if limit is None else {"RESIDENT_LIMIT": str(limit)})
    command = [sys.executable, "-m", "tests.training.resident", job, str(directory / "run"), *settings]
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=400)


def left(directory: Path, rank: int) -> dict[str, Any]:
    return json.loads((directory / f"run-{rank}.json").read_text())

"""`fullshard train`, after its ranks have ended."""

import time
from pathlib import Path

import pytest

from fullshard.cli.train import _advise_after_out_of_memory
from fullshard.jobs.for_run import request_with_plan
from fullshard.launch.request import LaunchRequest
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.run_files import EVENTS, OUT_OF_MEMORY
from fullshard.spec.run import Run
from tests.jobs.test_for_run import SMALL


def test_the_first_rank_that_ran_out_of_memory_plans_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.load(overrides=[*SMALL, f"run.dir={tmp_path}"])
    plan = request_with_plan(LaunchRequest(run=run)).plan
    assert plan is not None
    assert plan.prediction is not None
    reports = {rank: tmp_path / OUT_OF_MEMORY / f"rank-{rank}.txt" for rank in (3, 1)}
    held = plan.prediction.memory.total
    reports[3].parent.mkdir()
    for rank, path in reports.items():
        path.write_text("")
        details = {"rank": rank, "path": str(path), "held_bytes": held, "requested_bytes": None}
        RunEvent.now("out_of_memory", attempt=1, details=details).append_to(tmp_path / EVENTS)
    variables = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    for rank, count in ((1, 0), (3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        _advise_after_out_of_memory(run, plan, since=time.time() - 60)
        assert capsys.readouterr().err.count("would have fitted: ") == count
        assert [path.read_text().count("would have fitted: ") for path in reports.values()] == [count] * 2

"""`fullshard train`, after its ranks have ended."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fullshard.cli.train import _advise_after_out_of_memory
from fullshard.jobs.for_run import request_with_plan
from fullshard.launch.request import LaunchRequest
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.run_files import EVENTS, OUT_OF_MEMORY
from fullshard.spec.run import Run
from tests.jobs.test_for_run import SMALL


def test_one_of_the_ranks_that_end_plans_for_those_that_ran_out_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    capsys.readouterr()
    for ended in (2, 1):  # at the same time, as when one loses the other; and later
        with ThreadPoolExecutor(ended) as threads:
            since = time.time() - 60
            for _ in range(ended):
                threads.submit(_advise_after_out_of_memory, run, plan, since=since)
        assert capsys.readouterr().err.count("would have fitted: ") == ended - 1
        assert [path.read_text().count("would have fitted: ") for path in reports.values()] == [1, 1]

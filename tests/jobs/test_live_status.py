"""live.json and the file for Prometheus have the state of the run, and no step waits for them."""

import re
import threading
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.jobs.live_status import LiveStatusWriter
from fullshard.jobs.progress import StepMetrics
from fullshard.jobs.prometheus import check_prometheus_file, prometheus_text
from fullshard.spec.live_status import MOST_RANKS, LiveStatus, RankStatus
from fullshard.spec.run import Run
from fullshard.survival.phase import Heartbeat, PhaseTracker, RunPhase

SAMPLE = re.compile(r'fullshard_\w+\{(\w+="(\\.|[^"\\])*",?)*\} [-+.\de]+')


def step(index: int) -> StepMetrics:
    return StepMetrics(
        step=index, loss=2.5, grad_norm=1.0, learning_rate=1e-3, tokens=100, trained_tokens=20, seconds=0.5
    )


def heartbeat(rank: int) -> Heartbeat:
    return Heartbeat(
        "node 4026", 100 + rank, step=3, phase="data", unmoved_seconds=float(rank), limit_seconds=9, at=0
    )


def close(writer: LiveStatusWriter) -> None:
    """Closes it, and waits for its thread, which a run does not do for long."""
    writer.close()
    for thread in threading.enumerate():
        if thread.name == "fullshard live status":
            thread.join(60)


def written(directory: Path, *, ranks: int = 2, **log: object) -> LiveStatusWriter:
    """The writer of a run after three steps, closed."""
    run = Run.parse({"run": {"dir": str(directory)}, "train": {"steps": 10}, "log": log}, source="the test")
    where = PhaseTracker()
    writer = LiveStatusWriter(run, world_size=ranks, attempt=2, where=where)
    where.heartbeats = {rank: heartbeat(rank) for rank in range(ranks)}
    for index in (1, 2, 3):
        writer.note_step(step(index), figures=step(index).measured_values())
    writer.note_memory({rank: {"host_bytes": 10.0 * rank, "allocator_retries": 1.0} for rank in range(ranks)})
    writer.note_event("save", step=2, details={})
    writer.note_event("straggler", step=3, details={"rank": 1, "cause": "data", "seconds": 0.25})
    close(writer)
    return writer


def test_the_file_has_the_last_step_the_save_and_each_rank(tmp_path: Path):
    written(tmp_path)
    status = LiveStatus.read_json(tmp_path / "live.json", what="the state")
    assert (status.step, status.steps, status.attempt, status.running) == (3, 10, 2, False)
    assert (status.saved_step, status.tokens, status.trained_tokens, status.step_seconds) == (2, 300, 60, 1.5)
    assert status.tokens_per_second == 200
    assert [(one.host, one.phase, one.memory["host_bytes"]) for one in status.ranks] == [
        ("node", "data", 0.0),
        ("node", "data", 10.0),
    ]
    assert [(one.rank, one.cause) for one in status.stragglers] == [(1, "data")]


def test_of_many_ranks_those_that_have_been_in_their_phase_for_longest_are_listed(tmp_path: Path):
    written(tmp_path, ranks=MOST_RANKS + 10)
    status = LiveStatus.read_json(tmp_path / "live.json", what="the state")
    assert [one.rank for one in status.ranks] == [*range(10, MOST_RANKS + 10)]
    assert status.phases == {"data": MOST_RANKS + 10}


def test_without_a_watchdog_the_rank_that_writes_is_known(tmp_path: Path):
    where = PhaseTracker()
    where.enter(RunPhase.SAVING)
    run = Run.parse({"run": {"dir": str(tmp_path)}}, source="the test")
    close(LiveStatusWriter(run, world_size=2, attempt=1, where=where))
    status = LiveStatus.read_json(tmp_path / "live.json", what="the state")
    assert [(one.rank, one.phase) for one in status.ranks] == [(0, "saving")]


def test_prometheus_reads_every_line(tmp_path: Path):
    check_prometheus_file(tmp_path / "run.prom")
    written(tmp_path, prometheus=str(tmp_path / "run.prom"))
    check_prometheus_file(tmp_path / "run.prom")  # of an earlier run
    lines = (tmp_path / "run.prom").read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    names = [line.partition("{")[0] for line in samples]
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert typed == {*names}
    assert f'fullshard_memory_bytes{{run="{tmp_path}",kind="host",rank="1",host="node"}} 10.0' in samples


def test_a_label_may_have_any_characters():
    status = LiveStatus(
        at="2026-11-25T10:00:00Z", interval_seconds=2, process="a:1", steps=1, ranks=(RankStatus(rank=0),)
    )
    text = prometheus_text(status, run='a"b\\c\nd')
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


def test_a_file_that_cannot_be_written_is_reported_and_not_raised(tmp_path: Path):
    writer = written(tmp_path, prometheus=str(tmp_path / "absent" / "run.prom"))
    message = writer.take_message()
    assert message is not None
    assert "run.prom cannot be written: No such file or directory" in message
    assert (tmp_path / "live.json").exists()


def test_a_name_that_node_exporter_ignores_is_refused():
    with pytest.raises(SpecError, match=r"\.prom"):
        Run.parse({"log": {"prometheus": "figures.txt"}}, source="the test")


def test_a_prometheus_file_of_another_program_is_not_replaced(tmp_path: Path):
    (tmp_path / "nvme.prom").write_text("nvme_temperature 40\n")
    with pytest.raises(SpecError, match="of another program"):
        check_prometheus_file(tmp_path / "nvme.prom")

"""live.json has the state of the run, and no step waits for it."""

import threading
from pathlib import Path

from fullshard.observe.live_status import LiveStatusWriter
from fullshard.observe.progress import StepMetrics
from fullshard.spec.records.live_status import MOST_RANKS, LiveStatus
from fullshard.spec.run import Run
from fullshard.survival.phase import Heartbeat, PhaseTracker, RunPhase


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


def written(directory: Path, *, ranks: int = 2) -> LiveStatusWriter:
    """The writer of a run after three steps, closed."""
    run = Run.parse({"run": {"dir": str(directory)}, "train": {"steps": 10}}, source="the test")
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
    assert (status.saved_step, status.tokens) == (2, 300)
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

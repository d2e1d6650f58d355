"""Sixty-four ranks start, train, save, hang, are diagnosed, and resume: as many processes on one machine."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.checkpoint import load
from fullshard.checkpoint.background import BackgroundSaver
from fullshard.distributed.loopback import LOOPBACK, start_store_on_loopback
from fullshard.errors import TrainError
from fullshard.parallel.mesh import process_group
from fullshard.survival.watchdog import watch_for_hangs
from fullshard.system.process import call_on_watchdog_exit
from fullshard.training.loop import train
from tests.ranks.pool import warm
from tests.training.hangs import FOREVER, HANGS_AT, PATIENT, Hanging
from tests.training.runs import mean_square, run_of, sharded

RANKS, CULPRIT, STEPS = 64, 37, 4
SETTINGS = (f"train.global_batch={RANKS}", f"train.steps={STEPS}")
SETTINGS += ("fault_tolerance.watchdog_timeout_seconds=60",)
SHARDED = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=8")


def run_rank(rank: int, ranks: int, port: int, directory: Path, hangs: bool) -> None:
    """One rank as a launcher starts it, which resumes from the checkpoint, if there is one."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    os.dup2(os.open(directory / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    losses = dict[int, float]()

    def leave_note(error: TrainError | None = None) -> None:
        note = {"said": str(error), "losses": losses}
        (directory / f"note-{rank}").write_text(json.dumps(note))

    with process_group("cpu"), call_on_watchdog_exit(leave_note, shows_error=True):
        state, plan = sharded(run_of(*SETTINGS, *(SHARDED if ranks > 1 else ())))
        load(state, directory / "checkpoints", missing_ok=True)
        state.data = Hanging("sleeps_in_the_data" if hangs else "nothing", CULPRIT)
        with (
            watch_for_hangs(state.phase, plan.run.fault_tolerance, **PATIENT),
            BackgroundSaver(directory / "checkpoints", plan=plan) as saver,
        ):
            for step in train(state, plan, loss=mean_square):
                losses[state.step] = step.loss
                if state.step == HANGS_AT:
                    saver.save(state)
                    saver.wait()
    leave_note()


def notes_of_attempt(store: dist.TCPStore, directory: Path, *, ranks: int, hangs: bool) -> list[dict]:
    """The notes that the ranks of one attempt left, each with its exit code."""
    arguments = ((rank, ranks, store.port, directory, hangs) for rank in range(ranks))
    processes = [warm().Process(target=run_rank, args=one) for one in arguments]
    for process in processes:
        process.start()
    notes = list[dict]()
    for rank, process in enumerate(processes):
        process.join(timeout=FOREVER)
        note = directory / f"note-{rank}"
        notes.append({"code": process.exitcode, **(json.loads(note.read_text()) if note.exists() else {})})
        process.kill()
        process.join()
        note.unlink(missing_ok=True)
    return notes


@pytest.mark.long
def test_many_ranks_start_save_hang_are_diagnosed_and_resume(tmp_path: Path) -> None:
    store = start_store_on_loopback()  # outlives the attempts, as a launcher's
    hung = notes_of_attempt(store, tmp_path, ranks=RANKS, hangs=True)
    assert [one["code"] for one in hung] == [TrainError.exit_code] * RANKS
    said = rf"rank {CULPRIT} does not come to the collective that ranks 0-{CULPRIT - 1}, {CULPRIT + 1}-"
    assert all(re.match(said, one["said"]) for one in hung), hung[0]["said"]
    resumed = notes_of_attempt(store, tmp_path, ranks=RANKS, hangs=False)
    assert [one["code"] for one in resumed] == [0] * RANKS
    assert {tuple(one["losses"]) for one in resumed} == {("3", "4")}, "those after the save"
    (tmp_path / "alone").mkdir()
    [alone] = notes_of_attempt(start_store_on_loopback(), tmp_path / "alone", ranks=1, hangs=False)
    for one in (*resumed, *hung):
        expected = {step: alone["losses"][step] for step in one["losses"]}
        assert one["losses"] == pytest.approx(expected, rel=1e-4)

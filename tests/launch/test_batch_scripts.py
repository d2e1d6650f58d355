"""The batch scripts of deploy/ requeue a job that was interrupted and got further, and no other."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fullshard.checkpoint.manifest import SKIPPED_IN_A_ROW
from fullshard.checkpoint.save import save
from fullshard.cli.main import main
from tests.checkpoint.states import State, numbers

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted(DEPLOY.glob("slurm-*.sh"))
INTERRUPTED = {"fullshard": 75, "torchrun": 1}  # their exit codes
TIMEOUT = 200

# SIGTERM ends both after a save, which changes what `fullshard ckpt list` prints.
TRAINS = """#!/bin/bash
if [ "$1 $2" = "ckpt list" ]; then cat listed; exit; fi
trap 'cp listed_after listed; exit $CODE' TERM
echo $$ > trains.part; mv trains.part trains
for _ in {1..6000}; do sleep 0.02; done
"""
FAKES = {
    "fullshard": TRAINS,
    "torchrun": TRAINS,
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scancel": "#!/bin/bash\nkill -TERM $(cat trains)\n",
    "scontrol": '#!/bin/bash\n[ "$1" = requeue ] && touch requeued || echo host1\n',
}


@dataclass(frozen=True)
class Case:
    """A job that SLURM starts for the `restarts`-th time, and the steps in its directory before and after."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    restarts: int = 1
    torn: int | None = None  # a step whose checkpoint is not whole
    avoided: int | None = None  # a step whose checkpoint was saved while steps were skipped
    finished: bool = False
    requeued: bool = False


CASES = [
    Case("the first start saves", (), (4,), restarts=0, requeued=True),
    Case("the first start sets a longer run aside", (40,), (4,), restarts=0, requeued=True),
    Case("the first start saves nothing", (), (), restarts=0),
    Case("a later one saves", (4,), (4, 12), requeued=True),
    Case("a later one saves, and prunes", (4, 8), (12,), requeued=True),
    Case("a later one saves nothing", (4,), (4,)),
    Case("a later one saves, and not a whole step", (4,), (4, 8), torn=8),
    Case("a later one saves, and skipped steps only", (4,), (4, 8), avoided=8),
    Case("a run finishes when it is asked to stop", (4,), (4, 8), finished=True),
]


def listing(directory: Path, steps: tuple[int, ...], *, case: Case, capsys) -> str:
    for step in steps:
        path = save(State(step, numbers(step), {SKIPPED_IN_A_ROW: int(step == case.avoided)}), directory)
        if step == case.torn:
            (path / "__0_0.distcp").unlink()
    capsys.readouterr()
    main(["ckpt", "list", str(directory)])
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_is_requeued_only_if_it_was_interrupted_and_got_further(
    case: Case, script: Path, tmp_path: Path, capsys
) -> None:
    for name, fake in FAKES.items():
        (tmp_path / name).write_text(fake)
        (tmp_path / name).chmod(0o700)
    for name, steps in (("listed", case.before), ("listed_after", case.after)):
        found = listing(tmp_path / f"run of {name}", steps, case=case, capsys=capsys)
        (tmp_path / name).write_text(found)
    trainer = "torchrun" if "torchrun" in script.read_text() else "fullshard"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CODE": str(0 if case.finished else INTERRUPTED[trainer]),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_RESTART_COUNT": str(case.restarts),
    }
    process = subprocess.Popen(["bash", script], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "trains").exists():
        assert time.monotonic() < deadline, "it does not train"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == int(environment["CODE"])
    assert (tmp_path / "requeued").exists() is case.requeued

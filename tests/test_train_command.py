"""`fullshard train` as a person uses it: processes, a signal, --resume."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.errors import INTERRUPTED_EXIT_CODE
from fullshard.spec.records.measurement import Measurement

TINY = [
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=32"),
    *("data.sequence_length=16", "train.global_batch=12", "train.validate_every=0"),
    *("train.validate_sequences=4", "run.device=cpu"),
]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def command(directory: Path, *settings: str, resume: bool = False, by: tuple[str, ...] = ()) -> list[str]:
    argv = [sys.executable, *by, "-m", "fullshard", "train", *(["--resume"] if resume else [])]
    return [*argv, *(p for s in [*TINY, f"run.dir={directory}", *settings] for p in ("--set", s))]


def steps_logged(directory: Path) -> list[int]:
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_for_steps(directory: Path, process: subprocess.Popen[str], count: int) -> None:
    while len(steps_logged(directory)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and their children would too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "before", "after", "by"),
    [
        pytest.param(signal.SIGINT, 2, 3, (), marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, 3, (), marks=pytest.mark.long),
        (signal.SIGINT, 1, 2, TORCHRUN),
    ],
    ids=["SIGINT", "SIGTERM", "SIGINT, then torchrun"],
)
def test_stopped_run_resumes_with_other_ranks_and_strategy(
    number: signal.Signals, before: int, after: int, *, by: tuple[str, ...], tmp_path: Path
) -> None:
    """With ranks of its own, and with those that torchrun gives."""
    directory = tmp_path / "run"
    argv = command(directory, "train.steps=100000", f"run.ranks={before}", "sharding.strategy=full_shard")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(directory, process, 4)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()  # its ranks end with it
    assert process.returncode == INTERRUPTED_EXIT_CODE, said
    assert "--resume" in said
    done = steps_logged(directory)
    assert done == list(range(1, len(done) + 1))

    last = len(done) + 3
    own = () if by else (f"run.ranks={after}",)
    argv = command(directory, f"train.steps={last}", *own, "sharding.strategy=zero1", resume=True, by=by)
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert steps_logged(directory) == list(range(1, last + 1))
    measurement = Measurement.load(directory / "measurement.json")
    assert (measurement.first_step, measurement.last_step, measurement.world_size) == (last - 2, last, after)
    assert measurement.checkpoint is not None
    assert Path(measurement.checkpoint).is_dir()
    assert "validation" in finished.stdout
    assert "predicted" in finished.stdout
    assert measurement.checkpoint in finished.stdout
    assert finished.stdout.count("\ncheckpoint") == 1, "one rank prints what happened"

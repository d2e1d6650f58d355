"""Under torchrun: ranks that are killed come back, nodes leave and return, and the curve stays the same."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.faults.agents import Agents, free_port, ranks_of
from tests.launch.jobs import SMALL

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc"),
]

RUN = (
    "sharding.strategy=full_shard",
    "schedule.kind=constant",  # so that a run of fewer steps is the beginning of a longer one
    "checkpoint.every=10",
    "optimizer.learning_rate=1e-3",
)
PACED = "optimizer.name=tests.faults.paced.PacedAdamW"

Start = Callable[..., Agents]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    """`launch(*settings, flags=...)`: agents of one run in `tmp_path / "run"`."""
    made: list[Agents] = []

    def launch_one(*settings: str, flags: list[str]) -> Agents:
        made.append(Agents(tmp_path / "run", *RUN, *settings, flags=flags))
        return made[-1]

    yield launch_one
    for agents in made:
        agents.kill()


def undisturbed(directory: str, steps: int) -> list[float]:
    settings = [*SMALL, *RUN, PACED, f"train.steps={steps}", f"run.dir={directory}"]
    run = Run.load(overrides=settings)
    plan = Plan.from_run(run, world_size=int(os.environ["WORLD_SIZE"]))
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())
    lines = Path(directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def newest_step(agents: Agents) -> int:
    names = [path.name for path in (agents.directory / "checkpoints").glob("step-*")]
    return max(int(name.removeprefix("step-")) for name in names)


def test_a_killed_rank_is_started_again_by_torchrun(launch: Start, ranks, tmp_path: Path) -> None:
    """In the store that torchrun keeps over its restarts, with what the dead have left in it."""
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    agents = launch(PACED, "train.steps=30", flags=flags)
    agent = agents.start()
    for step in (12, 22):
        agents.wait_for_step(step)
        os.kill(ranks_of(agent)[-1], signal.SIGKILL)
        agents.wait_until(lambda: "restarted on 2 ranks" in agents.said())
    assert agent.wait(timeout=150) == 0, agents.said()
    assert [path.name for path in tmp_path.glob("run.*")] == []
    straight = ranks(2).run(undisturbed, str(tmp_path / "straight"), 30)[0]
    assert [line["loss"] for line in agents.lines()] == straight


def test_a_run_resumes_with_fewer_nodes_and_with_returning_ones(launch: Start, ranks, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ["--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-id=elastic"]
    flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    flags += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    agents = launch(PACED, "train.steps=100000", flags=flags)
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/restarts.md
    for _ in range(4):
        agents.start(environment=own_store)
    agents.wait_for_ranks(4)
    agents.wait_for_step(12)
    agents.started[-1].kill()  # not the host of the rendezvous
    agents.wait_for_ranks(3)
    agents.start(environment=own_store)
    agents.wait_for_ranks(4)
    agents.stop()

    lines = agents.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert newest_step(agents) == len(lines), "asked to stop, it saves"
    straight = ranks(4).run(undisturbed, str(tmp_path / "straight"), len(lines))[0]
    assert [line["loss"] for line in lines] == pytest.approx(straight, abs=1e-5)

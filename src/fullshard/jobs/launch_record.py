"""The identity of a launch, and the record that it leaves in the run's directory."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel
from fullshard.system.files import write_file_atomically
from fullshard.system.process import read_stat_fields_after_comm

# Names that torchrun gives to a launch without a name.
_NAMELESS = ("", "none")


class LaunchRecord(FrozenModel):
    """The file launch.json: the last attempt to train in a run's directory. See `LaunchId` for the fields.

    ended: how the attempt ended; None while it runs, and if it was killed
    """

    agents: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    world_size: int = 1
    ended: Literal["finished", "interrupted"] | None = None

    def save(self, path: Path) -> None:
        """Writes the record atomically. Without the record, the directory is not recognised as a run's."""
        write_file_atomically(path, self.model_dump_json() + "\n")

    def resume_message(self, world_size: int, *, step: int, steps: int) -> str:
        """Returns the message that an attempt on `world_size` ranks, after this one, resumes after `step`."""
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if world_size != self.world_size:
            ranks += f" ({self.world_size} before)"
        if step == 0:
            return f"restarted on {ranks}: nothing was saved, so it starts again at step 1 of {steps}"
        return f"restarted on {ranks}: resumes after step {step} of {steps}"

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Reads the record; returns None if the file does not exist or another program wrote it."""
        try:
            record = cls.read_json(path, what="the record of a launch")
        except SpecError:
            return None
        return record if record.model_fields_set >= {"jobs", "world_size"} else None


@dataclass(frozen=True)
class LaunchId:
    """The identity of a launch: one command, with all its attempts.

    agents: the processes that restart ranks, one per node: torchrun's agents, or fullshard's launcher. Two
        attempts of one launch share at least one agent, whichever nodes have left or joined.
    jobs: names that a person (torchrun's run id) or a scheduler (SLURM's job and restart count) gave it
    earlier_jobs: the `jobs` that earlier attempts of this launch recorded
    """

    agents: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    earlier_jobs: frozenset[str] = frozenset()
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Returns the launch as this rank sees it, from the variables of torchrun and SLURM."""
        name = environment.get("TORCHELASTIC_RUN_ID", "")
        jobs = {f"torchrun:{name}"} if name not in _NAMELESS else set[str]()
        earlier = jobs.copy()
        job, times = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
        if job is not None:
            # Two commands of one job are two launches, unless the job was requeued in between.
            count = int(times) if times.isdecimal() else 0
            jobs.add(f"slurm:{job}:{count}")
            earlier |= {f"slurm:{job}:{before}" for before in range(count)}
        agents = {f"{_restarting_agent_id()}:{name}"} if name else set[str]()
        return cls(agents=frozenset(agents), jobs=frozenset(jobs), earlier_jobs=frozenset(earlier))

    @classmethod
    def merge_ranks(cls, launches: Sequence[Self]) -> Self:
        """Combines the launch ids that all ranks have of one launch. Takes the names from rank 0."""
        agents = frozenset[str]().union(*(one.agents for one in launches))
        return replace(launches[0], agents=agents, world_size=len(launches))

    def make_record(self) -> LaunchRecord:
        agents, jobs = tuple(sorted(self.agents)), tuple(sorted(self.jobs))
        return LaunchRecord(agents=agents, jobs=jobs, world_size=self.world_size)

    def find_earlier_attempt(self, path: Path) -> LaunchRecord | None:
        """Returns the record at `path` if an attempt of this launch wrote it, or else None.

        A name alone may belong to an older launch, so a finished run is never resumed by name.
        """
        record = LaunchRecord.load(path)
        if record is None:
            return None
        by_agent = not self.agents.isdisjoint(record.agents)
        by_name = record.ended != "finished" and not self.earlier_jobs.isdisjoint(record.jobs)
        return record if by_agent or by_name else None


def _restarting_agent_id() -> str:
    """Returns host, process id and start time of the process that starts and restarts this rank.

    torchelastic gives every rank its own session, which includes any process between the two (a shell).
    """
    leader = os.getsid(0)
    agent = os.getppid() if leader == os.getpid() else _process_parent_and_start(leader)[0]
    return f"{socket.gethostname()}:{agent}:{_process_parent_and_start(agent)[1]}"


def _process_parent_and_start(process: int) -> tuple[int, int]:
    """Returns (parent's id, start in clock ticks since boot), or (0, 0) without /proc. man proc_pid_stat."""
    fields = read_stat_fields_after_comm(process)
    return (int(fields[1]), int(fields[19])) if fields else (0, 0)

"""The identity of a launch, and the record that it leaves in the run's directory."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel
from fullshard.system.files import write_whole
from fullshard.system.process import stat_fields

# Names that torchrun gives to a launch without a name.
_NAMELESS = ("", "none")


class LaunchRecord(FrozenModel):
    """The record of the last attempt to write a run's directory. See `LaunchId` for the names.

    ended: None while it runs, and forever if it died
    """

    agents: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    world_size: int = 1
    ended: Literal["finished", "interrupted"] | None = None

    def save(self, path: Path) -> None:
        """Writes the record atomically: without it, the directory is not recognised as a run's."""
        write_whole(path, self.model_dump_json() + "\n")

    def describe(self, world_size: int, *, step: int, steps: int) -> str:
        """Returns the message of an attempt over `world_size` ranks that resumes after `step`."""
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if world_size != self.world_size:
            ranks += f" ({self.world_size} before)"
        if step == 0:
            return f"restarted on {ranks}: nothing was saved, so it begins anew at step 1 of {steps}"
        return f"restarted on {ranks}: resumes after step {step} of {steps}"

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Reads the record; None if there is none, or another program's: others write launch.json too."""
        try:
            record = cls.read_json(path, what="the record of a launch")
        except SpecError:
            return None
        return record if record.model_fields_set >= {"jobs", "world_size"} else None


@dataclass(frozen=True)
class LaunchId:
    """The identity of one command and all its attempts.

    agents: the processes that restart ranks, one per node: torchrun's agents, or our launcher. Two attempts
        of one launch share at least one agent, whichever nodes have left or joined.
    jobs: names that a person or a scheduler gave the launch; a requeued launch has the same names
    earlier_jobs: names of the earlier attempts
    """

    agents: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    earlier_jobs: frozenset[str] = frozenset()
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Returns this rank's knowledge of its launch."""
        jobs, earlier = set[str](), set[str]()
        name = environment.get("TORCHELASTIC_RUN_ID", "")
        if name not in _NAMELESS:
            jobs.add(f"torchrun:{name}")
            earlier.add(f"torchrun:{name}")
        job, times = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
        if job is not None:
            # Two commands of one job are two launches, unless the job was requeued in between.
            count = int(times) if times.isdecimal() else 0
            jobs.add(f"slurm:{job}:{count}")
            earlier |= {f"slurm:{job}:{before}" for before in range(count)}
        return cls(
            agents=frozenset({f"{_agent()}:{name}"} if name else ()),
            jobs=frozenset(jobs),
            earlier_jobs=frozenset(earlier),
        )

    @classmethod
    def merge(cls, launches: Sequence[Self]) -> Self:
        """Combines the knowledge of all ranks."""
        return cls(
            agents=frozenset().union(*(one.agents for one in launches)),
            jobs=launches[0].jobs,
            earlier_jobs=launches[0].earlier_jobs,
            world_size=len(launches),
        )

    def record(self) -> LaunchRecord:
        return LaunchRecord(
            agents=tuple(sorted(self.agents)), jobs=tuple(sorted(self.jobs)), world_size=self.world_size
        )

    def earlier_attempt(self, path: Path) -> LaunchRecord | None:
        """Returns the record at `path` if an attempt of this launch wrote it, or else None.

        A name alone may be that of an older launch, so a finished run is never resumed by name.
        """
        record = LaunchRecord.load(path)
        if record is None:
            return None
        by_agent = not self.agents.isdisjoint(record.agents)
        by_name = record.ended != "finished" and not self.earlier_jobs.isdisjoint(record.jobs)
        return record if by_agent or by_name else None


def _agent() -> str:
    """Returns host, process and start time of the process that starts this rank and would restart it.

    torchelastic gives every rank its own session. A process between the two (a shell) belongs to that
    session.
    """
    leader = os.getsid(0)
    agent = os.getppid() if leader == os.getpid() else _stat(leader)[0]
    return f"{socket.gethostname()}:{agent}:{_stat(agent)[1]}"


def _stat(process: int) -> tuple[int, int]:
    """Returns (parent, start in clock ticks since boot), or zeros if /proc is missing. man proc_pid_stat."""
    fields = stat_fields(process)
    return (int(fields[1]), int(fields[19])) if fields else (0, 0)

"""Which launch an attempt belongs to, and what that launch has left in the run's directory."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel
from fullshard.system.files import write_whole

# What torchrun calls a launch that nobody has named.
_NAMELESS = ("", "none")


class LaunchRecord(FrozenModel):
    """What the last attempt to write a run's directory says of itself. See `LaunchId` for the names.

    `ended`: None while it runs, and for good if it died.
    """

    agents: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    world_size: int = 1
    ended: Literal["finished", "interrupted"] | None = None

    def save(self, path: Path) -> None:
        """Whole or not at all: without it, the directory is not known to be a run's."""
        write_whole(path, self.model_dump_json() + "\n")

    def describe(self, world_size: int, *, step: int, steps: int) -> str:
        """What is said of an attempt over `world_size` ranks that goes on after `step`."""
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if world_size != self.world_size:
            ranks += f" ({self.world_size} before)"
        if step == 0:
            return f"restarted on {ranks}: nothing was saved, so it begins anew at step 1 of {steps}"
        return f"restarted on {ranks}: resumes after step {step} of {steps}"

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None where there is none, or what is there is none: other programs have a launch.json, too."""
        try:
            record = cls.read_json(path, what="the record of a launch")
        except SpecError:
            return None
        return record if record.model_fields_set >= {"jobs", "world_size"} else None


@dataclass(frozen=True)
class LaunchId:
    """One command and all its attempts, by names that an attempt is known by.

    `agents`: the processes that start ranks again, one a node: torchrun's agents, our launcher.
    Of two attempts of one launch some agent is the same, whichever nodes have left or come.
    `jobs`: the names that a person or a scheduler gave the launch, which a requeued one has again.
    `earlier_jobs`: the names that its earlier attempts had, if it is one of several.
    """

    agents: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    earlier_jobs: frozenset[str] = frozenset()
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """What this rank can tell of its launch."""
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
        """What all ranks together can tell."""
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
        """The record at `path`, if an attempt of this launch wrote it.

        A name alone may be that of yesterday's launch, so what has finished is not gone on with by name.
        """
        record = LaunchRecord.load(path)
        if record is None:
            return None
        by_agent = not self.agents.isdisjoint(record.agents)
        by_name = record.ended != "finished" and not self.earlier_jobs.isdisjoint(record.jobs)
        return record if by_agent or by_name else None


def _agent() -> str:
    """Host, process and start time of who starts this rank, and would start it again.

    torchelastic gives every rank a session of its own; what may stand between the two (a shell) is in it.
    """
    leader = os.getsid(0)
    agent = os.getppid() if leader == os.getpid() else _stat(leader)[0]
    return f"{socket.gethostname()}:{agent}:{_stat(agent)[1]}"


def _stat(process: int) -> tuple[int, int]:
    """(parent, start in clock ticks since boot); 0 where the system does not tell. man proc_pid_stat."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[19])

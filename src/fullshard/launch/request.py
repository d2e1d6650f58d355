"""The request of a launch: a job for all ranks and its arguments, in a file that the ranks read."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from pydantic import Field

from fullshard.errors import INTERRUPTED_EXIT_CODE, LaunchError
from fullshard.launch.gc import disable_gc
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel
from fullshard.system.dotted import import_callable

FILE_NAME = "request.json"


class LaunchRequest(FrozenModel):
    """A job for all ranks of a launch, with its arguments.

    command_started: start of the command, in seconds since the epoch
    job: `module:function`, which each rank calls as `job(run, resume=..., plan=..., command_started=...)`,
        with the further `arguments` of this job

    A job that was interrupted and has saved raises `SystemExit(INTERRUPTED_EXIT_CODE)`. Its output goes to
    standard error: standard output is for the result, which the command prints.
    """

    run: Run
    plan: Plan | None = None
    resume: bool = False
    command_started: float = Field(default_factory=time.time)
    job: str = "fullshard.jobs.train:run_job"
    arguments: Mapping[str, str | float] = {}

    def save(self, directory: Path) -> None:
        """Writes the request into `directory`. Raises OSError."""
        self.write_json(Path(directory, FILE_NAME))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads the request that `save` wrote. Raises SpecError."""
        return cls.read_json(Path(directory, FILE_NAME), what="the request of a launch")

    def call_job(self) -> None:
        """Calls the job with the request's arguments.

        Raises SpecError if the function does not exist; LaunchError if it calls `sys.exit` with any code
        except INTERRUPTED_EXIT_CODE, even 0: unfinished work must not look finished.
        """
        with disable_gc():
            job = self.import_job()
        try:
            started = self.command_started
            job(self.run, resume=self.resume, plan=self.plan, command_started=started, **self.arguments)
        except SystemExit as left:
            if left.code == INTERRUPTED_EXIT_CODE:
                raise
            raise LaunchError.for_early_exit(left) from left

    def import_job(self) -> Callable[..., object]:
        """Imports and returns the function that `job` names. Raises SpecError if it does not exist."""
        return import_callable(self.job, key="job")

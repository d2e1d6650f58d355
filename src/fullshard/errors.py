"""The exceptions of fullshard: one tree, with one exit code for each branch.

FullshardError          1   never raised itself
├── SpecError           2   a run.toml, a plan or an argument is invalid
├── MissingExtraError   2   an optional dependency that is needed is not installed
├── UnsupportedTorchError 2 this torch lacks something that fullshard uses
├── PlanError           3   the run is well-formed, but no layout of it exists on these ranks
├── ShardError          4   the module cannot be sharded as planned
│   └── TraceError                it runs only on tensors with values, so that it cannot be planned
├── DataError           5   data is unreadable, empty or too short
├── CheckpointError     6   a checkpoint is missing, broken, of another model, or cannot be written
│   └── DamagedCheckpointError    its files are not as they were saved; an older one may be whole
├── LaunchError         7   ranks could not be started, or died
├── TrainError          8   a run stopped itself (non-finite losses, a missing loss)
├── OffloadError        9   the drive cannot keep state: full, failing, in use by another process
│   ├── DamagedOffloadError       a file is not as it was written; the next start discards it
│   └── ForeignOffloadError       the files are of another run, or of other ranks or shapes
└── CheckFailedError    10  a check before the run has found that it cannot work, or computes wrongly

Exit code 75 (`EX_TEMPFAIL`: try again later) is not an error: the run was interrupted, and saved itself.
"""

import copyreg
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any, ClassVar

INTERRUPTED_EXIT_CODE = 75


class FullshardError(Exception):
    """Base of all errors of fullshard. `str(error)` shows each part that is present on a line of its own.

    what: the failure
    got: the offending value
    why: the reason
    fix: a change to try
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, what: str, *, got: object = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.got, self.why, self.fix = what, got, why, fix
        lines = [what]
        lines += [f"  got: {got}"] if got is not None else []
        lines += [f"  why: {why}"] if why else []
        lines += [f"  try: {fix}"] if fix else []
        super().__init__("\n".join(lines))

    @property
    def what_and_got(self) -> str:
        return self.what if self.got is None else f"{self.what} got: {self.got}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error without its `__init__`, whose parameters differ between classes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore


class SpecError(FullshardError):
    exit_code = 2


class MissingExtraError(FullshardError):
    """Raised if `package`, an optional dependency of the extra `extra`, is not installed."""

    exit_code = 2

    def __init__(self, extra: str, *, package: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}.",
            got=f"{package} is not installed",
            why=f"it is an optional dependency, in the extra {extra!r}",
            fix=f'pip install "fullshard[{extra}]"',
        )


class UnsupportedTorchError(FullshardError):
    """Raised at import if the installed torch lacks a private name on which fullshard relies."""

    exit_code = 2


class PlanError(FullshardError):
    exit_code = 3


class ShardError(FullshardError):
    exit_code = 4


class TraceError(ShardError):
    """Raised for a model that cannot be traced without values. It may train all the same, without a plan."""


class DataError(FullshardError):
    exit_code = 5


class CheckpointError(FullshardError):
    exit_code = 6


class DamagedCheckpointError(CheckpointError):
    """Raised for a checkpoint with files that are missing, truncated, unreadable or of another digest."""


class LaunchError(FullshardError):
    exit_code = 7

    @classmethod
    def for_early_exit(cls, left: SystemExit) -> "LaunchError":
        """Returns the error of a rank that called `sys.exit` before its work was done."""
        return cls(
            f"rank {os.environ.get('RANK', '0')} left early.",
            got=f"sys.exit({'' if left.code is None else repr(left.code)})",
            why="something called it before the job was done",
            fix="an exception where it cannot continue; FULLSHARD_TRACEBACK=1 shows who called it",
        )


class TrainError(FullshardError):
    exit_code = 8


class OffloadError(FullshardError):
    exit_code = 9


class DamagedOffloadError(OffloadError):
    """Raised for a file that is missing, truncated, unreadable, or lacks the bytes that were written to it.

    A restart may succeed after this error, unlike after other OffloadErrors: it discards the damaged file.
    """


class ForeignOffloadError(OffloadError):
    """Raised for files of another run, world size or layout, which are never read or silently replaced."""


class CheckFailedError(FullshardError):
    """Raised before a run if a quick check has failed. Its code is also that of `fullshard check`."""

    exit_code = 10


def user_code_location_text(error: BaseException) -> str:
    """Returns `file:line in function` of the innermost frame of the user's code, else of fullshard's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    ours = str(Path(__file__).parent)
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    near = [frame for frame in frames if frame.filename.startswith(ours)]
    near = [f for f in frames if not f.filename.startswith((ours, "<", *libraries))] or near or [*frames]
    return f"{near[-1].filename}:{near[-1].lineno} in {near[-1].name}"

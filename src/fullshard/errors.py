"""The exceptions of fullshard: one tree, and an exit code for each branch.

FullshardError          1   never raised itself
├── SpecError           2   a run.toml, a plan or an argument that says something impossible
├── MissingExtraError   2   an optional dependency that was asked for is not installed
├── PlanError           3   the run is well-formed, but no layout of it exists on these ranks
├── ShardError          4   the module cannot be sharded as planned
├── DataError           5   data that is unreadable, empty or too short
├── CheckpointError     6   a checkpoint that is absent, broken, of another model, or cannot be written
│   └── DamagedCheckpointError    one whose files are not what was saved; an older one may be whole
├── LaunchError         7   ranks that could not be started, or died
├── TrainError          8   a run that stopped itself (non-finite losses, a missing loss)
└── OffloadError        9   state on a drive that cannot be kept there: full, failing, held by another process
    ├── DamagedOffloadError       a file of it is not what was written; the next start does without it
    └── ForeignOffloadError       what lies there is of another run, or of other ranks or shapes

Exit code 75 (`EX_TEMPFAIL`: try again later) is no error: the run was interrupted, and saved itself.
"""

from typing import ClassVar

INTERRUPTED_EXIT_CODE = 75


class FullshardError(Exception):
    """Says what went wrong, what was got, why it cannot be, and what to try.

    `str(error)` is the whole message, one labelled line each; a line that has nothing to say is left out.
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


class SpecError(FullshardError):
    exit_code = 2


class MissingExtraError(FullshardError):
    """`extra` is the name in `pip install "fullshard[extra]"`; `package` is what could not be imported."""

    exit_code = 2

    def __init__(self, extra: str, *, package: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}.",
            got=f"{package} is not installed",
            why=f"it is an optional dependency, in the extra {extra!r}",
            fix=f'pip install "fullshard[{extra}]"',
        )


class PlanError(FullshardError):
    exit_code = 3


class ShardError(FullshardError):
    exit_code = 4


class DataError(FullshardError):
    exit_code = 5


class CheckpointError(FullshardError):
    exit_code = 6


class DamagedCheckpointError(CheckpointError):
    """Files are missing, cut off, unreadable, or hold other bytes than their digests say."""


class LaunchError(FullshardError):
    exit_code = 7


class TrainError(FullshardError):
    exit_code = 8


class OffloadError(FullshardError):
    exit_code = 9


class DamagedOffloadError(OffloadError):
    """A file is missing, cut off, cannot be read, or holds other bytes than were written.

    The one OffloadError after which another attempt helps: a start drops what is damaged.
    """


class ForeignOffloadError(OffloadError):
    """Files of another run, another world size or another layout: never read, and never silently replaced."""

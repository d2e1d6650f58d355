"""Request and answer of a dry run's process, exchanged as JSON through pipes."""

from typing import Self

from fullshard.dryrun.program import Program
from fullshard.dryrun.result import DryRun
from fullshard.errors import FullshardError, PlanError, ShardError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.value import FrozenModel

_KINDS = {kind.__name__: kind for kind in (PlanError, ShardError, SpecError, TrainError)}


class ChildRequest(FrozenModel):
    """Plan and program to run, and the rank to run it as."""

    plan: Plan
    program: Program
    rank: int


class ChildFailure(FrozenModel):
    """Serialised FullshardError. `kind`: name of its class."""

    kind: str
    what: str
    got: str | None
    why: str | None
    fix: str | None

    @classmethod
    def of(cls, error: FullshardError) -> Self:
        got = None if error.got is None else str(error.got)
        return cls(kind=type(error).__name__, what=error.what, got=got, why=error.why, fix=error.fix)

    def error(self) -> FullshardError:
        """Rebuilds the error; returns a ShardError if its class is not one of `_KINDS`."""
        return _KINDS.get(self.kind, ShardError)(self.what, got=self.got, why=self.why, fix=self.fix)


class ChildAnswer(FrozenModel):
    """Either a result or a failure."""

    result: DryRun | None = None
    failure: ChildFailure | None = None

"""The interface between a run and an experiment tracker. See `docs/trackers.md`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class TrackerStart:
    """The run that a tracker is started for.

    name: name of the run: the last part of `run.dir`
    run_directory: `run.dir`. A tracker may keep files in its subdirectory `trackers`.
    settings: all settings of the run, by `section.key`
    after_step: the step after which the run resumes; 0 for a new run
    run_id: the tracker's `run_id` in the earlier attempt of this run, which it continues; None for a new run
    """

    name: str
    run_directory: Path
    settings: Mapping[str, Any]
    after_step: int
    run_id: str | None


class Tracker(Protocol):
    """A destination for the figures of a run's steps, made by calling an entry point with a TrackerStart.

    Created on rank 0 only. `log` and `close` are called from one thread.
    """

    @property
    def run_id(self) -> str | None:
        """Identifier with which another process continues this record. It is saved in `trackers.json`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step. Steps are repeated after a rollback, and values may be NaN."""

    def close(self, *, exit_code: int) -> None:
        """Sends remaining data, and how the run ended: finished if `exit_code` is 0."""

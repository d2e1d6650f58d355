"""Events of a run: a line of JSON each in `<run.dir>/events.jsonl`, which several processes append to.

    {"at":"2026-11-24T10:14:17.123Z","event":"save","attempt":1,"step":40,"path":"runs/x/checkpoints/…"}

Rank 0 writes what happens to the training, and the launcher what happens to the ranks. The file is never
rewound: an event that was undone by a rollback or a resume stays. Each line is one write in append mode.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import AwareDatetime, ConfigDict, ValidationError

from fullshard.spec.value import FrozenModel, NonNegativeInt, PositiveInt
from fullshard.system.files import open_regular_file
from fullshard.system.small_files import VALUE_BYTES, read_last_lines

_LONGEST_LINE_BYTES = 1 << 20
_SHORTEST_LINE_BYTES = 32  # with `at` and `event`


class RunEvent(FrozenModel):
    """An event of a run. All other keys of its line are its `details`.

    at: time of the event, UTC
    event: kind of the event. Those that fullshard writes, with the keys of their lines:

        start        rank 0 begins an attempt: `ranks`, `device`, `steps`, `torch`, `process`, `launch`
        plan         the attempt's plan, as in plan.json: `plan`
        resume       the attempt continues after `step`: `ranks`
        save         a checkpoint is complete: `path`, `seconds`, `stalled_seconds`
        save_failed  a checkpoint could not be written: `error`
        skip         nothing was updated, since loss or norm was not finite: `loss`, `grad_norm`
        spike        nothing was updated, since loss or norm stood out: `loss`, `grad_norm`
        straggler    a rank holds the others up: `rank`, `cause`, `seconds` per step, `share` of a step,
                     `from_step` (see `fullshard.observe.stragglers`)
        out_of_memory  an allocation of a rank failed: `rank`, `phase`, `held_bytes`, `requested_bytes`,
                     and `path` of its report
        straggler_over  it does so no longer: `rank`, `cause`
        rollback     back to step `to_step`, because of `step`: `loss`, `grad_norm`
        fault        a rank failed: `rank`, `error`, `message`, `exit_code`. `step` is the last recorded one
        restart      the ranks are started again: `count`, `allowed`
        signal       the launcher received a signal: `signal`
        stop         the run ended before its last step, because it was asked to: `saved`
        end          the run is finished, and its measurement is written: `loss`, `validation_loss`

    attempt: number of the attempt, from 1: of the `start` events of the directory up to this one
    step: number of the step, if it is known
    """

    model_config = ConfigDict(extra="allow")

    at: AwareDatetime
    event: str
    attempt: PositiveInt = 1
    step: NonNegativeInt | None = None

    @property
    def details(self) -> Mapping[str, Any]:
        """The other keys of the line, by name."""
        return self.model_extra or {}

    @classmethod
    def now(
        cls, event: str, *, attempt: int, step: int | None = None, details: Mapping[str, object] | None = None
    ) -> Self:
        at = datetime.now(UTC)
        own = {"at": at.replace(microsecond=at.microsecond // 1000 * 1000), "event": event}
        return cls.model_validate({**(details or {}), **own, "attempt": attempt, "step": step})

    def append_to(self, path: Path) -> None:
        """Appends the event's line to the file `path`, which is created if it is missing. Raises OSError."""
        own = None if self.step is not None else {"step"}
        line = self.model_dump_json(exclude=own).encode() + b"\n"
        descriptor = open_regular_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a write was cut off; its line is lost, and this one must not be
            while line:  # what a full disk did not take is written again, for the reason
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


def read_events(path: Path, *, kind: str = "") -> list[RunEvent]:
    """Reads the events of a file, or those of one kind, in the order of its lines; none without the file.

    Leaves out lines that are no events, such as the last line of a process that was killed while it wrote,
    and all except the last 32 MiB, which are some 100,000 events. Raises OSError.
    """
    events: list[RunEvent] = []
    for line in read_last_lines(path, most_bytes=VALUE_BYTES, longest=_LONGEST_LINE_BYTES):
        # A run has thousands of lines of other kinds, which are not parsed.
        if len(line) >= _SHORTEST_LINE_BYTES and line.endswith(b"\n") and f'"{kind}'.encode() in line:
            with suppress(ValidationError):
                events.append(RunEvent.model_validate_json(line))
    return [event for event in events if kind in ("", event.event)]

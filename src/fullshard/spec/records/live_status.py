"""The file live.json: the state of a run while it trains, which rank 0 replaces every few seconds."""

from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, ConfigDict

from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel, NonNegativeFloat, NonNegativeInt, PositiveInt


class RankStatus(FrozenModel):
    """The state of one rank.

    host, process: name of its host, and its process id there
    step: number of finished steps
    phase: a RunPhase, such as `forward` or `saving`
    seconds_in_phase: time since it entered the phase, by heartbeats that are at most a few seconds old
    memory: bytes and other figures of its memory, every 20 steps. See `fullshard.observe.live_memory`.
    """

    rank: NonNegativeInt
    host: str = ""
    process: NonNegativeInt = 0
    step: NonNegativeInt = 0
    phase: str = ""
    seconds_in_phase: NonNegativeFloat = 0.0
    memory: dict[str, float] = {}


class HeldUp(FrozenModel):
    """A rank that holds the others up. See `fullshard.observe.stragglers`."""

    rank: NonNegativeInt
    cause: str
    seconds: NonNegativeFloat = 0.0


class LiveStatus(FrozenModel):
    """The state of a run.

    at: when the file was written, UTC
    interval_seconds: time between two writes
    running: False in the last file of an attempt
    process: host and process id of rank 0
    attempt: number of the attempt, as in events.jsonl
    step, steps: the last recorded step, and the run's number of steps
    figures: values of the last step, as in its line of metrics.jsonl; None if not finite
    tokens_per_second: of all ranks, over the recent steps
    seconds_left: estimated time to the last step
    tokens: computed tokens since the attempt began
    saved_step, saved_at: the newest complete checkpoint of the attempt
    stragglers: ranks that hold the others up
    phases: number of ranks in each phase
    ranks: all ranks; of more than MOST_RANKS, those that are behind or longest in their phase
    """

    model_config = ConfigDict(extra="ignore")  # a newer version may add fields

    at: AwareDatetime
    interval_seconds: NonNegativeFloat
    running: bool = True
    process: str
    attempt: PositiveInt = 1
    world_size: PositiveInt = 1
    step: NonNegativeInt = 0
    steps: NonNegativeInt
    figures: dict[str, float | None] = {}
    tokens_per_second: NonNegativeFloat | None = None
    seconds_left: NonNegativeFloat | None = None
    tokens: NonNegativeInt = 0
    saved_step: NonNegativeInt | None = None
    saved_at: AwareDatetime | None = None
    stragglers: tuple[HeldUp, ...] = ()
    phases: dict[str, int] = {}
    ranks: tuple[RankStatus, ...] = ()

    @classmethod
    def load_if_readable(cls, path: Path) -> Self | None:
        """Reads the file; returns None if it is absent, or if this version cannot read it."""
        try:
            return cls.read_json(path, what="the state of a run")
        except SpecError:
            return None


MOST_RANKS = 64
"""Most ranks that the file lists."""

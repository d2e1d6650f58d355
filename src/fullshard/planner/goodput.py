"""Goodput: the fraction of the time that advances a run whose ranks fail, and the best checkpoint interval.

All times follow J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006), for failures that come independently at a constant rate.
"""

import math

from fullshard.errors import SpecError
from fullshard.planner.candidate_costs import require_prediction
from fullshard.spec.hardware import Hardware
from fullshard.spec.plan import Plan
from fullshard.spec.value import FrozenModel, NonNegativeFloat, PositiveFloat

# Seconds from a failure to the next step: to notice it, start all ranks and load. Assumed, not measured.
RESTART_SECONDS = 300.0


class Goodput(FrozenModel):
    """The part of the time that advances a run, at its best checkpoint interval.

    failure_seconds: mean time between failures of any of the ranks
    stall_seconds: seconds that a checkpoint keeps the step waiting
    write_seconds: seconds until a checkpoint is on the drive
    interval_seconds: best time from one checkpoint to the next
    part: fraction of the time that advances the run
    """

    failure_seconds: PositiveFloat
    stall_seconds: NonNegativeFloat
    write_seconds: NonNegativeFloat
    interval_seconds: PositiveFloat
    part: NonNegativeFloat


def predict_goodput(plan: Plan, hardware: Hardware, *, rank_failure_seconds: float) -> Goodput:
    """Returns the goodput of a plan with checkpoints on each rank's drive.

    rank_failure_seconds: mean time between failures of one rank

    A checkpoint is written at `disk_bytes_per_second`. In the background (`checkpoint.mode = "async"`) the
    step waits only for its copy to host memory, and the next one begins after it is written. Raises SpecError
    if a rate is not known.
    """
    size, drive = require_prediction(plan).memory.staged_checkpoint_bytes, hardware.disk_bytes_per_second
    if drive is None:
        raise SpecError(
            "how long a checkpoint takes is not known.",
            why=f"nobody has measured the drive of {hardware.name}",
            fix="--drive-rate 3.5G, or fullshard calibrate --drive DIRECTORY",
        )
    write = stall = size / drive
    copies = hardware.host_bytes_per_second
    if plan.run.checkpoint.mode == "async" and copies is not None:
        stall = size / copies
    failures = rank_failure_seconds / plan.world_size
    interval = max(best_interval_seconds(stall, failures), write)
    part = useful_part(interval, stall_seconds=stall, failure_seconds=failures)
    return Goodput(
        failure_seconds=failures,
        stall_seconds=stall,
        write_seconds=write,
        interval_seconds=interval,
        part=part,
    )


def best_interval_seconds(stall_seconds: float, failure_seconds: float) -> float:
    """Returns Daly's interval between checkpoints: sqrt(2 δ M) in the first order (Young), M from δ = 2 M on.

    stall_seconds: δ, seconds of a checkpoint; failure_seconds: M, the mean time between failures
    """
    ratio = stall_seconds / (2 * failure_seconds)
    if ratio >= 1:
        return failure_seconds
    first = math.sqrt(2 * stall_seconds * failure_seconds)
    return max(first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds, stall_seconds, 1e-3)


def useful_part(interval_seconds: float, *, stall_seconds: float, failure_seconds: float) -> float:
    """Returns the fraction of the time that advances the run: τ / (M exp(R / M) (exp((τ + δ) / M) - 1))."""
    mean, cycle = failure_seconds, interval_seconds + stall_seconds
    if max(RESTART_SECONDS, cycle) / mean > 500:
        return 0.0
    return interval_seconds / (mean * math.exp(RESTART_SECONDS / mean) * math.expm1(cycle / mean))

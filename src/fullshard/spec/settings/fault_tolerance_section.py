"""[checkpoint] and [fault_tolerance]: settings of checkpoints, and of reactions to faults."""

from typing import Literal, Self

from pydantic import model_validator

from fullshard.spec.value import Count, FrozenModel, PathText, Seconds

SLOW_PHASE_FACTOR = 3.0
"""Factor on the watchdog's time for phases without a usual length."""


class CheckpointSection(FrozenModel):
    """Settings of checkpoints: location, interval, format and verification.

    `dir`: a directory, or the URL of an object store (s3://bucket/run); unset, in `run.dir`
    `every`: steps between saves; 0 saves only at the end and when interrupted
    `keep`: number of newest checkpoints to keep; 0 keeps all
    `keep_every`: also keeps each checkpoint whose step is a multiple of this; 0 keeps none
    `mode`: `async` writes in the background, from a copy in host memory
    `storage`: `per_node` if nodes do not share disks; each node then keeps the files that its ranks write
    """

    dir: PathText | None = None
    every: Count = 0
    keep: Count = 2
    keep_every: Count = 0
    mode: Literal["sync", "async"] = "sync"
    storage: Literal["shared", "per_node"] = "shared"

    @model_validator(mode="after")
    def _check_dir(self) -> Self:
        if self.storage == "per_node" and self.dir is not None and "://" in self.dir:
            raise ValueError(f'storage = "per_node" needs dir to be a directory of each node, not {self.dir}')
        return self


class FaultToleranceSection(FrozenModel):
    """Settings of reactions to ranks that hang or diverge, and to loss spikes. See docs/survival.md.

    `watchdog_timeout_seconds`: time in one phase (data, forward, …) after which a rank counts as hung; three
        times as long until the first step is done, and while saving and validating; 0 disables it
    `fingerprint`: values that ranks compare in every step; `step` leaves out the number of collectives
        issued, for losses that send between some ranks on the CPU
    `on_spike`: reaction to a step whose loss or gradient norm exceeds the mean of the last 128 steps by more
        than 6 standard deviations. `skip` skips the step. `rollback` returns to the newest checkpoint and
        skips the batches since then; the run ends at the fourth.
    `check_replicas_every`: steps between bitwise comparisons of replicas; 0 disables them
    """

    watchdog_timeout_seconds: Seconds = 300.0
    fingerprint: Literal["all", "step", "none"] = "all"
    on_spike: Literal["none", "skip", "rollback"] = "none"
    check_replicas_every: Count = 0

    @property
    def process_group_timeout_seconds(self) -> float:
        """Timeout of collectives, s; longer than the watchdog's, whose report has more detail."""
        return max(600.0, 1.2 * self.watchdog_timeout_seconds * SLOW_PHASE_FACTOR)

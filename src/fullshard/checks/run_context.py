"""RunContext: the settings, the plan and the machine of a run that is about to start."""

from dataclasses import dataclass
from pathlib import Path

from fullshard.checks.machine_access import MachineAccess
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


@dataclass(frozen=True)
class RunContext:
    """Parts that the checks without torch and without the model read.

    plan: the plan of the run, with its prediction if the planner made one
    machine: access to this machine
    """

    plan: Plan
    machine: MachineAccess = MachineAccess()

    @property
    def run(self) -> Run:
        return self.plan.run

    @property
    def is_on_gpus(self) -> bool:
        return self.plan.device == "cuda"

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this machine: torchrun's number if it started this process, else all."""
        given = self.machine.environment.get("LOCAL_WORLD_SIZE", "")
        return int(given) if given.isdecimal() and int(given) else self.plan.world_size

    @property
    def has_other_hosts(self) -> bool:
        return self.ranks_on_host < self.plan.world_size

    @property
    def checkpoint_directory(self) -> Path | None:
        """The directory of the checkpoints; None on an object store."""
        own = self.run.checkpoint.dir
        if own is not None and "://" in own:
            return None
        return Path(own) if own is not None else Path(self.run.run.dir, "checkpoints")

    @property
    def checkpoint_bytes(self) -> int | None:
        """Predicted bytes of one checkpoint: parameters and optimizer state; None without a prediction."""
        prediction = self.plan.prediction
        if prediction is None:
            return None
        per_rank, offload = prediction.memory.staged_checkpoint_bytes, prediction.offload
        if offload is not None:
            per_rank += max(offload.host_bytes, offload.disk_bytes)
        return per_rank * self.plan.world_size // self.plan.replicate_degree

"""Program and result of a dry run."""

from fullshard.spec.measurement import MemoryParts
from fullshard.spec.value import FrozenModel


class Program(FrozenModel):
    """Functions of a dry run, named as `module:function`. The defaults train the run's model on tokens.

    model: model(plan) -> nn.Module; called with the meta device as the default device
    loss: loss(model, microbatch) -> a scalar, or (sum, count); if unset, the loss that the run trains with
    optimizer: optimizer(model, plan) -> torch.optim.Optimizer
    batch: batch(plan) -> one microbatch: any nest of tensors
    """

    model: str = "fullshard.dryrun.step:build_run_model"
    loss: str | None = None
    optimizer: str = "fullshard.training.optimizer:build_optimizer"
    batch: str = "fullshard.dryrun.step:token_batch"


class DryRunMemory(MemoryParts):
    """Bytes of live tensors on one rank at the peak of a step, split by owner; `total` is their sum.

    The step is the second one, because the first creates the optimizer state.

    moment: the phase of the peak
    optimizer_step_bytes: peak during the optimizer step
    allocated_bytes, reserved_bytes: the most bytes that CUDA's caching allocator would report for these
        tensors (`fullshard.dryrun.allocator`); 0 for a CPU plan
    """

    moment: str
    optimizer_step_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.total

"""Sections of a Run about its steps: [train], [optimizer] and [schedule]."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from fullshard.errors import SpecError
from fullshard.spec.value import (
    NUMBER,
    Count,
    Fraction,
    FrozenModel,
    NonNegativeScalar,
    Options,
    PositiveCount,
    PositiveScalar,
)


class TrainSection(FrozenModel):
    """Settings of batch sizes, duration, loss and validation. Gradient accumulation follows from them.

    `epochs`: duration in passes over the training sequences, instead of `steps`; a fraction is allowed. The
        number of steps, ceil(epochs * sequences / global_batch), is known once the data is tokenized.
    `global_batch`, `microbatch`: sequences per step over all ranks, and per rank in one forward pass
    `gradient_sync`: when ranks reduce gradients. `every_microbatch` keeps gradients sharded (least memory).
        `last_microbatch` keeps whole gradients on every rank and reduces once per step (least communication).
        `auto` is `last_microbatch` for zero1 and no_shard, else `every_microbatch`.
    `loss`: `package.module:function`, called with the model and a microbatch (see `fullshard.training.loss`);
        unset, next-token loss for models that predict it, else the model's own loss
    `loss_chunk`: rows of logits that the next-token loss computes at once, at most a sequence, so that the
        logits never exist as a whole. 0 computes all rows at once. `auto` is 2,048 if the logits of a
        sequence take more than 64 MiB in fp32, else 0.
    `wait_each_step`: on GPUs, reads the loss and norm of each step before the update, and raises and stops in
        that step. Otherwise the GPU decides, and the host reads the figures one step later, so that the GPU
        is not idle between steps. The parameters are the same, bit for bit. See docs/design/step.md.
    """

    steps: PositiveCount | None = 200
    epochs: PositiveScalar | None = None
    global_batch: PositiveCount = 24
    microbatch: PositiveCount | None = None
    gradient_sync: Literal["auto", "every_microbatch", "last_microbatch"] = "auto"
    loss: str | None = None
    loss_chunk: Literal["auto"] | Count = "auto"
    validate_every: Count = 100
    validate_sequences: PositiveCount = 240
    max_skipped_steps: PositiveCount = 10
    untimed_warmup_steps: Count = 5
    wait_each_step: bool = False

    @model_validator(mode="before")
    @classmethod
    def _choose_steps_or_epochs(cls, data: Any) -> Any:
        """Leaves `steps` unset if there are `epochs`. Raises ValueError if both are set."""
        if not isinstance(data, Mapping):
            return data
        fields = dict(cast(Mapping[str, Any], data))
        steps, epochs = fields.get("steps"), fields.get("epochs")
        if steps is not None and epochs is not None:
            raise ValueError(f"steps = {steps} and epochs = {epochs} exclude each other: set one of them")
        if steps is None:
            fields.pop("steps", None)  # without epochs, the default counts
        return fields if epochs is None else fields | {"steps": None}

    @property
    def step_count(self) -> int:
        """Number of steps. Raises SpecError for `epochs` that `resolve_epochs` has not turned into steps."""
        if self.steps is None:
            raise SpecError(
                "the number of steps is not known yet.",
                got=f"train.epochs = {self.epochs:g}",
                why="it follows from the number of training sequences",
                fix="run = fs.resolve_epochs(run, data), with data = fs.build_data(run); or train.steps",
            )
        return self.steps


class OptimizerSection(FrozenModel):
    """Settings of the optimizer and its hyperparameters.

    `name`: `adamw`, `sgd`, `adamw8bit` (8-bit moments: the extra `lowbit`), or the dotted name of any
        `torch.optim.Optimizer` (which takes `options`)
    `clip_norm`: the largest global gradient norm; 0 disables clipping
    `in_backward`: updates each unit as soon as its gradient is reduced and then frees that gradient, so that
        the gradients of all units never exist at once. It needs steps of one microbatch, and excludes
        settings that depend on the whole gradient: clipping, a loss scale, `fault_tolerance.on_spike`.
    """

    name: str = "adamw"
    learning_rate: PositiveScalar = 3e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveScalar = 1e-8
    weight_decay: NonNegativeScalar = 0.1
    momentum: Fraction = 0.0
    clip_norm: NonNegativeScalar = 1.0
    in_backward: bool = False
    options: Options = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _check_in_backward_clipping(self) -> Self:
        if self.in_backward and self.clip_norm:
            raise ValueError(
                f"in_backward = true needs clip_norm = 0, not {self.clip_norm}: "
                "clipping needs the norm of all gradients before the first update"
            )
        return self


class ScheduleSection(FrozenModel):
    """Settings of the learning rate: linear warmup, then decay of `kind` to `min_lr_ratio` of the peak.

    `kind`: `wsd` stays at the peak until the last `decay_fraction` of the steps, then decays linearly
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: Count = 20
    min_lr_ratio: Annotated[float, NUMBER, Field(ge=0, le=1)] = 0.1
    decay_fraction: Annotated[float, NUMBER, Field(gt=0, le=1)] = 0.2

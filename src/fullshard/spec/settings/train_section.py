"""[train], [optimizer], [ema], [schedule], [recompute], [plan], [adapter] and those of survival."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from fullshard.errors import SpecError
from fullshard.quantities import count_text
from fullshard.spec import value
from fullshard.spec.dealing import newton_schulz_flops
from fullshard.spec.shard_layout import Shape


class TrainSection(value.FrozenModel):
    """Settings of batch sizes, duration, loss and validation. Gradient accumulation follows from them.

    `epochs`: duration in passes over the training sequences, instead of `steps`; a fraction is allowed. The
        number of steps, ceil(epochs * sequences / global_batch), is known once the data is tokenized.
    `global_batch`: sequences per step over all ranks
    `microbatch`: sequences per rank in one forward pass
    `gradient_sync`: when ranks reduce gradients. `every_microbatch` keeps gradients sharded (least memory).
        `last_microbatch` keeps whole gradients on every rank and reduces once per step (least communication).
        `auto`: the planner's choice; unplanned, `last_microbatch` for zero1 and no_shard, else the other.
    `validate_every`: steps between validations, or a fraction of the steps; 0: only after the last one
    `validate_sequences`: most held-out sequences that a validation reads, evenly spread; 0 is all, which is
        the default for validation data that is given
    `loss`: `package.module:function`, called with the model and a microbatch (see `fullshard.models.loss`);
        unset, next-token loss for models that predict it, else the model's own loss
    `loss_chunk`: rows of logits that the next-token loss computes at once, at most a sequence, so that the
        logits never exist as a whole. 0 computes all rows at once. `auto` is 2,048 if the logits of a
        sequence take more than 64 MiB in fp32, else 0.
    """

    steps: value.PositiveCount | None = 30
    epochs: value.PositiveScalar | None = None
    global_batch: value.PositiveCount = 24
    microbatch: value.PositiveCount | None = None
    gradient_sync: Literal["auto", "every_microbatch", "last_microbatch"] = "auto"
    loss: str | None = None
    loss_chunk: Literal["auto"] | value.Count = "auto"
    validate_every: value.Steps = 100
    validate_sequences: value.Count = 240
    max_skipped_steps: value.PositiveCount = 10

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


class OptimizerGroup(value.FrozenModel):
    """Settings of the trained parameters whose names match, in place of those of [optimizer].

    The first group that matches a parameter has it. Its rate follows the schedule as all others do.

    `match`: patterns of names in checkpoints; `*` matches dots too: ["*norm*", "*.bias"]
    `lr_factor`: factor on `optimizer.learning_rate`
    `weight_decay`: of each parameter in the group; unset, `optimizer.weight_decay`, which matrices have, and
        norms and biases have not
    `betas`: unset, `optimizer.betas`
    `kind`: with `muon` or `soap`, or `adamw`; unset, Muon or SOAP for matrices of blocks, AdamW for others
    """

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    lr_factor: value.NonNegativeScalar = 1.0
    weight_decay: value.NonNegativeScalar | None = None
    betas: tuple[value.Fraction, value.Fraction] | None = None
    kind: Literal["adamw", "muon", "soap"] | None = None

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.match)


class MuonSection(value.FrozenModel):
    """Settings of Muon, the optimizer of matrices in `optimizer.name = "muon"`.

    `momentum`: part of the momentum that a step keeps
    `nesterov`: whether the gradient counts once more beside the momentum
    `steps`: Newton–Schulz iterations
    `row_decay`: part that a step keeps of NorMuon's average of each row's mean square; 0 is plain Muon
    `scale`: `rms` multiplies the rate by 0.2 √max(m, n), so that a rate of AdamW suits; `original` by
        √max(1, m / n), for rates near 0.02
    `dtype`: of Newton–Schulz, and of what ranks send for it; `auto`: fp32 in a run in fp32, else bf16
    """

    momentum: value.Fraction = 0.95
    nesterov: bool = True
    steps: value.PositiveCount = 5
    row_decay: value.Fraction = 0.0
    scale: Literal["rms", "original"] = "rms"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"

    def dtype_beside(self, param: str) -> Literal["bf16", "fp32"]:
        """Returns the dtype of Newton–Schulz in a run whose parameters compute in `param`."""
        if self.dtype == "auto":
            return "fp32" if param == "fp32" else "bf16"
        return self.dtype

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Returns the shapes of state that owners need, by key: v of NorMuon."""
        return {"row_var": (*shape[:-1], 1)} if self.row_decay else {}

    def flops(self, shape: Shape) -> float:
        """Returns the FLOP of Newton–Schulz."""
        return newton_schulz_flops(shape, steps=self.steps)


class SoapSection(value.FrozenModel):
    """Settings of SOAP, the optimizer of matrices in `optimizer.name = "soap"`, beside `optimizer.betas`.

    `precondition_frequency`: steps between refreshes of the eigenbases
    `max_precondition_dim`: the most rows, or columns, that are rotated; more stay as they are
    """

    precondition_frequency: value.PositiveCount = 10
    max_precondition_dim: value.PositiveCount = 10_000

    def dtype_beside(self, param: str) -> Literal["bf16", "fp32"]:
        """Returns the dtype of rotations, in any run."""
        return "fp32"

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Returns the shapes of L, Q_L, R and Q_R of a parameter, by their keys in the optimizer's state.

        A dimension that is not rotated has none. Nor has a matrix with one row or column.
        """
        sides = {} if 1 in shape[-2:] else {"left": shape[-2], "right": shape[-1]}
        sides = {side: n for side, n in sides.items() if n <= self.max_precondition_dim}
        return {f"{side}_{of}": (*shape[:-2], n, n) for side, n in sides.items() for of in ("gram", "basis")}

    def flops(self, shape: Shape) -> float:
        """Returns the FLOP of a step: for m rotated rows 8 m² n, and 14/3 m³ for a refresh; columns alike."""
        bases, refresh = self.state_shapes(shape).values(), 14 / 3 / self.precondition_frequency
        return sum((8 * prod(shape) + refresh * prod(one)) * one[-1] for one in bases) / 2  # L, Q_L; R, Q_R


OPTIMIZER_NAMES = ("adamw", "sgd", "muon", "soap", "adamw8bit", "adafactor")


class OptimizerSection(value.FrozenModel):
    """Settings of the optimizer and its hyperparameters.

    `name`: `adamw`, `sgd`, `adafactor`, `muon` or `soap` (matrices of blocks; AdamW for all others),
        `adamw8bit` (8-bit moments: the extra `lowbit`), or the dotted name of any `torch.optim.Optimizer`
    `options`: other keyword arguments of the optimizer's class, such as { momentum = 0.9 } of `sgd`
    `clip_norm`: the largest global gradient norm; 0 disables clipping
    `muon`, `soap`: [optimizer.muon] and [optimizer.soap], settings of these
    `groups`: [[optimizer.groups]], parameters with a rate, weight decay, betas or kind of their own
    """

    name: str = "adamw"
    learning_rate: value.PositiveScalar = 3e-3
    betas: tuple[value.Fraction, value.Fraction] = (0.9, 0.95)
    eps: value.PositiveScalar = 1e-8
    weight_decay: value.NonNegativeScalar = 0.1
    clip_norm: value.NonNegativeScalar = 1.0
    options: value.Options = Field(default_factory=dict[str, Any])
    muon: MuonSection = Field(default_factory=MuonSection)
    soap: SoapSection = Field(default_factory=SoapSection)
    groups: tuple[OptimizerGroup, ...] = ()

    @property
    def matrix_kind(self) -> Literal["muon", "soap"] | None:
        """The optimizer of whole matrices, beside AdamW for all others; None for other optimizers."""
        name = self.name.lower()
        return name if name in ("muon", "soap") else None

    @property
    def matrix_section(self) -> MuonSection | SoapSection:
        """The settings of the optimizer of whole matrices, which `matrix_kind` names."""
        return self.soap if self.matrix_kind == "soap" else self.muon

    @property
    def is_adafactor(self) -> bool:
        return self.name.lower() == "adafactor"

    @model_validator(mode="after")
    def _check_settings_suit_name(self) -> Self:
        own, name = self.matrix_kind, self.name.lower()
        if "." not in name and name not in OPTIMIZER_NAMES:
            near = value.similar_names_text(name, OPTIMIZER_NAMES) or ", ".join(OPTIMIZER_NAMES)
            fix = f"{near}, or the dotted name of a torch.optim.Optimizer"
            raise SpecError("optimizer.name names no optimizer.", got=repr(self.name), fix=fix)
        if own and self.options:
            raise ValueError(f"options = {self.options}: the settings of {own} are in [optimizer.{own}]")
        for kind, is_set in (("muon", self.muon != MuonSection()), ("soap", self.soap != SoapSection())):
            if is_set and own != kind:
                raise ValueError(f'[optimizer.{kind}] needs name = "{kind}", not "{self.name}"')
        for group in self.groups:
            if group.kind not in (None, own) and not (own and group.kind == "adamw"):
                needed = '"muon" or "soap"' if group.kind == "adamw" else f'"{group.kind}"'
                raise ValueError(f'kind of [[optimizer.groups]] needs name = {needed}, not "{self.name}"')
        if name in ("adafactor", "sgd") and any(group.betas for group in self.groups):
            raise ValueError(f"a group of [[optimizer.groups]] has betas, which {self.name} has not")
        return self


class EmaSection(value.FrozenModel):
    """Settings of an exponential moving average of the trained parameters. See docs/ema.md.

        average = decay * average + (1 - decay) * parameter

    `decay`: weight of the average so far, such as 0.999; 0 keeps no average
    `every`: steps between updates of the average
    `start`: number of steps, or a fraction of the steps, until which the average is a copy of the parameters
    `validation`: validations compute with the average in place of the parameters
    """

    decay: value.Fraction = 0.0
    every: value.PositiveCount = 1
    start: value.Steps = 0
    validation: bool = False


class ScheduleSection(value.FrozenModel):
    """Settings of the learning rate: linear warmup, then decay of `kind` to `min_lr_ratio` of the peak.

    `warmup_steps`: number of steps, or a fraction of the steps
    `kind`: `constant` does not decay; `wsd` decays linearly over the last `decay_fraction` of the steps
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: value.Steps = 20
    min_lr_ratio: Annotated[float, value.NUMBER, Field(ge=0, le=1)] = 0.1
    decay_fraction: Annotated[float, value.NUMBER, Field(gt=0, le=1)] = 0.2


class RecomputeSection(value.FrozenModel):
    """Settings of activation checkpointing: which activations are recomputed or offloaded to host memory.

    `mode`: `full` recomputes every block; `selective` saves attention and every `save_matmuls`-th matmul of a
        block, and recomputes the rest; `offload` saves activations in host memory, except tensors under 1/32
        of a block's input, and those of the last block, because its backward comes first. `auto`: the
        planner's choice, never `offload`, because no GPU has been timed with it.
    `blocks`: with `full` or `selective`, the number of blocks that recompute, the first ones; unset, all
    `inputs`: with `full`, where the inputs of blocks wait for backward. On the `host`, long sequences take
        about one block's memory instead of all blocks'; the input of the last block that recomputes stays.
    """

    mode: Literal["auto", "none", "full", "selective", "offload"] = "auto"
    blocks: value.PositiveCount | None = None
    save_matmuls: value.PositiveCount = 1
    inputs: Literal["device", "host"] = "device"

    @model_validator(mode="after")
    def _check_blocks_and_inputs(self) -> Self:
        if self.blocks is not None and self.mode not in ("full", "selective"):
            raise ValueError(f'blocks = {self.blocks} needs mode = "full" or "selective", not "{self.mode}"')
        if self.inputs == "host" and self.mode != "full":
            raise ValueError(f'inputs = "host" needs mode = "full", not "{self.mode}"')
        return self

    @property
    def offloads(self) -> bool:
        """True if activations move to host memory: all that blocks save, or inputs of recomputed blocks."""
        return self.mode == "offload" or self.inputs == "host"

    @property
    def mode_text(self) -> str:
        """The mode, with `blocks` and `inputs` if they are set: `full`, or `full of 24 blocks`."""
        blocks = "" if self.blocks is None else f" of {count_text(self.blocks, 'block')}"
        return self.mode + blocks + (", inputs on the host" if self.inputs == "host" else "")

    def applies_to(self, position: int) -> bool:
        """Returns whether the mode applies to the block at `position`, from 0."""
        return self.blocks is None or position < self.blocks


class PlanSection(value.FrozenModel):
    """Settings of the planner's choice.

    `memory_margin`: fraction of a device's memory that a chosen plan leaves free, because a prediction may be
        too low; 0 uses all of it. A run that pins strategy, microbatch and recompute may use all in any case.
    """

    memory_margin: value.Fraction = 0.05


# LoraConfig options that need the whole base weights, which no rank ever has, or peft's own model around the
# layers, that import a module, or that have their own key.
_REFUSED = {
    "layer_replication": "it is a part of peft's get_peft_model, which also names the copied layers",
    "loftq_config": "it rewrites the base weights",
    "kasa_config": "it begins with singular vectors of the base weights",
    "alora_invocation_tokens": "its layers add nothing outside of peft's own model, which finds the tokens",
    "arrow_config": "its layers choose among several adapters, which a run does not have",
    "monteclora_config": "it adds a term to the loss, which only peft's own model computes",
    "use_bdlora": "its block-diagonal factors have initial values of their own",
    "velora_config": "its buffers have initial values of their own",
    "use_qalora": "its layers are of quantised weights, and other layers ignore it",
    **dict.fromkeys(
        ("corda_config", "eva_config", "lora_ga_config"), "it needs an initialisation by the base's values"
    ),
    "ensure_weight_tying": "its adapters of tied weights are one, in two shapes, and are not sharded as such",
    "runtime_config": "it moves adapters between devices",
    "inference_mode": "it freezes the adapters",
    "peft_type": "the adapters are LoRA",
    "trainable_token_indices": "it needs rows of the base weights; adapter.trained with the embedding",
    "megatron_config": "it imports a module, for layers of Megatron, which are not used here",
    "megatron_core": "it imports a module, for layers of Megatron, which are not used here",
    "r": "it is adapter.rank",
    "lora_alpha": "it is adapter.alpha",
    "lora_dropout": "it is adapter.dropout",
    "target_modules": "it is adapter.targets",
    "modules_to_save": "it is adapter.trained",
    "base_model_name_or_path": "it is model.hf",
    "fan_in_fan_out": "it follows from the modules",
}


class AdapterSection(value.FrozenModel):
    """Settings of LoRA (Hu et al., arXiv:2106.09685) through peft (extra `hf`).

    A linear module W of `targets` computes W x + alpha / rank · B A x. A and B, of `rank` rows and columns,
    are trained; W is frozen.

    `rank`: 0 adds no adapter, and all parameters are trained
    `targets`: suffixes of module names (`q_proj`), or `all-linear`: every linear module of a block. Peft's
        names of experts (`gate_proj`) adapt stacked ones.
    `trained`: suffixes of the names of modules that are also trained, in full (`lm_head`, `norm`)
    `base_dtype`: dtype of frozen parameters; `auto` is the dtype in the model's config, else fp32. Frozen
        parameters have no update whose precision matters, no gradient and no optimizer state. With `nf4`
        (QLoRA, arXiv:2305.14314) and `int8`, weights of linear modules and of experts in blocks are kept in 4
        and 8 bits per element, with scales of blocks of 64, and dequantised where they are multiplied; others
        are in bf16.
    `save`: contents of checkpoints; with `adapters`, a run reads the base from the source in [model] when it
        starts
    `options`: other values of peft's LoraConfig, such as `use_rslora`, `use_dora`, `target_parameters`
    """

    rank: value.Count = 0
    alpha: value.PositiveScalar = 16.0
    dropout: value.Fraction = 0.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    trained: tuple[str, ...] = ()
    base_dtype: Literal["auto", "fp32", "bf16", "fp16", "nf4", "int8"] = "auto"
    save: Literal["all", "adapters"] = "all"
    options: value.Options = Field(default_factory=dict[str, Any])

    @property
    def packed_format(self) -> Literal["nf4", "int8"] | None:
        """The format in which frozen linear weights are packed; None if they are not."""
        return self.base_dtype if self.rank > 0 and self.base_dtype in ("nf4", "int8") else None

    @property
    def saves_only_adapters(self) -> bool:
        """True if checkpoints contain the adapters without the base model."""
        return self.rank > 0 and self.save == "adapters"

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key, why in _REFUSED.items():
            if key in self.options:
                raise ValueError(f"options.{key} cannot be set here: {why}")
        if self.base_dtype in ("nf4", "int8") and not self.rank:
            raise ValueError(f"base_dtype = {self.base_dtype} packs the frozen base of adapters: set rank")
        kind = self.options.get("init_lora_weights", True)
        if kind not in (True, "gaussian"):
            raise ValueError(
                f"options.init_lora_weights = {kind!r} needs the base's values; true or 'gaussian'"
            )
        if self.targets == () and not self.options.get("target_parameters"):
            raise ValueError('targets = ["q_proj", "v_proj"], or "all-linear"')
        return self


SLOW_PHASE_FACTOR = 3.0
"""Factor on the watchdog's time for phases without a usual length."""


class CheckpointSection(value.FrozenModel):
    """Settings of checkpoints: location, interval, format and verification.

    `dir`: a directory, or the URL of an object store (s3://bucket/run); unset, in `run.dir`
    `every`: steps between saves, or a fraction of the steps; 0 saves only at the end and when interrupted
    `keep`: number of newest checkpoints to keep; 0 keeps all
    `keep_every`: also keeps each checkpoint whose step is a multiple of this; 0 keeps none
    `keep_best`: also keeps the checkpoint with the best result of an evaluation, the older of equal ones, and
        saves one after each evaluation that is better than all before. `validation`, or the `name` of
        [[evaluate]], is its loss; `highest name.metric` or `lowest name.metric` a metric of a `call`
    `mode`: `async` writes in the background, from a copy in host memory
    """

    dir: value.PathText | None = None
    every: value.Steps = 0
    keep: value.Count = 2
    keep_every: value.Count = 0
    keep_best: str | None = None
    mode: Literal["sync", "async"] = "sync"


class FaultToleranceSection(value.FrozenModel):
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

    watchdog_timeout_seconds: value.Seconds = 300.0
    fingerprint: Literal["all", "step", "none"] = "all"
    on_spike: Literal["none", "skip", "rollback"] = "none"
    check_replicas_every: value.Count = 0

    @property
    def process_group_timeout_seconds(self) -> float:
        """Timeout of collectives, s; longer than the watchdog's, whose report has more detail."""
        return max(600.0, 1.2 * self.watchdog_timeout_seconds * SLOW_PHASE_FACTOR)

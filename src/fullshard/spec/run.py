"""Run: what the user asks for. It is read from a `run.toml`, and every default stands on its field here."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fullshard.errors import SpecError
from fullshard.spec.adapter_section import AdapterSection
from fullshard.spec.data_section import DataSection
from fullshard.spec.model_section import DecoderConfig, ModelSection
from fullshard.spec.small_files import TomlError, parse_toml
from fullshard.spec.toml_file import read_toml
from fullshard.spec.value import (
    NUMBER,
    Count,
    Fraction,
    FrozenModel,
    NonNegativeInt,
    NonNegativeScalar,
    Options,
    PathText,
    PositiveCount,
    PositiveInt,
    PositiveScalar,
    Processes,
    Seconds,
)

PrecisionMode = Literal["fp32", "bf16", "bf16_reduce", "fp16", "bf16_pure"]
Tier = Literal["none", "optimizer:cpu", "optimizer:nvme", "params+optimizer:cpu", "params+optimizer:nvme"]


class Strategy(StrEnum):
    """What is sharded over ranks. See docs/design/strategies.md for what each keeps and sends."""

    NO_SHARD = "no_shard"
    ZERO1 = "zero1"
    SHARD_GRAD_OP = "shard_grad_op"
    FULL_SHARD = "full_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"


STRATEGY_ALIASES = {
    "ddp": Strategy.NO_SHARD,
    "zero0": Strategy.NO_SHARD,
    "zero2": Strategy.SHARD_GRAD_OP,
    "zero3": Strategy.FULL_SHARD,
    "fsdp": Strategy.FULL_SHARD,
    "hpz": Strategy.FULL_SHARD,
    "hsdp": Strategy.HYBRID_SHARD,
    "optimizer_state": Strategy.ZERO1,
}


def parse_strategy(name: object) -> object:
    """`"FULL_SHARD"`, `"ZeRO-3"`, `"_HYBRID_SHARD_ZERO2"` … -> Strategy; anything else raises ValueError."""
    if not isinstance(name, str) or isinstance(name, Strategy):
        return name
    key = name.lower().replace("-", "_").strip("_")
    key = "zero" + key.removeprefix("zero").strip("_") if key.startswith("zero") else key
    if key in STRATEGY_ALIASES:
        return STRATEGY_ALIASES[key]
    if key == "auto":
        return key
    if key in set(Strategy):
        return Strategy(key)
    raise ValueError(f"a strategy is one of {', '.join(Strategy)} (or {', '.join(STRATEGY_ALIASES)})")


class TrainSection(FrozenModel):
    """`global_batch` and `microbatch` count sequences; accumulation follows from both and the ranks.

    `accumulate_sync`: `each` reduces gradients after every microbatch (sharded gradients, least memory);
    `last` keeps whole gradients on every rank and reduces once a step (least communication).
    `auto` is `last` for zero1 and no_shard, else `each`.
    `loss`: `package.module:function`, called with the model and a microbatch (see `fullshard.training.loss`);
    unset, the next token's for models that predict it, else the model's own.
    """

    steps: PositiveCount = 200
    global_batch: PositiveCount = 24
    microbatch: PositiveCount | None = None
    accumulate_sync: Literal["auto", "each", "last"] = "auto"
    loss: str | None = None
    validate_every: Count = 100
    validate_sequences: PositiveCount = 240
    max_skipped_steps: PositiveCount = 10
    warmup_steps_untimed: Count = 5


class OptimizerSection(FrozenModel):
    """`name`: `adamw`, `sgd`, `adamw8bit` (moments in 8 bits: the extra `lowbit`), or the dotted name of any
    `torch.optim.Optimizer` (which takes `options`).

    `clip_norm` bounds the true global norm of the gradient; 0 leaves it as it is.
    `in_backward`: each unit is updated as soon as its gradient is reduced, and the gradient let go, so that
    never all gradients are there. For steps of one microbatch, without what the whole gradient decides:
    clipping, a loss scale, `survival.on_spike`.
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
    def _nothing_waits_for_the_norm(self) -> Self:
        if self.in_backward and self.clip_norm:
            raise ValueError(
                f"in_backward = true needs clip_norm = 0, not {self.clip_norm}: "
                "clipping needs the norm of all gradients before the first update"
            )
        return self


class ScheduleSection(FrozenModel):
    """The learning rate over steps: linear warmup, then `kind` down to `final_ratio` of the peak.

    `wsd` stays at the peak until the last `decay_fraction` of the steps, and falls linearly from there.
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: Count = 20
    final_ratio: Annotated[float, NUMBER, Field(ge=0, le=1)] = 0.1
    decay_fraction: Annotated[float, NUMBER, Field(gt=0, le=1)] = 0.2


class UnitOverride(FrozenModel):
    """What differs for the units whose name matches `match` (a shell pattern: `blocks.0`, `*.experts`).

    `strategy = "no_shard"` leaves the unit unsharded (replicated, its gradient all-reduced);
    `reshard_after_forward` and `precision` stand in for the plan's own (fp16 and bf16_pure, which need a loss
    scale or another optimizer, are for whole runs).
    """

    match: str
    strategy: Literal["no_shard"] | None = None
    reshard_after_forward: bool | int | None = None
    precision: Literal["fp32", "bf16", "bf16_reduce"] | None = None


class UnitSection(FrozenModel):
    """Which modules communicate as one unit.

    `block`: the repeated blocks, found by themselves (or that `names` match), embeddings and head apart.
    `size`: modules of at least `min_parameters`, bottom up. `names`: exactly the modules that `names` match.
    `separate_experts`: in a mixture of experts, each block's experts are a unit apart from its attention.
    """

    policy: Literal["block", "size", "names"] = "block"
    names: tuple[str, ...] = ()
    min_parameters: PositiveInt = 10_000_000
    separate_experts: bool = True
    overrides: tuple[UnitOverride, ...] = ()

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if self.policy == "names" and not self.names:
            raise ValueError('policy = "names" needs names = ["blocks.*"]')
        return self


class ShardingSection(FrozenModel):
    """`strategy` auto: the fastest that fits. `shard_degree`: over how many ranks a hybrid strategy shards;
    it replicates over the others.

    `reshard_to`: after forward, keep parameters sharded over this many ranks (ZeRO++ hpZ), not over all.

    `tensor_parallel`: over so many ranks next to each other each block's matmuls are split, and the sequence
    between them (Korthikanti et al., arXiv:2205.05198); the other settings are about what is left of the
    ranks. `fullshard plan` tells what it would take; `train` does not run it yet.
    """

    strategy: Annotated[Strategy | Literal["auto"], BeforeValidator(parse_strategy)] = "auto"
    shard_degree: PositiveCount | None = None
    reshard_to: PositiveCount | None = None
    tensor_parallel: PositiveCount = 1
    units: UnitSection = UnitSection()

    @model_validator(mode="before")
    @classmethod
    def _hpz_needs_a_degree(cls, data: Any) -> Any:
        named = str(data.get("strategy", "")).lower() if isinstance(data, Mapping) else ""
        if named == "hpz" and not data.get("reshard_to"):
            raise ValueError('strategy = "hpz" needs reshard_to = <ranks>')
        return data

    @model_validator(mode="after")
    def _degrees_fit(self) -> Self:
        if self.strategy == "auto":
            return self
        hybrid = self.strategy in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
        if self.shard_degree is not None and not hybrid:
            raise ValueError(f"shard_degree is for hybrid strategies, not for {self.strategy}")
        if self.reshard_to is not None and self.strategy not in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD):
            raise ValueError(f"reshard_to needs a strategy that reshards after forward, not {self.strategy}")
        return self


class PrecisionSection(FrozenModel):
    """`mode`: see `fullshard.spec.plan.Precision`, also for what each costs; `auto` is bf16 on bf16 hardware.

    `output_dtype`, `buffer_dtype`: what the model returns, and what floating-point buffers are kept in; unset
    leaves them.
    """

    mode: Literal["auto", PrecisionMode] = "auto"
    cast_inputs: bool = True
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    initial_loss_scale: PositiveScalar = 65536.0
    loss_scale_window: PositiveCount = 2000


class RecomputeSection(FrozenModel):
    """What is not saved for backward but computed again: `full` blocks, `every` k-th block, or by operation
    (`selective`: attention and every `save_matmuls`-th matmul of a block are saved, all else is repeated).
    Or what is saved in the host's memory (`offload`), from which it comes back for backward. `auto`: the
    planner's choice (which is not `offload`: no GPU has been timed under it).

    `every`: of how many blocks in a row the first is taken; unset, 2 for `every`, 1 (all of them) for
    `offload`, where the last of those taken saves on the device all the same: its backward comes first.
    `offload_min_fraction`: what takes less than this part of a block's input stays on the device. (Not a
    number of bytes: a plan tells what moves whatever the microbatch.)
    """

    mode: Literal["auto", "none", "full", "every", "selective", "offload"] = "auto"
    every: PositiveCount | None = None
    save_matmuls: PositiveCount = 1
    offload_min_fraction: NonNegativeScalar = 1 / 32

    @property
    def period(self) -> int:
        """Of so many blocks in a row one is taken."""
        if self.mode == "every":
            return self.every or 2
        return self.every or 1 if self.mode == "offload" else 1


class PrefetchSection(FrozenModel):
    """`implicit`: the engine's own overlap of one unit; `explicit`: so many units ahead; `none`: none;
    `auto`: the planner's choice."""

    mode: Literal["auto", "none", "implicit", "explicit"] = "auto"
    forward: Count = 1
    backward: Count = 1


class OffloadSection(FrozenModel):
    """`tier`: what is kept in the host's memory or on its drive (NVMe), and not on the device: AdamW's state
    with its master, or the parameters' shards as well. `auto`: nothing, unless the planner finds that
    nothing else fits.

    `path`: the directory on the drive, below `run.dir` unless it is absolute. `group_parameters`: the update
    goes group by group of so many of a rank's parameters, three of which are in memory at once where they
    come from the drive. `host_bytes`: what one rank may take of the host's memory; unset, its share.
    `moments`: the dtype that AdamW's moments are kept in; bf16 are rounded at random. `update`: by the host's
    processor, or in the device's memory, through which state and gradients pass; `auto`: on GPUs whichever is
    faster by the planner's rates, else, and where nothing was planned, the host. `order`: of the groups
    in an update: as the next forward needs them, or `alternate`, to and fro, which reads three groups less
    and lets the next forward wait for all. `paranoid`: whatever is read from the drive is held against its
    digest each time, not only when a run goes on from it.
    """

    tier: Tier | Literal["auto"] = "auto"
    path: PathText = "offload"
    group_parameters: PositiveInt = 64_000_000
    host_bytes: PositiveInt | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    update: Literal["auto", "host", "device"] = "auto"
    order: Literal["forward", "alternate"] = "forward"
    paranoid: bool = False

    @property
    def takes_optimizer(self) -> bool:
        return self.tier not in ("auto", "none")

    @property
    def takes_parameters(self) -> bool:
        return self.tier.startswith("params")

    @property
    def on_disk(self) -> bool:
        return self.tier.endswith("nvme")


class CheckpointSection(FrozenModel):
    """`dir`: where, a directory or the URL of an object store (s3://bucket/run); unset, in `run.dir`.
    `every` 0 saves only at the end and when interrupted. `keep`: the newest so many stay, 0 keeps all;
    `keep_every`: and each whose step it divides, 0 is none. `mode`: `async` writes in the background, from a
    copy in host memory. `disks`: of nodes that do not share them (`node`), each keeps what its ranks write.
    `layout`: `sharded`, which any ranks load; `ranks`, a file for each rank's own shards, which the same
    ranks load. `on_failure`: what a save that fails does to the run; the last one
    always ends it with an error. `read_back`: a save is acknowledged once every byte was read again and
    verified. `store_seconds`: how long an object store may take to answer a request, all tries together; one
    that carries bytes may take a second longer for every MiB. `key_file`: the path of a file with a secret
    key; checkpoints are signed with it, and only signed ones are loaded (docs/security.md). `export` adds
    safetensors at the end.
    """

    dir: PathText | None = None
    every: Count = 0
    keep: Count = 2
    keep_every: Count = 0
    mode: Literal["sync", "async"] = "sync"
    disks: Literal["shared", "node"] = "shared"
    layout: Literal["sharded", "ranks"] = "sharded"
    on_failure: Literal["continue", "stop"] = "continue"
    read_back: bool = False
    store_seconds: Annotated[float, NUMBER, Field(gt=0, le=86400)] = 60.0
    key_file: PathText | None = None
    export: bool = False

    @model_validator(mode="after")
    def _nodes_have_directories(self) -> Self:
        if self.disks == "node" and self.dir is not None and "://" in self.dir:
            raise ValueError(f'disks = "node" needs dir to be a directory of each node, not {self.dir}')
        return self

    @model_validator(mode="after")
    def _export_needs_whole_tensors(self) -> Self:
        if self.export and self.layout == "ranks":
            raise ValueError('export = true needs layout = "sharded"')
        return self


class SurvivalSection(FrozenModel):
    """What a run does about ranks that hang or part ways, and losses that stand out. See docs/survival.md.

    `watchdog_seconds`: a rank that stays in one phase of a step (data, forward, backward, …) for so long is
    hung; 0 for no watchdog. `watchdog_patience`: times as long where more takes its time: until the first
    step is done, and while saving and validating. `collective_seconds`: a collective that waits so long
    fails, but never before the watchdog has had its time.
    `fingerprint`: what the ranks compare in every step; `step` leaves out how many collectives they issued,
    for losses that on the CPU send from some ranks to others.
    `on_spike`: what is done with a step whose loss or gradient norm is over the mean of the last
    `spike_window` steps by more than `spike_sigma` standard deviations. `skip` leaves it out; `rollback` goes
    back to the newest checkpoint and steps over the batches since, and over `skip_batches` more.
    `check_replicas_every`: steps between two comparisons of replicas, bit for bit; 0 for none.
    """

    watchdog_seconds: Seconds = 300.0
    watchdog_patience: Annotated[float, NUMBER, Field(ge=1, le=100)] = 3.0
    collective_seconds: Annotated[float, NUMBER, Field(gt=0, le=10**7)] = 600.0
    fingerprint: Literal["all", "step", "none"] = "all"
    on_spike: Literal["none", "skip", "rollback"] = "none"
    spike_window: Annotated[Count, Field(ge=4)] = 128
    spike_sigma: PositiveScalar = 6.0
    skip_batches: Count = 0
    max_rollbacks: Count = 3
    check_replicas_every: Count = 0

    @property
    def group_timeout_seconds(self) -> float:
        """The process group's: after the longest that the watchdog waits, for it can say more."""
        return max(self.collective_seconds, 1.2 * self.watchdog_seconds * self.watchdog_patience)


class LogSection(FrozenModel):
    """`every`: steps from one line to the next. `profile_steps`: how many steps are profiled for the table of
    where the time goes, from the fourth on (they are in no figure of speed; a run of fewer steps has none).
    `trackers`: any of tensorboard, wandb, mlflow."""

    every: PositiveCount = 10
    profile_steps: Count = 2
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    sample_tokens: Count = 160


class RunSection(FrozenModel):
    """`dir` holds the run's log, checkpoints and report, and nothing else: a new run renames an earlier one's
    to `<dir>.1`. `ranks` 0: every GPU, else 2 ranks on the CPU.
    `compile` auto: if the planner finds it faster. `restarts`: how often ranks that died are started again,
    from the newest checkpoint; torchrun, which starts ranks by itself, has `--max-restarts`."""

    dir: PathText = "runs/default"
    seed: NonNegativeInt = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: Processes = 0
    restarts: Count = 0
    compile: bool | Literal["auto"] = False


class Run(FrozenModel):
    """What the user asks for: model, data, steps, and whatever mechanism is pinned."""

    run: RunSection = RunSection()
    model: ModelSection = DecoderConfig()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    sharding: ShardingSection = ShardingSection()
    precision: PrecisionSection = PrecisionSection()
    recompute: RecomputeSection = RecomputeSection()
    prefetch: PrefetchSection = PrefetchSection()
    offload: OffloadSection = OffloadSection()
    checkpoint: CheckpointSection = CheckpointSection()
    survival: SurvivalSection = SurvivalSection()
    log: LogSection = LogSection()

    @classmethod
    def load(cls, path: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Self:
        """Reads a `run.toml` (or the defaults, for None), then `section.key=value` overrides.

        Raises SpecError for a file that is absent or no TOML, an unknown key or a value that cannot be.
        """
        data = read_toml(Path(path), fix="fullshard init, which writes one") if path is not None else {}
        names = [_override(data, override) for override in overrides]
        return cls.parse(data, source=str(path) if path is not None else "the run", overridden=names)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.data.sequence_length

    @property
    def decoder(self) -> DecoderConfig:
        """The sizes of the reference decoder. Raises SpecError where the run is for another model."""
        if not isinstance(self.model, DecoderConfig):
            raise SpecError(
                "this is for the reference decoder alone.",
                got=f"[model] {self.model.source}",
                fix="a run whose [model] gives the sizes of a decoder",
            )
        return self.model

    @model_validator(mode="after")
    def _in_backward_fits(self) -> Self:
        wants = {
            'precision.mode = "fp16"': (
                self.precision.mode == "fp16",
                "with a loss scale a step is left out after backward",
            ),
            f'survival.on_spike = "{self.survival.on_spike}"': (
                self.survival.on_spike != "none",
                "a step is flagged as a spike after backward",
            ),
            f'offload.tier = "{self.offload.tier}"': (
                self.offload.takes_optimizer,
                "a tier updates group by group, and its gradients leave the device anyway",
            ),
        }
        for setting, (is_set, why) in wants.items():
            if self.optimizer.in_backward and is_set:
                raise ValueError(f"optimizer.in_backward = true does not go with {setting}: {why}")
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if not isinstance(self.model, DecoderConfig):
            return self  # what positions it has is known when it is built
        if self.data.sequence_length > self.model.max_sequence:
            raise ValueError(
                f"data.sequence_length = {self.data.sequence_length} is over "
                f"model.max_sequence = {self.model.max_sequence}"
            )
        return self


def _override(data: dict[str, Any], override: str) -> str:
    """Puts `train.steps=500` into `data`, and returns `train.steps`. A value that is not TOML is a string."""
    name, separator, text = override.partition("=")
    *path, key = name.strip().split(".")
    if not separator or not path or not key:
        raise SpecError("--set takes section.key=value.", got=override, fix="--set train.steps=500")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except TomlError:
        value = text.strip()
    except ValueError as error:
        raise SpecError(f"--set {name} has no value that a run can have.", got=str(error)) from error
    section: Any = data
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SpecError(f"--set {override}: {part!r} is a value, not a section.")
    section[key] = value
    return name.strip()

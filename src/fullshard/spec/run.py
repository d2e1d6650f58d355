"""Run: the user's settings, read from a `run.toml`. Every default is defined on its field."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from fullshard.errors import SpecError
from fullshard.spec.settings import train_section
from fullshard.spec.settings.communication_section import CommunicationSection
from fullshard.spec.settings.data_section import DataSection
from fullshard.spec.settings.evaluate_section import VALIDATION, BestResult, Evaluation, parse_kept_result
from fullshard.spec.settings.foreign_names import FOREIGN_NAMES, REMOVED
from fullshard.spec.settings.model_section import DecoderConfig, ModelSection
from fullshard.spec.value import (
    Count,
    FrozenModel,
    NonNegativeInt,
    PathText,
    PositiveCount,
    PositiveInt,
    Processes,
    suggested_keys_text,
)
from fullshard.system.small_files import TomlError, parse_toml, read_toml

PrecisionMode = Literal["fp32", "bf16", "bf16_reduce", "fp16", "bf16_pure", "fp8", "fp8_rowwise"]
Tier = Literal["none", "optimizer:cpu", "optimizer:nvme", "params+optimizer:cpu", "params+optimizer:nvme"]


SettingsT = TypeVar("SettingsT", bound=FrozenModel)


class Strategy(StrEnum):
    """Sharding strategies. See docs/design/strategies.md for the memory and communication of each."""

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
    "hsdp": Strategy.HYBRID_SHARD,
    "optimizer_state": Strategy.ZERO1,
}


def parse_strategy(name: object) -> object:
    """Returns the Strategy of a name or alias; "auto" and non-text unchanged. Raises ValueError otherwise."""
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


class UnitOverride(FrozenModel):
    """Settings for the units whose name matches `match` (a shell pattern: `blocks.0`, `*.experts`).

    `strategy`: `no_shard` leaves the unit unsharded (replicated, its gradient all-reduced)
    `reshard_after_forward`, `precision`: replace the plan's values. fp16 and bf16_pure apply to whole runs
        only, because they need a loss scale or another optimizer.
    """

    match: str
    strategy: Literal["no_shard"] | None = None
    reshard_after_forward: StrictBool | None = None
    precision: Literal["fp32", "bf16", "bf16_reduce"] | None = None


class UnitSection(FrozenModel):
    """Settings of the division of a model into communication units.

    By default, units are the repeated blocks, which are detected, embeddings, the head, and the experts of
    each block.

    `names`: exactly the modules whose names match, such as ["blocks.*"], are units instead
    `min_parameters`: modules of at least this size, bottom up, are units instead
    """

    names: tuple[str, ...] = ()
    min_parameters: PositiveInt | None = None
    overrides: tuple[UnitOverride, ...] = ()

    @model_validator(mode="after")
    def _check_at_most_one_rule(self) -> Self:
        if self.names and self.min_parameters is not None:
            raise ValueError("names and min_parameters exclude each other")
        return self


class ShardingSection(FrozenModel):
    """Settings of the sharding of parameters, gradients and optimizer state over ranks.

    `strategy`: `auto` is the fastest that fits
    `shard_degree`: number of ranks that a hybrid strategy shards over; it replicates over the others
    `tensor_parallel`: splits each block's matmuls, and the sequence between them, over this many adjacent
        ranks (Korthikanti et al., arXiv:2205.05198). The other settings apply to the remaining ranks.
        `auto` is 1, except where that does not fit, the batch has fewer sequences than ranks, or parameters
        take long to send between nodes. docs/tensor-parallel.md lists the models that can be divided.
    `tensor_parallel_styles`: what is done with each module of a model from Python, by names:
        see docs/tensor-parallel.md
    `context_parallel`: divides the tokens of each sequence over this many adjacent ranks, so that activations
        take that much less memory. Parameters are sharded over these ranks as over all others. `auto` is 1
        unless a plan with whole sequences does not fit in device memory.
    `expert_parallel`: divides the experts of a mixture over this many adjacent ranks, which send each other
        the tokens for them, instead of gathering all experts of a layer. See docs/expert-parallel.md. `auto`
        is the least number that no other is notably faster than; 1 if nothing is planned.
    """

    strategy: Annotated[Strategy | Literal["auto"], BeforeValidator(parse_strategy)] = "auto"
    shard_degree: PositiveCount | None = None
    tensor_parallel: PositiveCount | Literal["auto"] = "auto"
    tensor_parallel_styles: dict[str, str] = {}
    context_parallel: PositiveCount | Literal["auto"] = "auto"
    expert_parallel: PositiveCount | Literal["auto"] = "auto"
    units: UnitSection = UnitSection()

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks that have parts of the same sequences, or of their matmuls."""
        return self.tensor_degree * self.context_degree

    @property
    def tensor_degree(self) -> int:
        """Number of ranks that share each matmul; 1 if it is left open."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel

    @property
    def expert_degree(self) -> int:
        """Number of ranks that divide experts; 1 if it is left open."""
        return 1 if self.expert_parallel == "auto" else self.expert_parallel

    @property
    def context_degree(self) -> int:
        """Number of ranks that have parts of the same sequences; 1 if it is left open."""
        return 1 if self.context_parallel == "auto" else self.context_parallel

    @model_validator(mode="after")
    def _check_shard_degree(self) -> Self:
        if self.strategy == "auto":
            return self
        hybrid = self.strategy in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
        if self.shard_degree is not None and not hybrid:
            raise ValueError(f"shard_degree is for hybrid strategies, not for {self.strategy}")
        return self


class PrecisionSection(FrozenModel):
    """Settings of the dtypes of computation, gradients and shards.

    `mode`: see `fullshard.spec.plan.Precision`, also for the cost of each; `auto` is bf16 on bf16 hardware,
        else fp32. `fp8` and `fp8_rowwise` (the extra `fp8`): matmuls of linear modules in the repeated blocks
        are in fp8, with a scale per tensor or per row, and all else as in bf16. They need a GPU with fp8
        matmuls (compute capability 8.9), and `run.compile` to beat bf16. On a CPU they are emulated.
    `fp8_min_features`: matrices with fewer input or output features stay in bf16, because casting them takes
        longer than their matmuls save; 16 at least, which fp8 matmuls need
    `cast_inputs`: floating-point inputs of the model and of units are cast to the dtype of the parameters;
        false for inputs that bf16 would round, such as times or positions
    """

    mode: Literal["auto", PrecisionMode] = "auto"
    fp8_min_features: Annotated[Count, Field(ge=16)] = 2048
    cast_inputs: bool = True


class OffloadSection(FrozenModel):
    """Settings of the offload target: state in host memory or on the host's drive (NVMe).

    `tier`: the offload target: AdamW's state with its master weights, or the parameter shards as well.
        `auto`: nothing, unless the planner finds that nothing else fits.
    `path`: the directory on the drive, relative to `run.dir` unless it is absolute
    `sub_group_parameters`: parameters per group of an update; three groups of a drive are in memory at once
    `host_bytes`: host memory that one rank may use; unset, its share
    `moments`: dtype of AdamW's moments; bf16 is rounded stochastically
    `update`: by the host's processor, or in device memory, through which state and gradients pass. `auto`: on
        GPUs, the faster one by the planner's rates; otherwise, or without planning, `host`.
    """

    tier: Tier | Literal["auto"] = "auto"
    path: PathText = "offload"
    sub_group_parameters: PositiveInt = 64_000_000
    host_bytes: PositiveInt | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    update: Literal["auto", "host", "device"] = "auto"

    @property
    def offloads_optimizer(self) -> bool:
        return self.tier not in ("auto", "none")

    @property
    def offloads_parameters(self) -> bool:
        return self.tier.startswith("params")

    @property
    def is_on_drive(self) -> bool:
        return self.tier.endswith("nvme")


class LogSection(FrozenModel):
    """Settings of logging, profiling and experiment trackers.

    `every`: steps between log lines
    `trace_every`: steps between those that torch's profiler records on all ranks, besides the tenth and the
        hundredth of an attempt; excluded from speed figures. From them come the table of where the time
        goes, and `fullshard trace`. 0: none. See docs/trace.md.
    `profile`: further steps to record, with shapes, and on rank 0 with Python stacks
    `trackers`: `tensorboard`, `wandb` (each an extra), or the name of an entry point in the group
        `fullshard.trackers` of another package. See docs/trackers.md.
    """

    every: PositiveCount = 10
    trace_every: Count = 1000
    profile: tuple[PositiveCount, ...] = ()
    trackers: tuple[str, ...] = ()


def _reject_mps(device: object) -> object:
    """Returns `device`. Raises ValueError for Apple's GPUs, which are known but cannot be used."""
    if device == "mps":
        raise ValueError(
            "FSDP2 does not run on Apple's GPUs, because torch.mps has no streams: use cpu (auto there)"
        )
    return device


class RunSetupSection(FrozenModel):
    """Settings of the run's directory, seed, device, ranks and restarts.

    `dir`: holds only the run's log, checkpoints and report; a new run renames an earlier one to `<dir>.1`
    `ranks`: 0 is every GPU, else 2 ranks on the CPU
    `compile`: compiles each repeated block by torch.compile. `auto`: on GPUs if the planner finds it faster,
        compiling included; not on the CPU, and not without planning. What cannot be compiled runs eagerly.
    `restarts`: how often dead ranks are restarted from the newest checkpoint; torchrun: `--max-restarts`
    """

    dir: PathText = "runs/default"
    seed: NonNegativeInt = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_reject_mps)] = "auto"
    ranks: Processes = 0
    restarts: Count = 0
    compile: bool | Literal["auto"] = "auto"


def _with_whole_steps(settings: SettingsT, key: str, *, steps: int) -> SettingsT:
    """Returns `settings` with a fraction of `steps` in `key` rounded up to steps; others as they are."""
    share = getattr(settings, key)
    if not 0 < share < 1:
        return settings
    return settings.model_copy(update={key: max(1, math.ceil(share * steps))})


class Run(FrozenModel):
    """All settings of a run, by section. The planner chooses those that are `auto`."""

    foreign = FOREIGN_NAMES | REMOVED

    run: RunSetupSection = RunSetupSection()
    model: ModelSection = DecoderConfig()
    adapter: train_section.AdapterSection = train_section.AdapterSection()
    data: DataSection = DataSection()
    train: train_section.TrainSection = train_section.TrainSection()
    optimizer: train_section.OptimizerSection = train_section.OptimizerSection()
    ema: train_section.EmaSection = train_section.EmaSection()
    schedule: train_section.ScheduleSection = train_section.ScheduleSection()
    sharding: ShardingSection = ShardingSection()
    communication: CommunicationSection = CommunicationSection()
    precision: PrecisionSection = PrecisionSection()
    recompute: train_section.RecomputeSection = train_section.RecomputeSection()
    offload: OffloadSection = OffloadSection()
    plan: train_section.PlanSection = train_section.PlanSection()
    checkpoint: train_section.CheckpointSection = train_section.CheckpointSection()
    fault_tolerance: train_section.FaultToleranceSection = train_section.FaultToleranceSection()
    log: LogSection = LogSection()
    evaluate: tuple[Evaluation, ...] = ()

    @classmethod
    def load(cls, path: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Self:
        """Reads a `run.toml` (None: the defaults), and applies `section.key=value` overrides.

        Raises SpecError for a file that is missing or not TOML, an unknown key or an invalid value.
        """
        data = read_toml(Path(path), fix="fullshard init, which writes one") if path is not None else {}
        names = [_apply_cli_override(data, override) for override in overrides]
        return cls.parse(data, source=str(path) if path is not None else "the run", overridden=names)

    def compile_choices(self, device: str) -> tuple[bool, ...]:
        """Returns the values of `run.compile` to plan with: for `auto` on GPUs both, and on the CPU eager."""
        if self.run.compile == "auto":
            return (False, True) if device == "cuda" else (False,)
        return (self.run.compile,)

    def with_overrides(self, overrides: Sequence[str]) -> Self:
        """Returns a copy with `section.key=value` overrides. Raises SpecError as `load` does."""
        data = self.model_dump(mode="json")
        names = [_apply_cli_override(data, override) for override in overrides]
        return self.parse(data, source="the run", overridden=names)

    def with_settings(self, sections: Mapping[str, Mapping[str, object]]) -> Self:
        """Returns a copy with other values, unchecked, such as `{"recompute": {"mode": "none"}}`."""
        updated = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=updated)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.data.sequence_length

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The validation, if there is data for it, and [[evaluate]]."""
        section, train = self.data, self.train
        if not (section.source == "python" or section.validation_fraction or section.has_validation_files):
            return self.evaluate
        validation = Evaluation.model_construct(
            name=VALIDATION,
            every=train.validate_every,
            sequences=train.validate_sequences,
            weights="ema" if self.ema.validation and self.ema.decay else "model",
        )
        return (validation, *self.evaluate)

    @property
    def best_result(self) -> BestResult | None:
        """The result that `checkpoint.keep_best` names."""
        kept = self.checkpoint.keep_best
        return None if kept is None else parse_kept_result(kept, self.evaluations)

    @property
    def memory_margin(self) -> float:
        """Fraction of device memory to leave free; 0 if strategy, microbatch and recompute are all set."""
        section = self.sharding.strategy, self.train.microbatch, self.recompute.mode
        pinned = section[0] != "auto" and section[1] is not None and section[2] != "auto"
        return 0.0 if pinned else self.plan.memory_margin

    @property
    def decoder_config(self) -> DecoderConfig:
        """The section [model] of a run of the reference decoder. Raises SpecError for any other model."""
        if not isinstance(self.model, DecoderConfig):
            raise SpecError(
                "this is for the reference decoder alone.",
                got=f"[model] {self.model.setting_text}",
                fix="a run whose [model] gives the sizes of a decoder",
            )
        return self.model

    @model_validator(mode="after")
    def _complete_settings(self) -> Self:
        """Replaces fractions of the steps by numbers, once `train.steps` is known.

        With validation files, sets `validate_sequences` to 0 (all) unless the user has set it.
        """
        if self.data.has_validation_files and "validate_sequences" not in self.train.model_fields_set:
            object.__setattr__(self, "train", self.train.model_copy(update={"validate_sequences": 0}))
        if (steps := self.train.steps) is None:
            return self
        for name in ("schedule.warmup_steps", "train.validate_every", "checkpoint.every", "ema.start"):
            section, _, key = name.partition(".")
            object.__setattr__(self, section, _with_whole_steps(getattr(self, section), key, steps=steps))
        evaluations = tuple(_with_whole_steps(one, "every", steps=steps) for one in self.evaluate)
        object.__setattr__(self, "evaluate", evaluations)
        return self

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        names = [one.name for one in self.evaluations if one.name != VALIDATION]
        if any(one.name == VALIDATION for one in self.evaluate):
            raise ValueError(f"evaluate: {VALIDATION!r} is the name of the validation: train.validate_every")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"evaluate: the name {twice[0]!r} is used twice")
        if not self.ema.decay and (averaged := [one.name for one in self.evaluate if one.weights == "ema"]):
            raise ValueError(f'evaluate: {averaged[0]}: weights = "ema" needs averages: set ema.decay')
        if any(one.paths for one in self.evaluate):
            self.data.check_prepares_other_paths()
        has_task = any(one.task for one in self.evaluate)
        if has_task and self.data.tokenizer is None:
            raise ValueError("evaluate: a task needs a tokenizer: set data.tokenizer")
        axes = {"tensor_parallel": has_task, "context_parallel": has_task or self.data.has_pairs}
        for axis in (name for name, needs_one in axes.items() if needs_one):
            if getattr(self.sharding, axis) not in ("auto", 1):
                raise ValueError(f"tasks and pairs need whole sequences: sharding.{axis} must be 1")
            object.__setattr__(self, "sharding", self.sharding.model_copy(update={axis: 1}))
        _ = self.best_result
        return self

    @model_validator(mode="after")
    def _check_sections_go_together(self) -> Self:
        if self.precision.mode == "fp8" and self.offload.offloads_optimizer:
            raise ValueError(
                f'precision.mode = "fp8" does not go with offload.tier = "{self.offload.tier}", because '
                "weights are cast to fp8 from masters on the device before they are gathered; "
                '"fp8_rowwise" does'
            )
        if self.ema.decay and self.offload.is_on_drive:
            raise ValueError(
                f'ema.decay does not go with offload.tier = "{self.offload.tier}", because the state that is '
                "kept on the drive from step to step would not hold the average; a tier :cpu does"
            )
        length, model = self.data.row_length, self.model
        # The positions of other models are known only once they are built.
        if isinstance(model, DecoderConfig) and length > model.max_sequence:
            raise ValueError(
                f"data.sequence_length: rows of {length} tokens exceed "
                f"model.max_sequence = {model.max_sequence}: lower the first or raise the second"
            )
        return self


# A setting of the command line replaces the other one of the file, too.
_INSTEAD_OF = {"train.steps": "epochs", "train.epochs": "steps"}


def _apply_cli_override(data: dict[str, Any], override: str) -> str:
    """Applies an override such as `train.steps=500` to `data`, and returns its key, `train.steps`.

    A value that is not TOML is a string. Raises SpecError for an override without a section, key or value.
    """
    name, separator, text = override.partition("=")
    *path, key = name.strip().split(".")
    if not separator or not key or not (path or key == "evaluate"):
        meant = suggested_keys_text(Run, key) if separator else None
        raise SpecError("--set takes section.key=value.", got=override, fix=meant or "--set train.steps=500")
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
    if name.strip() in _INSTEAD_OF:
        section[_INSTEAD_OF[name.strip()]] = None
    return name.strip()

"""Checks of a run's settings: whether they work together and on its ranks, have an effect, and run code."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from fullshard.errors import PlanError, SpecError
from fullshard.quantities import count_text
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel, indivisible_experts_error
from fullshard.spec.value import FrozenModel


def check_own_model_has_data(run: Run) -> None:
    """Raises SpecError for a run without data that names a model or a tokenizer of its own."""
    section = run.data
    own_model = None if isinstance(run.model, DecoderConfig) else f"[model] {run.model.setting_text}"
    given = own_model or (section.tokenizer and f"data.tokenizer = {section.tokenizer!r}")
    if given and section.source is None and not section.sources:
        raise SpecError(
            "the run has no data.",
            got=f"{given}, and no data.source",
            why="without data.source, only the reference decoder trains, on the bytes of Python's library",
            fix='data.source and data.paths, or data.source = "stdlib" to train on Python\'s library',
        )


def check_settings_work_together(run: Run) -> None:
    """Raises PlanError for settings that do not work with tensor parallelism, an offload target or Muon."""
    section = run.optimizer
    if run.offload.offloads_optimizer and (section.name.lower() != "adamw" or section.options):
        options = ", with options" if section.options else ""
        raise PlanError(
            "only AdamW's state is kept outside the device.",
            got=f'optimizer.name = "{section.name}"{options}, offload.tier = "{run.offload.tier}"',
            why="it is updated in parts of shards; muon and soap need whole matrices",
            fix='optimizer.name = "adamw" without options, or offload.tier = "none"',
        )
    if run.adapter.options.get("use_dora") and run.offload.offloads_optimizer:
        raise PlanError(
            "DoRA needs its base weights on the device.",
            got=f'adapter.options.use_dora = true, offload.tier = "{run.offload.tier}"',
            why="its magnitudes begin as norms of whole base weights",
            fix='offload.tier = "none", or adapter.options without use_dora',
        )
    if run.communication.is_set and run.sharding.strategy == "no_shard":
        raise PlanError(
            "[communication] does not change what replicas send.",
            got='sharding.strategy = "no_shard"',
            why="it is for gathers of shards, and for sums over the ranks that shard",
            fix='sharding.strategy = "zero1", which sends as much, or no [communication]',
        )
    if (name := section.name.lower()) in ("muon", "soap", "adafactor") and run.precision.mode == "bf16_pure":
        raise PlanError(
            f"bf16_pure rounds its updates stochastically, which {name} does not.",
            got=f'optimizer.name = "{name}", precision.mode = "bf16_pure"',
            why="rounding to nearest would lose most updates of bf16 parameters",
            fix='precision.mode = "bf16", which keeps fp32 parameters; or optimizer.name = "adamw"',
        )
    degree, unsupported = run.sharding.tensor_degree, first_setting_that_excludes_tensor_parallel(run)
    if degree > 1 and unsupported is not None:
        raise PlanError(
            "these settings do not work together.",
            got=f"sharding.tensor_parallel = {degree}, {unsupported}",
            fix="leave one of the two at its default",
        )


def first_setting_that_excludes_tensor_parallel(run: Run) -> str | None:
    """Returns the first setting of `run` that does not work together with tensor parallelism, if any."""
    model, experts = run.model, run.sharding.expert_degree
    styles = bool(run.sharding.tensor_parallel_styles)
    unsupported = {
        "model.python without sharding.tensor_parallel_styles": not styles
        and not isinstance(model, DecoderConfig | HuggingFaceModel),
        f"sharding.tensor_parallel_styles, sharding.expert_parallel = {experts}": styles and experts > 1,
    }
    return next((setting for setting, is_set in unsupported.items() if is_set), None)


def count_groups(ranks: int, degree: int, *, key: str, shared: str) -> int:
    """Returns the number of groups of `degree` ranks. Raises PlanError if they are not whole."""
    if ranks % degree:
        raise PlanError(
            f"{count_text(ranks, 'rank')} cannot be laid out in groups of {degree}.",
            got=f"sharding.{key} = {degree}, {count_text(ranks, 'rank')}",
            why=f"each group of ranks that share {shared} must be whole",
            fix=f"sharding.{key} = one of {divisors(ranks)}",
        )
    return ranks // degree


def check_sequence_is_divisible(run: Run) -> None:
    section, length = run.sharding, run.data.sequence_length
    # Two pieces to each rank: see `fullshard.distributed.sequence_parts`.
    pieces = 2 * section.context_degree if section.context_degree > 1 else 1
    parts = section.ranks_per_sequence
    rows = 2 if run.data.has_pairs else 1  # the halves of a pair are divided one by one
    if length % (rows * parts) and section.tensor_degree > 1:
        each = math.lcm(pieces, rows * parts)
        raise PlanError(
            f"sequences of {run.data.row_length:,} tokens cannot be divided over {parts} ranks.",
            got=f"data.sequence_length = {length}, sharding.tensor_parallel = {section.tensor_parallel}, "
            f"sharding.context_parallel = {section.context_degree}",
            why="the ranks that share a matmul share the sequence between matmuls",
            fix=f"data.sequence_length = {max(length // each, 1) * each} or {(length // each + 1) * each}",
        )
    if length % pieces:
        raise PlanError(
            f"sequences of {length:,} tokens cannot be cut into {pieces} equal pieces.",
            got=f"data.sequence_length = {length}, sharding.context_parallel = {section.context_parallel}, "
            "2 to each rank",
            fix=f"data.sequence_length = {max(length // pieces, 1) * pieces} or "
            f"{(length // pieces + 1) * pieces}",
        )


def check_expert_degree(run: Run, *, group: int) -> None:
    """Raises PlanError unless the ranks divide a decoder's experts, and divide `group` or are divided by it.

    group: number of adjacent ranks over which a parameter is divided and sharded
    """
    ranks, model = run.sharding.expert_degree, run.model
    if ranks == 1:
        return
    if isinstance(model, DecoderConfig) and (not model.is_mixture or model.experts % ranks):
        raise indivisible_experts_error(model.experts, ranks=ranks, key="model.experts")
    if group % ranks and ranks % group:
        raise PlanError(
            f"experts divided over {ranks} ranks cannot be sharded in groups of {group}.",
            got=f"sharding.expert_parallel = {ranks}, {group} ranks in a shard group",
            why="one of the two must divide the other",
            fix=f"sharding.expert_parallel = one of {divisors(group)}",
        )


def divisors(count: int) -> list[int]:
    """Returns all divisors of `count`, in ascending order; none of 0."""
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


# Settings, whether they have an effect, and what they need for it.
_CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[Run], bool], str], ...] = (
    (
        ("precision.fp8_min_features",),
        lambda run: run.precision.mode.startswith("fp8"),
        'precision.mode = "fp8" or "fp8_rowwise"',
    ),
    (("schedule.decay_fraction",), lambda run: run.schedule.kind == "wsd", 'schedule.kind = "wsd"'),
    (("schedule.min_lr_ratio",), lambda run: run.schedule.kind != "constant", "a schedule.kind that decays"),
    (
        ("data.on_error", "data.processes", "data.packing", "data.validation_fraction", "data.records"),
        lambda run: run.data.source != "python",
        'another data.source than "python", whose factory makes the batches',
    ),
    (
        ("data.on_error", "data.processes"),
        lambda run: (
            run.data.source == "python" or any(s.source != "memmap" for s in run.data.sources or [run.data])
        ),
        "data that is tokenized here, not token files",
    ),
    (
        ("data.eos_token",),
        lambda run: any(
            s.source not in ("memmap", "python") and s.records in ("text", "completion")
            for s in run.data.sources or [run.data]
        ),
        'data.records = "text" or "completion", whose documents it ends',
    ),
    (
        ("data.trust_remote_code",),
        lambda run: (
            any(s.records == "messages" for s in run.data.sources or [run.data])
            or any(one.task for one in run.evaluate)
        ),
        'data.records = "messages", or a task of [[evaluate]]',
    ),
    (
        ("train.validate_every", "train.validate_sequences"),
        lambda run: (
            run.data.source == "python"
            or run.data.validation_fraction > 0
            or run.data.has_validation_files
            or not run.train.validate_every  # asks for none, and gets none
        ),
        "data.validation_fraction > 0, or data.validation_paths",
    ),
    (("ema.start", "ema.every", "ema.validation"), lambda run: run.ema.decay > 0, "ema.decay"),
    (
        ("communication.ranks_per_node",),
        lambda run: run.communication.reduce_within != "none",
        "communication.reduce_within",
    ),
)


def unused_setting_notes(run: Run) -> list[str]:
    """Returns a note for each setting that differs from its default and has no effect.

    The precision of `run` is resolved: not `auto`. Settings that the planner's choices may use are left out.
    """
    plain, notes = Run(), list[str]()
    for names, has_effect, needs in _CONDITIONS:
        for name in names:
            value = setting_value(run, name)
            if value != setting_value(plain, name) and not has_effect(run):
                notes.append(f"{name} = {json.dumps(value)} has no effect: it needs {needs}")
    return notes


TRACKERS_OF_EXTRAS = ("tensorboard", "wandb")


def _loads_kernels_from_repository(options: Mapping[str, Any]) -> bool:
    """Returns whether transformers would load kernels, which are code, from a repository `owner/name`."""
    return any(
        _loads_kernels_from_repository(cast(Mapping[str, Any], value))
        if isinstance(value, Mapping)
        else "implementation" in key and "/" in str(value)
        for key, value in options.items()
    )


# Key -> whether a value makes the run run code. A test requires an entry for each setting that may.
CODE_SETTINGS: Mapping[str, Callable[[Any], bool]] = {
    "model.python": bool,
    "model.trust_remote_code": bool,
    "model.attention": lambda name: "/" in name,
    "model.options": _loads_kernels_from_repository,
    "data.factory": bool,
    "data.trust_remote_code": bool,
    "train.loss": bool,
    "optimizer.name": lambda name: "." in name and not name.startswith("torch.optim."),
    "communication.hook": bool,
    "evaluate": lambda evaluations: any(one.call or one.task for one in evaluations),
    "log.trackers": lambda names: not {*names} <= {*TRACKERS_OF_EXTRAS},
}


def settings_that_run_code(run: Run) -> dict[str, Any]:
    """Returns the settings of `run`, by key, whose values make it run code."""
    found = {key: setting_value(run, key) for key in CODE_SETTINGS}
    return {key: value for key, value in found.items() if value is not None and CODE_SETTINGS[key](value)}


def check_plan_is_trusted_and_of_run(planned: Run, given: Run, *, plan: str) -> None:
    """Checks the run of a plan file, which may come from anyone, against the settings that the user gave.

    planned: the run in the file `plan`
    given: the run of the user's run.toml and `--set`

    Raises SpecError for a setting that runs code and was not given, and for a given one with another value.
    Settings that were left open (`auto`) have the plan's values.
    """
    own = dict(_iterate_given_settings(given))
    for key, value in settings_that_run_code(planned).items():
        if key not in own:
            raise SpecError(
                f"{plan} names code to run, and a plan is not trusted with that.",
                got=f"{key} = {value!r}",
                why="the code would have your permissions, and a plan may come from anyone",
                fix=f"read that code, then fullshard train RUN.toml --plan {plan}, "
                f"with {key} in RUN.toml or in --set too",
            )
    for key, value in own.items():
        if value not in (None, "auto") and setting_value(planned, key) != value:
            raise SpecError(
                f"{plan} is the plan of another run.",
                got=f"{key} = {setting_value(planned, key)!r}, not {value!r}",
                why="a plan carries the run that it was made for",
                fix="the plan alone; or fullshard plan with these settings and --save",
            )


def setting_value(run: Run, key: str) -> Any:
    """Returns the value of `section.key`; None if the section is of a kind that lacks the key."""
    value: Any = run
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _iterate_given_settings(section: FrozenModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of each setting that was given, not left at its default."""
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, FrozenModel):
            yield from _iterate_given_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

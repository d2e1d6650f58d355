"""The target of `fullshard plan`: a model by name or file, the run around it, and its spec."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import PlanError, SpecError
from fullshard.launch.detect import detect_hardware
from fullshard.launch.environment import is_started_by_torchrun
from fullshard.launch.gc import disable_gc
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import choose_rank_count_and_device
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.search.candidates import LONG_RUN_STEPS
from fullshard.planner.search.parallel_degrees import most_sequences_shared_by_ranks
from fullshard.quantities import count_text, format_count
from fullshard.spec import pretrained
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel

# Default if neither the user nor a run.toml sets it: a usual sequence length in pretraining.
DEFAULT_SEQUENCE = 8192
# Default tokens per step, approximately.
DEFAULT_TOKENS = 2**20
# The largest steps that large runs were published with: 16M tokens, Llama 3 405B (arXiv:2407.21783, table 4).
LARGEST_COMMON_TOKENS = 2**24


@dataclass(frozen=True)
class ModelToPlan:
    """A model to plan for.

    settings: the model as `--set` arguments, which those of the user override
    run_path: a run.toml that defines the model
    chosen_here: whether the user named only a model, so that its run has no batch size and no length of the
        user's: its steps are LONG_RUN_STEPS, which share the time of compiling
    differs: difference of the reference decoder from the named preset
    """

    name: str
    settings: tuple[str, ...] = ()
    run_path: Path | None = None
    chosen_here: bool = True
    differs: tuple[str, ...] = ()

    def load_run(self, overrides: Sequence[str]) -> Run:
        """Returns the run for this model with the user's `section.key=value` overrides. Raises SpecError."""
        length = [f"train.steps={LONG_RUN_STEPS}"] if self.chosen_here else []
        return Run.load(self.run_path, overrides=[*length, *self.settings, *overrides])

    def describe_model(self, run: Run, hardware: Hardware) -> ModelSpec:
        """Returns the spec of the model as `run` trains it on `hardware`, from the cache if possible."""
        with disable_gc():
            return describe_run(run, hardware.device, attention_kernel=hardware.attention_kernel)


def resolve_model_to_plan(name: str | None) -> ModelToPlan:
    """Returns the model of `name`: a preset, a file or directory, or a repository in the Hugging Face cache.

    None means fullshard's default model. Raises SpecError for an unknown name, with the nearest presets.
    """
    if name is None:
        return ModelToPlan(name="the embedded default model", chosen_here=False)
    path = Path(name)
    if os.path.exists(path):
        return _model_to_plan_from_toml_or_config(path)
    if path.suffix in (".json", ".toml") or name.startswith((".", "/", "~")):
        raise SpecError(f"{name} cannot be read.", got="no such file")
    cached = pretrained.find_cached_config(name) if "/" in name else None
    preset = pretrained.preset_or_none(name) if cached is None else None
    if preset is not None:
        if isinstance(preset.model, HuggingFaceModel):
            return _model_to_plan_from_hf_config(Path(preset.model.hf), name=preset.name)
        differs = (preset.differs,) if preset.differs else ()
        return ModelToPlan(name=preset.name, settings=_model_as_overrides(preset.model), differs=differs)
    cached = cached or pretrained.find_cached_config(name)
    if cached is not None:
        return _model_to_plan_from_hf_config(cached, name=name)
    raise SpecError(
        f"there is no model {name!r}.",
        got="no preset, no file, and no repository in this machine's Hugging Face cache",
        fix=f"{', '.join(pretrained.similar_preset_names(name))}; or the path of a config.json or run.toml "
        "(a config.json, and a cached name, need fullshard[hf])",
    )


def _model_to_plan_from_toml_or_config(path: Path) -> ModelToPlan:
    if path.is_dir():
        config = path / pretrained.CONFIG_NAME
        if not config.is_file():
            raise SpecError(f"{path} is a directory without a {config.name}.", fix="a preset, or a file")
        return _model_to_plan_from_hf_config(config, name=path.resolve().name)
    if path.suffix == ".toml":
        return ModelToPlan(name=f"the model of {path}", run_path=path, chosen_here=False)
    return _model_to_plan_from_hf_config(path, name=str(path))


def _model_to_plan_from_hf_config(path: Path, *, name: str) -> ModelToPlan:
    config = pretrained.read_config(path)
    pretrained.check_config_limits(config, source=str(path))
    if not isinstance(config.get("model_type"), str):
        raise SpecError(
            f"{path} is not a config.json of a model.",
            got=f"an object with {', '.join(list(config)[:6]) or 'nothing in it'}",
            why="a model's has model_type, a text",
        )
    text: Any = config.get("text_config")
    parts: list[Any] = [config, text] if isinstance(text, dict) else [config]
    positions = [part.get(key) for part in parts for key in ("max_position_embeddings", "n_positions")]
    longest = next((one for one in positions if isinstance(one, int) and one > 0), DEFAULT_SEQUENCE)
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and (longest - padding - 1).bit_count() == 1:
        longest -= padding + 1  # RoBERTa's 514 rows: positions begin behind the padding token's
    # Images have no tokens, so each counts as one.
    length = 1 if "image_size" in config and "vocab_size" not in config else min(longest, DEFAULT_SEQUENCE)
    settings = (f"data.sequence_length={length}", f"model.hf={json.dumps(str(path))}")
    return ModelToPlan(name=name, settings=settings)


def _model_as_overrides(model: DecoderConfig) -> tuple[str, ...]:
    """Returns the model as `--set` arguments, with a sequence length that its positions allow."""
    length = min(model.max_sequence, DEFAULT_SEQUENCE)
    own = tuple(f"model.{key}={json.dumps(value)}" for key, value in model)
    return (*own, f"data.sequence_length={length}")


def choose_global_batch(run: Run, *, tokens: int | None, ranks: int, per_node: int) -> tuple[int, str | None]:
    """Returns (sequences per step, note for the user): about `tokens`, in whole microbatches of every rank.

    If one sequence for each rank is too many tokens, ranks share sequences or matmuls, where they may.

    tokens: tokens per step; None means about a million
    ranks: number of ranks, or of groups that share sequences or matmuls as the run sets it
    per_node: ranks per node

    Raises PlanError if `tokens` is given and one microbatch per rank has more than twice as many. The
    note is None if the batch has exactly `tokens`, or without these, LARGEST_COMMON_TOKENS at most.
    """
    length = run.data.sequence_length
    wanted = DEFAULT_TOKENS if tokens is None else tokens
    once = ranks * (run.train.microbatch or 1)
    sequences = max(1, round(wanted / (length * once))) * once
    most = LARGEST_COMMON_TOKENS if tokens is None else 2 * tokens
    if sequences * length > most:
        shared = most_sequences_shared_by_ranks(run, ranks=ranks, per_node=per_node, most_tokens=most)
        if shared is not None:
            return shared, (
                f"planned with {count_text(shared, 'sequence')} = {format_count(shared * length)} tokens a "
                f"step, each of which {ranks // shared} or more of the {ranks:,} ranks share"
            )
    if tokens is None:
        if sequences * length <= most:
            return sequences, None
        return sequences, (
            f"one sequence for each of {ranks:,} ranks is {format_count(sequences * length)} tokens a step; "
            "large runs take up to 16M (Llama 3 405B), and more may train worse: plan fewer ranks, shorter "
            "sequences, or sharding.tensor_parallel"
        )
    if sequences * length > 2 * tokens:
        raise PlanError(
            f"{format_count(tokens)} tokens a step are too few for {count_text(ranks, 'rank')}.",
            got=f"{tokens:,} tokens, {count_text(once, 'sequence')} of {length:,} at once",
            why="every rank computes at least one microbatch of whole sequences a step",
            fix=f"--tokens-per-step {sequences * length}, shorter sequences, or fewer ranks",
        )
    if sequences * length == tokens:
        return sequences, None
    return sequences, (
        f"{tokens:,} tokens a step are {tokens / length:,.2f} sequences of {length:,}; "
        f"planned with {sequences:,} = {sequences * length:,} tokens, "
        f"which {count_text(ranks, 'rank')} can share evenly"
    )


def choose_hardware(on: str | None, *, ranks: int | None, run: Run) -> Hardware:
    """Returns the hardware named by `on` with `ranks` ranks; if `on` is None, this machine or the launcher's.

    Raises SpecError for unknown hardware, or ranks that do not fill whole nodes.
    """
    if on is None:
        own, device = choose_rank_count_and_device(LaunchRequest(run=run))
        if ranks or not is_started_by_torchrun():
            return detect_hardware(device, ranks=ranks or own)
        hardware, ranks = detect_hardware(device), int(os.environ["WORLD_SIZE"])
    else:
        hardware = hardware_on(on)
    each, ranks = hardware.ranks_per_node, ranks or hardware.world_size
    if ranks > each and ranks % each:
        raise SpecError(
            f"{ranks} ranks do not fill whole nodes.",
            got=f"{ranks} ranks, {each} a node",
            fix=f"a multiple of {each}, or at most {each}",
        )
    return hardware.with_rank_counts(nodes=max(1, ranks // each), ranks_per_node=min(ranks, each))

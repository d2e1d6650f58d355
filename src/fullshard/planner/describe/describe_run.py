"""describe_run(plan, device): the ModelSpec of the model that a run trains, from the cache if possible.

[Note: the cache]
An entry is a file in `$XDG_CACHE_HOME/fullshard/specs`; FULLSHARD_CACHE replaces XDG_CACHE_HOME. Its name is
the digest of its key. Its first line is the digest of the rest, which is the spec as JSON. An entry that does
not match its digest is ignored, and written anew.

The specs of presets are shipped with the package in `preset_specs.xz`, which `bench/preset_specs.py` writes,
as `fullshard plan NAME --on GPUS` requests them: for CUDA kernels, in bf16, at the preset's own sequence
length up to 8,192. They are valid for the versions of torch that were seen to give them, regardless of the
build (`+cpu`, `+cu130`). The file is LZMA over lines of UTF-8: these versions, then each preset's
`SpecKey.settings` and spec.
`preset_expert_specs.xz` has those of mixtures for each number of ranks that may divide their experts, and
`preset_length_specs.xz` those from which `derive_spec` finds the others, in the same format.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fullshard.errors import SpecError
from fullshard.planner.describe.sequence_lengths import derive_spec, settings_for_any_length
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.value import FrozenModel
from fullshard.system.files import open_regular_file, write_file_atomically
from fullshard.system.process import installed_version
from fullshard.system.small_files import VALUE_BYTES, read_bytes
from fullshard.system.terminal import escape_to_single_line, is_live_terminal, print_to_stderr

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fullshard.planner.describe.expert_degrees import RunRecording

SHIPPED_FILE = Path(__file__).with_name("preset_specs.xz")
SHIPPED_EXPERTS_FILE = SHIPPED_FILE.with_name("preset_expert_specs.xz")
SHIPPED_LENGTHS_FILE = SHIPPED_FILE.with_name("preset_length_specs.xz")
VARIABLE = "FULLSHARD_CACHE"
OFF = "off"
MOST_BYTES = 64 << 20
"""Limit of the size of the whole cache, in bytes. The least recently used entries are removed first."""

_DIGEST_LINE, _DIGEST_BYTES = re.compile(rb"[0-9a-f]{64}\n"), 65  # with which an entry begins
_ENTRY = re.compile(r"[0-9a-f]{32}\.json|\.[0-9a-f]{32}\.json\.tmp-[0-9a-f]+")  # or the draft of one
_OF_MIXTURES = {
    *("experts", "experts_per_token", "expert_d_ff", "shared_experts", "balance_loss", "balance_bias_rate"),
}
# Packages that change the modules that transformers builds, or that some of its models need.
_LIBRARIES = (
    *("transformers", "peft", "kernels", "timm", "flash-attn", "flash-linear-attention"),
    *("causal-conv1d", "mamba-ssm"),
)
# Heads with one label per sequence or image.
_ONE_LABEL = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


def describe_run(
    plan: Plan | Run,
    device: DeviceType,
    *,
    model: "Module | None" = None,
    attention_kernel: AttentionKernel = "flash",
    cached: bool = True,
) -> ModelSpec:
    """Returns the spec of the run's model, traced with the run's loss and batches for kernels of `device`.

    model: the run's model, if it is already built
    attention_kernel: the kernel of attention on the GPUs (`Hardware.attention_kernel`)
    cached: whether a shipped or cached spec may be returned, and a new one is cached

    torch is imported only if the model is traced. Raises the errors of building and describing the model.
    """
    settings = (plan, *_find_runs_with_superset_traces(plan, device)) if cached else ()
    keys = [build_spec_key(one, device, attention_kernel=attention_kernel) for one in settings] or [None]
    for key in keys:
        if (spec := read_shipped_or_cached_spec(key)) is not None:
            return spec
    spec = _build_and_trace_model(plan, device, model=model, attention_kernel=attention_kernel, key=keys[0])
    write_cached_spec(keys[0], spec)
    return spec


def _find_runs_with_superset_traces(plan: Plan | Run, device: DeviceType) -> list[Run]:
    """Returns the run with `compile` auto if its spec has more traces than that of `plan`; else nothing."""
    if isinstance(plan, Plan):
        return []
    both = plan.model_copy(update={"run": plan.run.model_copy(update={"compile": "auto"})})
    own, more = set(plan.compile_choices(device)), set(both.compile_choices(device))
    return [both] if own < more else []


@lru_cache(maxsize=1)  # a search asks for all numbers of ranks of one run
def _recordings_by_expert_degree(_settings: str) -> "dict[int, RunRecording]":
    """Returns this process's recordings of the run that has these settings beside `experts`."""
    return {}  # callers add to it


def _build_and_trace_model(
    plan: Plan | Run,
    device: DeviceType,
    *,
    model: "Module | None",
    attention_kernel: AttentionKernel,
    key: "SpecKey | None",
) -> ModelSpec:
    """Returns the spec of the run's model, which is traced or, with a key, may be derived from traces."""
    from fullshard.models.build import build_model, check_sequence_length
    from fullshard.models.loss import choose_loss
    from fullshard.planner.describe.describe import build_recorder, build_spec, record_all_settings
    from fullshard.planner.describe.expert_degrees import derive_recording

    run = plan.run if isinstance(plan, Plan) else plan
    model = model or build_model(run)
    check_sequence_length(model, run)
    batch = make_batch_unless_default(plan, model)
    recorder = build_recorder(model, plan, loss=choose_loss(run, model), batch=batch, device_type=device)
    degree, known = recorder.plan.expert_parallel, dict[int, "RunRecording"]()
    if key is not None and degree > 1 and not run.adapter.packed_format:
        known = _recordings_by_expert_degree(json.dumps(json.loads(key.settings) | {"experts": None}))
    found = known.get(degree) or derive_recording(known, degree)
    if found is None:
        if is_live_terminal(sys.stderr) and os.environ.get("RANK", "0") == "0":
            print_to_stderr(f"planning: tracing {_what_is_traced(model, recorder.plan)} without weights …")
        found = known[degree] = record_all_settings(recorder, plan, attention_kernel=attention_kernel)
    return build_spec(recorder, found)


def _what_is_traced(model: "Module", plan: Plan) -> str:
    axes = ("context_parallel", "tensor_parallel", "expert_parallel")
    shared = [f"{axis} = {getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1]
    name = escape_to_single_line(type(model).__name__)
    return f"{name} with {', '.join(shared)}," if shared else name


def make_batch_unless_default(plan: Plan | Run, model: "Module") -> Any:
    """Returns a microbatch for `describe`; None stands for its default batch of tokens and labels.

    For data from Python, this is the first microbatch of step 0, because only the user knows its shapes. None
    also if a model of transformers has unknown inputs.
    """
    import torch

    from fullshard.data.build import build_data
    from fullshard.models.loss import choose_loss, model_computed_loss

    run = plan.run if isinstance(plan, Plan) else plan
    rows = plan.microbatch if isinstance(plan, Plan) else run.train.microbatch or 1
    if run.data.source == "python":
        alone = run.with_settings({"train": {"microbatch": rows, "global_batch": rows}})
        own = Plan.from_run(alone, world_size=run.sharding.ranks_per_sequence)
        return next(iter(build_data(run).microbatches(0, rank=0, plan=own.for_data)))
    if choose_loss(run, model) is model_computed_loss:
        return _example_meta_batch(model, run, rows=rows)
    if not run.data.document_mask:
        return None
    keys, shape = ("tokens", "labels", "positions", "documents"), (rows, run.data.sequence_length)
    batch = {key: torch.empty(shape, dtype=torch.int64, device="meta") for key in keys}
    # One document in each row: the most that attention within documents can compute.
    return batch | {"document_ends": torch.empty((rows, 1), dtype=torch.int32, device="meta")}


def _example_meta_batch(model: "Module", run: Run, *, rows: int) -> "dict[str, Tensor] | None":
    """Returns a batch of `rows` samples on the meta device, for `model(**batch)`; None if inputs are unknown.

    Token ids: `data.sequence_length` tokens. Images: the config's size.
    """
    import inspect  # slow to import

    import torch

    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    if not hasattr(config, "model_type"):
        return None
    batch: dict[str, Tensor] = {}
    if "pixel_values" in takes:
        shape = _find_image_shape(config)
        if shape is None:
            return None
        batch["pixel_values"] = torch.empty((rows, *shape), device="meta")
    if "input_ids" in takes:
        shape = (rows, run.data.sequence_length)
        for name in {"input_ids", "decoder_input_ids"} & takes.keys():
            batch[name] = torch.empty(shape, dtype=torch.int64, device="meta")
    if not batch:
        return None
    if "labels" in takes:
        single = type(model).__name__.endswith(_ONE_LABEL) or "input_ids" not in batch
        shape = (rows,) if single else tuple(batch["input_ids"].shape)
        batch["labels"] = torch.empty(shape, dtype=torch.int64, device="meta")
    return batch


def _find_image_shape(config: Any) -> tuple[int, int, int] | None:
    """Returns (channels, height, width) of the model's images; None if unknown."""
    part = getattr(config, "vision_config", config)
    size, channels = getattr(part, "image_size", None), getattr(part, "num_channels", 3)
    if isinstance(size, int):
        return channels, size, size
    return (channels, *size) if isinstance(size, (list, tuple)) and len(size) == 2 else None


class SpecKey(FrozenModel):
    """Everything that a ModelSpec depends on.

    settings: settings of the run or plan that `describe` and the building of the model read, as JSON
    torch: version of torch
    made_by: versions of other packages, a digest of fullshard's sources, and the kind of processor
    """

    settings: str
    torch: str
    made_by: dict[str, str]

    @property
    def file_name(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32] + ".json"


def build_spec_key(
    plan: Plan | Run, device: DeviceType, *, attention_kernel: AttentionKernel = "flash"
) -> SpecKey | None:
    """Returns the cache key of the spec of the model of `plan` with the kernels of `device`.

    attention_kernel: as for `describe`. Only masked attention leaves another trace, so it is in the key only
        of models that may mask: those of transformers.

    The key is None if the model, data or loss is other code than this package and transformers, because such
    code can change undetected, or without torch. Raises SpecError if the model's config.json cannot be read.
    """
    run = plan.run if isinstance(plan, Plan) else plan
    outside = run.train.loss is not None or run.data.source == "python"
    torch = installed_version("torch")
    if outside or torch is None or not isinstance(run.model, DecoderConfig | HuggingFaceModel):
        return None
    made_by = {
        "fullshard": installed_version("fullshard") or "",
        "sources": _digest_of_own_sources(),
        "machine": platform.machine(),
    }
    if isinstance(run.model, HuggingFaceModel) or run.adapter.rank:
        if isinstance(run.model, HuggingFaceModel) and run.model.trust_remote_code:
            return None
        made_by |= {name: installed_version(name) or "" for name in _LIBRARIES}
    settings = {
        "device": device,
        "model": _model_key(run.model),
        "adapter": run.adapter.model_dump(mode="json"),
        "data": run.data.model_dump(mode="json", include={"sequence_length", "document_mask"}),
        "microbatch": run.train.microbatch,
        "loss_chunk": run.train.loss_chunk,
        "units": run.sharding.units.model_dump(mode="json"),
        "precision": run.precision.model_dump(mode="json"),
        "recompute": run.recompute.model_dump(mode="json"),
        "compiled": run.compile_choices(device),
    }
    sharding = run.sharding
    if (ranks := sharding.context_degree) > 1:
        settings["context"] = ranks
    if (ranks := sharding.tensor_degree) > 1:
        settings["tensor"] = {"ranks": ranks, "styles": sharding.tensor_parallel_styles}
    if (experts := sharding.expert_parallel) not in (1, "auto"):
        settings["experts"] = experts
    if device == "cuda" and isinstance(run.model, HuggingFaceModel):
        settings["attention_kernel"] = attention_kernel
    if isinstance(plan, Plan):
        settings["plan"] = plan.model_dump(mode="json", exclude={"run", "prediction"})
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return SpecKey(settings=text, torch=torch, made_by=made_by)


def read_shipped_or_cached_spec(
    key: SpecKey | None, environment: Mapping[str, str] = os.environ
) -> ModelSpec | None:
    """Returns the shipped or cached spec of `key`; None if neither exists or the cache is off."""
    if key is None or environment.get(VARIABLE) == OFF:
        return None
    spec = _read_or_derive_shipped_spec(key)
    return _read_cached_spec(key, environment) if spec is None else spec


def _read_or_derive_shipped_spec(key: SpecKey) -> ModelSpec | None:
    torch, settings = version_without_build(key.torch), json.loads(key.settings)
    for file in (SHIPPED_FILE, *([SHIPPED_EXPERTS_FILE] if "experts" in settings else [])):
        if (text := read_shipped_specs(file, torch=torch).get(key.settings)) is not None:
            return ModelSpec.model_validate_json(text)
    of_lengths = read_shipped_specs(SHIPPED_LENGTHS_FILE, torch=torch)
    text = of_lengths.get(settings_for_any_length(settings))
    return None if text is None else derive_spec(text, settings)


def _read_cached_spec(key: SpecKey, environment: Mapping[str, str]) -> ModelSpec | None:
    directory = cache_directory(environment)
    if directory is None:
        return None
    path = directory / key.file_name
    try:
        first, _, text = read_bytes(path, most_bytes=VALUE_BYTES).partition(b"\n")
        if first != hashlib.sha256(text).hexdigest().encode():
            return None
        spec = ModelSpec.model_validate_json(text)
    except (OSError, ValidationError):
        return None
    with suppress(OSError):
        os.utime(path)  # the least recently used entries are removed first
    return spec


def write_cached_spec(
    key: SpecKey | None, spec: ModelSpec, *, environment: Mapping[str, str] = os.environ
) -> None:
    """Writes `spec` into the cache atomically, and removes old entries (`trim_cache`).

    Does nothing if `key` is None, the cache is off or not writable, or `spec` is too large to be read back.
    """
    directory = cache_directory(environment)
    if key is None or directory is None:
        return
    text = spec.model_dump_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(digest) + len(text) >= VALUE_BYTES:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        write_file_atomically(directory / key.file_name, f"{digest}\n{text}")
        trim_cache(directory)


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the directory of the cache's entries, or None if the cache is off or has no valid path."""
    named = environment.get(VARIABLE, "")
    if named == OFF:
        return None
    root = environment.get("XDG_CACHE_HOME", "")
    base = named or (root if os.path.isabs(root) else "~/.cache")
    path = Path(os.path.expanduser(base), "fullshard", "specs")
    return path if path.is_absolute() else None


def trim_cache(directory: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Removes the least recently used entries, and drafts of them, beyond `most_bytes` in all.

    Leaves files that only have the name of an entry.
    """
    room = most_bytes
    found = [(path.lstat(), path) for path in directory.iterdir() if _ENTRY.fullmatch(path.name)]
    for status, path in sorted(found, key=lambda one: -one[0].st_mtime):
        room -= status.st_size
        if room < 0 and _begins_with_digest(path):
            path.unlink(missing_ok=True)


def _begins_with_digest(path: Path) -> bool:
    with suppress(OSError), open(path, "rb", opener=open_regular_file) as file:
        return _DIGEST_LINE.fullmatch(file.read(_DIGEST_BYTES)) is not None
    return False


def _model_key(section: DecoderConfig | HuggingFaceModel) -> dict[str, Any]:
    """Returns the model's part of a key: its sizes, or a digest of its config.json and the options."""
    if isinstance(section, DecoderConfig):  # settings of mixtures leave the keys of dense models as they are
        sizes = section.model_dump(mode="json")
        return sizes if section.is_mixture else {k: v for k, v in sizes.items() if k not in _OF_MIXTURES}
    path = locate_config_file(section.hf)
    try:
        config = read_bytes(path, most_bytes=VALUE_BYTES)
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror) from error
    chosen = section.model_dump(mode="json", include={"architecture", "attention", "options"})
    return {"config": hashlib.sha256(config).hexdigest(), **chosen}


@cache
def _digest_of_own_sources() -> str:
    """Returns a digest of fullshard's sources, which change without the version during development."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(files("fullshard"))).rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def read_shipped_specs(path: Path, *, torch: str) -> Mapping[str, str]:
    """Reads shipped specs, as JSON by `SpecKey.settings`; none if they are for other versions of torch."""
    try:
        import lzma  # Python may be built without it

        data = read_bytes(path, most_bytes=VALUE_BYTES)
    except (ImportError, OSError):
        return {}
    versions, *lines = lzma.decompress(data).decode().splitlines()
    return dict(zip(lines[::2], lines[1::2], strict=True)) if torch in versions.split() else {}


def version_without_build(version: str) -> str:
    """Returns the version without its build: `2.13.0` for `2.13.0+cpu`."""
    return version.partition("+")[0]

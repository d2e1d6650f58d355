"""describe_run(plan, device): the ModelSpec of the model that a run trains, from the cache if possible."""

import os
import sys
from typing import TYPE_CHECKING, Any

from fullshard.planner.describe.spec_cache import build_spec_key, read_cached_spec, write_cached_spec
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run
from fullshard.system.terminal import escape_to_single_line, is_live_terminal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

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

    torch is imported only if the spec is neither shipped nor cached. Raises the errors of building the model.
    """
    if not cached:
        return _trace(plan, device, model=model, attention_kernel=attention_kernel)
    settings = (plan, *_settings_with_more_traces(plan, device))
    keys = [build_spec_key(one, device, attention_kernel=attention_kernel) for one in settings]
    for key in keys:
        if (spec := read_cached_spec(key)) is not None:
            return spec
    spec = _trace(plan, device, model=model, attention_kernel=attention_kernel)
    write_cached_spec(keys[0], spec)
    return spec


def _settings_with_more_traces(plan: Plan | Run, device: DeviceType) -> list[Run]:
    """Returns settings whose spec has the traces of `plan`, eager or compiled, and others besides."""
    if isinstance(plan, Plan):
        return []
    both = plan.model_copy(update={"run": plan.run.model_copy(update={"compile": "auto"})})
    own, more = set(plan.compile_choices(device)), set(both.compile_choices(device))
    return [both] if own < more else []


def _trace(
    plan: Plan | Run, device: DeviceType, *, model: "Module | None", attention_kernel: AttentionKernel
) -> ModelSpec:
    from fullshard.models.build import build_model
    from fullshard.models.loss import choose_loss
    from fullshard.planner.describe.describe import describe

    run = plan.run if isinstance(plan, Plan) else plan
    model = model or build_model(run)
    _print_that_it_traces(model)
    return describe(
        model,
        plan,
        loss=choose_loss(run, model),
        batch=_example_batch(plan, model),
        device_type=device,
        attention_kernel=attention_kernel,
    )


def _print_that_it_traces(model: "Module") -> None:
    """Prints one line on a terminal: a large model on a busy machine takes minutes."""
    if is_live_terminal(sys.stderr) and os.environ.get("RANK", "0") == "0":
        name = escape_to_single_line(type(model).__name__)
        print(f"planning: tracing {name} without its weights …", file=sys.stderr, flush=True)


def _example_batch(plan: Plan | Run, model: "Module") -> Any:
    """Returns a microbatch for `describe`, or None if its default batch of tokens and labels will do.

    For data from Python, this is the first microbatch of step 0, because only the user knows its shapes.
    """
    import torch

    from fullshard.data.build import build_data
    from fullshard.models.loss import choose_loss, model_computed_loss

    run = plan.run if isinstance(plan, Plan) else plan
    rows = plan.microbatch if isinstance(plan, Plan) else run.train.microbatch or 1
    if run.data.source == "python":
        alone = run.train.model_copy(update={"microbatch": rows, "global_batch": rows})
        ranks = run.sharding.ranks_per_sequence
        own = Plan.from_run_for_prediction(run.model_copy(update={"train": alone}), world_size=ranks)
        return next(iter(build_data(run).microbatches(0, rank=0, plan=own)))
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

    Token ids: `data.sequence_length` tokens, at most the model's positions. Images: the config's size.
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
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        length = min(run.data.sequence_length, longest or run.data.sequence_length)
        batch["input_ids"] = torch.empty((rows, length), dtype=torch.int64, device="meta")
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

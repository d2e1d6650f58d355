"""ModelTrial: a small copy of a run's model with its loss and batches, on the CPU."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard.data.build import build_data, tokenizer_vocabulary_size
from fullshard.distributed.agreement import ErrorCapture
from fullshard.errors import ShardError
from fullshard.models.build import build_model, count_vocabulary_rows
from fullshard.models.huggingface import build_hf_config
from fullshard.models.loss import Loss, choose_loss
from fullshard.parallel.materialize import materialize
from fullshard.quantities import format_count
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel

_ROWS, _LENGTH = 4, 32
# A larger copy would take a minute on two cores.
_MOST_PARAMETERS = 150_000_000

Batches = Callable[[int], Any]


@dataclass(frozen=True)
class ModelTrial:
    """A model that checks can compute with, and what the run trains it on.

    build: returns a new copy on the CPU, with the same initial values each time
    loss: `loss(model, batch)`
    batches: returns the microbatch with a number; the same one each time
    plan: the plan of the run, whose precision and units apply to the model itself
    run: the run, with the smaller model
    description: the size of the copy, for messages
    """

    build: Callable[[], nn.Module]
    loss: Loss
    batches: Batches
    plan: Plan
    run: Run
    description: str

    @property
    def is_from_transformers(self) -> bool:
        return isinstance(self.run.model, HuggingFaceModel)

    def token_batch(self) -> dict[str, Tensor] | None:
        """Returns a batch of `tokens` and `labels` (rows, sequence); None for other kinds of batches."""
        batch = self.batches(0)
        if not isinstance(batch, Mapping) or not {"tokens", "labels"} <= set(batch):
            return None
        tokens, labels = batch["tokens"], batch["labels"]
        is_pair = isinstance(tokens, Tensor) and isinstance(labels, Tensor) and tokens.shape == labels.shape
        return dict(cast(Mapping[str, Tensor], batch)) if is_pair and tokens.ndim == 2 else None

    def labelled_rows(self) -> dict[str, Tensor] | None:
        """Returns a batch of two or more rows with integer labels, -100 for none; None for other batches."""
        batch = self.batches(0)
        if not isinstance(batch, Mapping) or not all(isinstance(one, Tensor) for one in batch.values()):
            return None
        found = dict(cast(Mapping[str, Tensor], batch))
        labels = found.get("labels")
        if labels is None or labels.is_floating_point() or labels.ndim == 0 or len(labels) < 2:
            return None
        rows = len(labels)
        return found if all(one.ndim and len(one) == rows for one in found.values()) else None

    def mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        result = self.loss(model, batch)
        return result[0] / result[1] if isinstance(result, tuple) else result

    def reason_masked_labels_matter(self, model: nn.Module) -> str | None:
        """Returns why the loss of some labels also depends on others that are -100; None if it does not."""
        config: Any = getattr(model, "config", None)
        if getattr(config, "output_router_logits", False):
            return "the router's balance loss depends on all tokens at once"
        if self.is_from_transformers and type(model).__name__.endswith("ForCTC"):
            return "CTC counts rows without labels, and divides each by its own length"
        return None


def build_model_trial(plan: Plan) -> ModelTrial | Finding:
    """Returns a trial of the plan's model, or the finding that says why it cannot be tried."""
    run, attempt = plan.run, ErrorCapture()
    whole = build_model(run)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    for smaller, text in iterate_smaller_runs(run, parameter_count=parameters):
        attempt = ErrorCapture()
        with attempt:
            size = sum(parameter.numel() for parameter in build_model(smaller).parameters())
            if size > _MOST_PARAMETERS:
                continue
            trial = ModelTrial(
                build=partial(_build_on_cpu, smaller),
                loss=choose_loss(smaller, whole),
                batches=_choose_batches(smaller),
                plan=plan,
                run=smaller,
                description=f"{text}, {format_count(size)} parameters",
            )
            model = trial.build()
            if left := names_of_meta_tensors(model):
                return Finding.failure(
                    f"no values: {', '.join(left[:3])}",
                    why="parameters are built on the meta device, and only parameters and buffers get "
                    "values later",
                    fix="self.register_buffer(name, tensor, persistent=False)",
                    check="initial_values",
                )
            trial.mean_loss(model, trial.batches(0)).backward()
            return trial
    if attempt.error is not None:
        return _failed_trial_finding(attempt.error)
    fix = "model.options that make it smaller" if hasattr(run.model, "options") else "a smaller model"
    return Finding.skipped(
        f"no copy of it is small enough to compute with here ({format_count(parameters)} parameters); "
        f"{fix}, given to this command by --set"
    )


def names_of_meta_tensors(model: nn.Module) -> list[str]:
    """Returns the names of tensors on the meta device: parameters, buffers, and attributes of modules."""
    left: list[str] = []
    for name, module in model.named_modules():
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        held += [(key, one) for key, one in vars(module).items() if isinstance(one, Tensor)]
        left += [f"{name}.{key}".lstrip(".") for key, one in held if one.is_meta]
    return left


def _failed_trial_finding(error: BaseException) -> Finding:
    if isinstance(error, ShardError):
        return Finding.from_error(error, check="initial_values")
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return Finding.failure(
        f"its loss of one microbatch raises {type(error).__name__}: {text}",
        why=getattr(error, "why", None) or "training would end in its first step",
        fix=getattr(error, "fix", None) or "FULLSHARD_TRACEBACK=1 fullshard train shows where",
    )


def _build_on_cpu(run: Run) -> nn.Module:
    return materialize(build_model(run), seed=run.run.seed)


def _choose_batches(run: Run) -> Batches:
    """Returns the first microbatches of data from Python, else random tokens of the model's vocabulary."""
    if run.data.source == "python":
        data = build_data(run)
        plan = Plan.from_run(make_eager_fp32_cpu_run(run, rows=_ROWS, microbatch=_ROWS), world_size=1)
        return lambda number: next(iter(data.microbatches(number, rank=0, plan=plan)))
    vocabulary = count_vocabulary_rows(None, run) or tokenizer_vocabulary_size(run.data) or 256
    return partial(random_token_batch, run, vocabulary=vocabulary)


def random_token_batch(run: Run, number: int, *, vocabulary: int) -> dict[str, Tensor]:
    """Returns a batch of random tokens with the keys that the run's data has: one document in each row."""
    length = min(run.data.sequence_length, _LENGTH)
    random = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, vocabulary, (_ROWS, length + 1), generator=random)
    batch = {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}
    if run.data.document_mask:
        batch["documents"] = torch.zeros_like(batch["tokens"])
        batch["positions"] = torch.arange(length).expand(_ROWS, length).contiguous()
        batch["document_ends"] = torch.full((_ROWS, 1), length, dtype=torch.int32)
    return batch


def make_eager_fp32_cpu_run(run: Run, *, rows: int, microbatch: int) -> Run:
    """Returns `run` with these batches, in eager fp32 on the CPU, without what some rank counts forbid."""
    return run.with_settings({"sharding": {"shard_degree": None}}).with_overrides(
        [
            f"train.global_batch={rows}",
            f"train.microbatch={microbatch}",
            "sharding.strategy=full_shard",
            "sharding.tensor_parallel=1",
            "sharding.context_parallel=1",
            "sharding.expert_parallel=1",
            "offload.tier=none",
            "recompute.mode=none",
            "precision.mode=fp32",
            "run.compile=false",
            "run.device=cpu",
        ]
    )


# A model up to this size is checked itself.
SMALL_PARAMETERS = 20_000_000
_LAYERS, _MOST_HEADS, _HEAD_DIM, _WIDTH = 2, 4, 16, 64
_LAYER_NAMES = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


def iterate_smaller_runs(run: Run, *, parameter_count: int) -> Iterator[tuple[Run, str]]:
    """Yields (run, description) of copies of the run's model to try, the best one first.

    parameter_count: number of parameters of the run's model

    The last is always the model itself. A copy that a family does not allow cannot be built, or cannot run.
    """
    if parameter_count > SMALL_PARAMETERS:
        if isinstance(run.model, DecoderConfig):
            yield _smaller_decoder(run, run.model)
        elif isinstance(run.model, HuggingFaceModel):
            yield from _smaller_hf_models(run, run.model)
    yield run, "the model itself"


def _smaller_decoder(run: Run, config: DecoderConfig) -> tuple[Run, str]:
    heads = min(config.heads, _MOST_HEADS)
    kv_heads = heads if config.kv_heads == config.heads else max(1, heads // 2)
    sizes = {
        "layers": min(config.layers, _LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "d_model": heads * _HEAD_DIM,
        "d_ff": 2 * _WIDTH,
    }
    text = f"a copy with {sizes['layers']} of {config.layers} layers, {sizes['d_model']} wide"
    return run.model_copy(update={"model": config.model_copy(update=sizes)}), text


def _smaller_hf_models(run: Run, section: HuggingFaceModel) -> Iterator[tuple[Run, str]]:
    config = build_hf_config(section)
    for narrow in (True, False):
        options = _smaller_options(config, narrow=narrow)
        merged = {**section.options, **options}
        smaller = section.model_copy(update={"options": merged, "weights": "none"})
        width = f", {_WIDTH} wide" if narrow else ""
        yield run.model_copy(update={"model": smaller}), f"a copy with few layers{width}"


def _smaller_options(config: Any, *, narrow: bool) -> dict[str, Any]:
    """Returns options that make a transformers config, and the configs of its parts, smaller."""
    options: dict[str, Any] = {}
    for name in _LAYER_NAMES:
        _add_lowered_sizes(options, config, sizes={name: 4 if hasattr(config, "layer_types") else _LAYERS})
    if narrow:
        options |= _narrow_options(config)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and (inner := _smaller_options(part, narrow=narrow)):
            options[name] = inner
    return options


def _narrow_options(config: Any) -> dict[str, Any]:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not isinstance(getattr(config, "hidden_size", None), int):
        return {}
    kv = getattr(config, "num_key_value_heads", None)
    options: dict[str, Any] = {}
    shared = isinstance(kv, int) and kv < heads
    sizes = {"hidden_size": _WIDTH, "num_attention_heads": _MOST_HEADS, "head_dim": _HEAD_DIM}
    sizes |= {"num_key_value_heads": 2 if shared else _MOST_HEADS, "intermediate_size": 2 * _WIDTH}
    sizes |= {"moe_intermediate_size": _WIDTH, "num_experts_per_tok": 2, **dict.fromkeys(_EXPERT_NAMES, 8)}
    _add_lowered_sizes(options, config, sizes=sizes)
    return options


def _add_lowered_sizes(options: dict[str, Any], config: Any, *, sizes: Mapping[str, int]) -> None:
    """Adds to `options` each size of the config that is larger than in `sizes`."""
    for name, size in sizes.items():
        own = getattr(config, name, None)
        if isinstance(own, int) and not isinstance(own, bool) and own > size:
            options[name] = size

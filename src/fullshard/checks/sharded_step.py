"""Steps of a small copy of a run's model, sharded over the ranks and unsharded, to compare their numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checks.model_trial import ModelTrial, build_model_trial, plain_run
from fullshard.checks.ranks import ShardedComparison
from fullshard.distributed.agreement import ErrorCapture, all_gather_object, rank
from fullshard.errors import FullshardError
from fullshard.models.build import build_model
from fullshard.spec.finding import Finding
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.torch_private.tensors import tree_leaves
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.random_state import seed_generators
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

_STEPS, _RATE = 2, 0.1
_SGD = (
    "optimizer.name=sgd",
    f"optimizer.learning_rate={_RATE}",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.clip_norm=0",
    "optimizer.options={}",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
    f"train.steps={_STEPS}",
    "fault_tolerance.on_spike=none",
)


class StepError(Exception):
    """Raised on all ranks if a sharded step of a model that works unsharded raises on any."""


def compare_sharded_steps(run: Run, *, world_size: int, rank: int) -> ShardedComparison | str:
    """Trains a small copy of the model by SGD in fp32, sharded and unsharded. Collective.

    Returns the losses and the differences of parameters, or the reason why they cannot be compared. Raises
    StepError.
    """
    trial = _build_trial(run, world_size=world_size)
    if isinstance(trial, str):
        return trial
    _run_random_steps(trial, world_size=world_size, rank=rank)
    if not _is_deterministic(trial):
        return "its loss is random in evaluation mode too, or depends on the call"
    own, attempt = _plan_of_steps(trial, world_size=world_size, settings=_SGD), ErrorCapture()
    found: ShardedComparison | None = None
    with attempt:
        batches = [
            [trial.batches(step * world_size + r) for r in range(world_size)] for step in range(_STEPS)
        ]
        plain = _without_dropout(trial.build())
        expected = list(_iterate_unsharded_losses(trial, plain, batches=batches))
        model = shard(_without_dropout(build_model(trial.run)), own)
        state = TrainState(model, build_optimizer(model, own), data=[step[rank] for step in batches])
        losses = tuple(step.loss for step in train(state, own, loss=trial.loss))
        found = ShardedComparison(
            losses_sharded=losses, losses_unsharded=tuple(expected), errors=_parameter_errors(model, plain)
        )
    _raise_on_all_ranks(attempt)
    assert found is not None, "no rank raised"
    return found


def _run_random_steps(trial: ModelTrial, *, world_size: int, rank: int) -> None:
    """Trains the model on different rows on each rank, with its dropout and layer drop. Collective.

    Raises StepError, for example if ranks run different modules.
    """
    steps, attempt = 4, ErrorCapture()
    with attempt:
        own = _plan_of_steps(trial, world_size=world_size, settings=(*_SGD, f"train.steps={steps}"))
        seed_generators(own)
        model = shard(build_model(trial.run), own)
        data = [trial.batches(step * world_size + rank) for step in range(steps)]
        for _ in train(TrainState(model, build_optimizer(model, own), data=data), own, loss=trial.loss):
            pass
    _raise_on_all_ranks(attempt)


def _raise_on_all_ranks(attempt: ErrorCapture) -> None:
    """Raises StepError on all ranks if there was an error on any. Collective."""
    text = next((text for text in all_gather_object(_error_text(attempt)) if text is not None), None)
    if text is not None:
        raise StepError(text)


def optimizer_state_dtypes(run: Run, *, world_size: int) -> dict[str, str] | str:
    """Returns the dtypes of the run's optimizer's state after a step. Collective."""
    if run.offload.offloads_optimizer or run.precision.mode == "bf16_pure":
        return "the state is offloaded, or in bf16 on purpose"
    if run.optimizer.name.lower() == "adamw8bit":
        return "adamw8bit keeps its state in 8 bits on purpose"
    trial = _build_trial(run, world_size=world_size)
    if isinstance(trial, str):
        return trial
    attempt, found = ErrorCapture(), dict[str, str]()
    with attempt:
        own = _plan_of_steps(trial, world_size=world_size, settings=("train.steps=1",))
        model = shard(build_model(trial.run), own)
        optimizer = build_optimizer(model, own)
        for _ in train(TrainState(model, optimizer, data=[trial.batches(rank())]), own, loss=trial.loss):
            pass
        for parameter in model.parameters():
            for name, value in cast(dict[str, Any], optimizer.state.get(parameter, {})).items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.is_floating_point():
                    found[name] = str(value.dtype).removeprefix("torch.")
    texts = [text for text in all_gather_object(_error_text(attempt)) if text is not None]
    return f"the step raises {texts[0]}" if texts else found


def _build_trial(run: Run, *, world_size: int) -> ModelTrial | str:
    if world_size == 1:
        return "a single rank shards nothing"
    plan = Plan.from_run(plain_run(run, rows=world_size, microbatch=1), world_size=world_size)
    trial = build_model_trial(plan)
    texts = all_gather_object(trial.got if isinstance(trial, Finding) else None)
    failed = next((text for text in texts if text is not None), None)
    return trial if isinstance(trial, ModelTrial) and failed is None else failed or "there is no trial"


def _plan_of_steps(trial: ModelTrial, *, world_size: int, settings: Sequence[str]) -> Plan:
    tensors = [one for one in tree_leaves(trial.batches(0)) if isinstance(one, Tensor) and one.ndim]
    rows = len(tensors[0]) if tensors else 1
    run = plain_run(trial.run, rows=rows * world_size, microbatch=rows)
    lengths = [one.shape[1] for one in tensors if one.ndim == 2 and not one.is_floating_point()]
    length = [f"data.sequence_length={lengths[0]}"] if lengths else []
    return Plan.from_run(run.with_overrides([*length, *settings]), world_size=world_size)


def _iterate_unsharded_losses(
    trial: ModelTrial, model: nn.Module, *, batches: Sequence[Sequence[Any]]
) -> Iterator[float]:
    """Yields the loss of each step of all ranks' batches, by torch alone."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=_RATE)
    for step in batches:
        results = [trial.loss(model, batch) for batch in step]
        pairs = [one if isinstance(one, tuple) else (one, 1) for one in results]
        mean = sum(value for value, _ in pairs) / sum(int(count) for _, count in pairs)
        assert isinstance(mean, Tensor), "there is a batch for each rank"
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(mean.detach())


def _parameter_errors(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Returns the difference of each parameter relative to its norm, or to 1e-2 if that is larger."""
    errors: dict[str, float] = {}
    sharded = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        own = sharded[name].detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        reference = parameter.detach()
        errors[name] = float((whole.cpu() - reference).norm() / reference.norm().clamp(min=1e-2))
    return errors


def _without_dropout(model: nn.Module) -> nn.Module:
    """Keeps `model` in evaluation mode, so that its dropout does not differ between the two runs."""
    model.eval()
    vars(model)["train"] = lambda mode=True: model  # pyright: ignore[reportUnknownLambdaType]
    return model


def _is_deterministic(trial: ModelTrial) -> bool:
    model, batch = _without_dropout(trial.build()), trial.batches(0)
    with torch.no_grad():
        first, second = (float(trial.mean_loss(model, batch)) for _ in range(2))
    return all(all_gather_object(first == second))


def _error_text(attempt: ErrorCapture) -> str | None:
    error = attempt.error
    if error is None:
        return None
    if isinstance(error, FullshardError):
        text = error.what if error.got is None else f"{error.what} {error.got}"
    else:
        text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:300]}"

"""Checks of a model: its loss and gradients, by `loss(model, batch)` alone, and its parameters."""

import math

import torch
from torch import Tensor, nn

from fullshard.jobs.checks.model_trial import ModelTrial
from fullshard.models.loss import next_token_loss
from fullshard.quantities import join_names
from fullshard.spec.records.finding import Finding
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.torch_private.tensors import BatchNorm

# Bounds on the first loss as a multiple of ln(vocabulary), for labels drawn at random. Logits of standard
# deviation s add s² / 2 nats to ln V, so that a spread of 1 is 1.09 for V = 256. Below the least, the model
# knows labels that nobody can know.
_LEAST_FIRST_LOSS, _MOST_FIRST_LOSS = 0.9, 1.15
# In fp32, sums in another order differ by 1e-6 of the loss at most here.
_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = 1e-3
_NOISE = 0.02  # added to parameters, so that a zero that was initialised does not hide what follows it
_UNUSED_SHARE = 0.5
_BATCHES = 3
_NO_TOKENS = "its batches are not tokens with labels"
_CONSTANT_SHARE = 0.5
_LARGEST_VALUE = 100.0


def check_first_loss(trial: ModelTrial) -> Finding:
    """Compares the loss of new parameters on random tokens with ln(vocabulary)."""
    model = trial.build()
    with torch.no_grad():
        loss = sum(float(trial.mean_loss(model, trial.batches(n))) for n in range(_BATCHES)) / _BATCHES
    if not math.isfinite(loss):
        return Finding.failure(
            f"the first loss is {loss}",
            why="every step would be skipped",
            fix="smaller initial values, or a look at divisions and logarithms in forward",
        )
    batch = trial.token_batch()
    if batch is None or getattr(trial.loss, "func", trial.loss) is not next_token_loss:
        return Finding.ok(
            f"first loss {loss:.3f} of {trial.description}; nothing is known to compare it with"
        )
    with torch.no_grad():
        output = model(batch["tokens"])
    width = getattr(output, "logits", output).shape[-1]
    ratio = loss / math.log(width)
    text = f"first loss {loss:.3f}, {ratio:.2f} of ln {width:,}"
    if ratio < _LEAST_FIRST_LOSS:
        return Finding.failure(
            text,
            why="random labels cannot be predicted: the model sees them, or the loss leaves something out",
            fix="labels shifted by one token, and attention that is causal",
        )
    if ratio > _MOST_FIRST_LOSS:
        return Finding.warning(
            text,
            why="a new model that knows nothing has 1.00; larger initial logits cost hundreds of steps",
            fix="a smaller standard deviation of the head and embedding, such as 0.02; tied ones share it",
        )
    return Finding.ok(f"{text}, of {trial.description}")


def check_sees_future(trial: ModelTrial) -> Finding:
    """Changes the tokens behind a position: the loss at that position must not change."""
    batch, model = trial.token_batch(), trial.build().eval()
    if batch is None or batch["tokens"].shape[1] < 4 or len(batch["tokens"]) < 2:
        return Finding.skipped(_NO_TOKENS)
    if (reason := trial.reason_masked_labels_matter(model)) is not None:
        return Finding.skipped(reason)
    place = batch["tokens"].shape[1] // 2
    labels = torch.full_like(batch["labels"], IGNORED_LABEL)
    labels[:, place] = batch["labels"][:, place].clamp(min=0)
    changed = batch["tokens"].clone()
    changed[:, place + 1 :] = changed.roll(1, 0)[:, place + 1 :].flip(1)
    if not _loss_leaves_out_masked_labels(trial, model, batch={**batch, "labels": labels}):
        return Finding.skipped("the loss counts labels of -100")
    moved = _relative_loss_change(
        trial, model, batches=[{**batch, "labels": labels}, {**batch, "tokens": changed, "labels": labels}]
    )
    if moved > _TOLERANCE:
        return Finding.failure(
            f"the loss of token {place} changes by {moved:.1e} of itself when later tokens change",
            why="the model reads what it should predict: the loss falls, and it cannot generate",
            fix="a causal mask in every layer, and no shift of tokens that undoes it",
        )
    return Finding.ok(f"later tokens change the loss by {moved:.0e} of itself")


def check_row_independence(trial: ModelTrial) -> Finding:
    """Changes all rows of a batch except the first: the loss of the first must not change."""
    batch, model = trial.labelled_rows(), trial.build().train()
    if batch is None or len(batch["labels"]) < 3:
        return Finding.skipped("its batches are not rows with integer labels")
    if (reason := trial.reason_masked_labels_matter(model)) is not None:
        return Finding.skipped(reason)
    labels = torch.full_like(batch["labels"], IGNORED_LABEL)
    labels[0] = batch["labels"][0]
    if not _loss_leaves_out_masked_labels(trial, model, batch={**batch, "labels": labels}):
        return Finding.skipped("the loss counts labels of -100")
    others = {name: torch.cat((one[:1], one[1:].roll(1, 0))) for name, one in batch.items()}
    noise = {
        name: torch.cat((one[:1], one[1:].flip(1)))
        for name, one in others.items()
        if one.ndim > 1 and name not in ("labels", "documents")
    }
    moved = _relative_loss_change(
        trial, model, batches=[{**batch, "labels": labels}, {**others, **noise, "labels": labels}]
    )
    if moved <= _TOLERANCE:
        return Finding.ok(f"other rows change the loss of a row by {moved:.0e} of itself")
    normalised = any(isinstance(one, BatchNorm) for one in model.modules())
    text = f"the loss of a row changes by {moved:.1e} of itself when other rows change"
    if normalised:
        return Finding.warning(
            text,
            why="BatchNorm uses the rows of one rank's microbatch, so results depend on ranks and microbatch",
            fix="LayerNorm or GroupNorm, or torch.nn.SyncBatchNorm",
        )
    return Finding.failure(
        text,
        why="rows are separate samples: results depend on the microbatch and on the number of ranks",
        fix="a look for sums, means or attention over dim 0",
    )


def _loss_leaves_out_masked_labels(trial: ModelTrial, model: nn.Module, *, batch: dict[str, Tensor]) -> bool:
    """Returns whether the loss leaves out labels of -100, as all of fullshard's losses do.

    The batch has few other labels. A count must not be above their number; a mean must be finite.
    """
    with torch.no_grad():
        torch.manual_seed(0)
        result = trial.loss(model, batch)
    if not isinstance(result, tuple):
        return bool(result.isfinite())
    return float(result[1]) <= int((batch["labels"] != IGNORED_LABEL).sum())


def _relative_loss_change(trial: ModelTrial, model: nn.Module, *, batches: list[dict[str, Tensor]]) -> float:
    losses: list[float] = []
    for batch in batches:
        torch.manual_seed(1)  # the same dropout
        with torch.no_grad():
            losses.append(float(trial.mean_loss(model, batch)))
    return abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-3)


def check_gradients(trial: ModelTrial) -> Finding:
    """Looks for trainable parameters whose gradient is missing, zero or not finite."""
    model = trial.build().train()
    trial.mean_loss(model, trial.batches(0)).backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    broken = [n for n, one in trained.items() if one.grad is not None and not one.grad.isfinite().all()]
    if broken:
        return Finding.failure(
            f"gradients of {join_names(broken, most=3)} are not finite",
            why="every step would be skipped",
            fix="torch.autograd.set_detect_anomaly(True) in a loop of your own shows the operation",
        )
    missing = [name for name, one in trained.items() if one.grad is None]
    dead = [name for name, one in trained.items() if one.grad is not None and not one.grad.any()]
    if dead or missing:
        dead, missing = _find_zero_and_missing_gradients(trial, [*dead, *missing])
    count = sum(trained[name].numel() for name in (*dead, *missing))
    share = count / max(1, sum(one.numel() for one in trained.values()))
    if (dead or missing) and (not trial.is_from_transformers or share > _UNUSED_SHARE):
        parts = [f"no gradient reaches {join_names(missing, most=3)}"] if missing else []
        parts += [f"the gradient of {join_names(dead, most=3)} is zero"] if dead else []
        return Finding.warning(
            f"{'; '.join(parts)} ({share:.1%} of the parameters)",
            why="they are not trained, although memory and communication are spent on them",
            fix="a look for .detach(), no_grad or an unused module; requires_grad_(False) if it is meant",
        )
    unused = (
        f", except {join_names([*missing, *dead], most=3)}, which its transformers model does not use"
        if count
        else ""
    )
    return Finding.ok(f"gradients reach all of {len(trained)} parameters{unused}")


def _find_zero_and_missing_gradients(trial: ModelTrial, names: list[str]) -> tuple[list[str], list[str]]:
    """Returns (zero, missing) gradients among `names` after several batches, from values without zeros.

    A factor that is initialised as zero (LoRA, residual gates) leaves others without gradient in the first
    step only, and an expert may get no token of one batch.
    """
    model, random = trial.build().train(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.add_((_NOISE * noise).to(parameter.dtype))
    for number in range(_BATCHES):
        trial.mean_loss(model, trial.batches(number)).backward()
    own = {name: one for name, one in model.named_parameters() if name in names}
    missing = [name for name, one in own.items() if one.grad is None]
    return [n for n, one in own.items() if one.grad is not None and not one.grad.any()], missing


def check_microbatches(trial: ModelTrial) -> Finding:
    """Compares the gradient of a batch with that of its two halves, one microbatch each, added up."""
    batch, model = trial.labelled_rows(), trial.build().eval()
    if batch is None:
        return Finding.skipped("its batches are not rows with integer labels")
    if (reason := trial.reason_masked_labels_matter(model)) is not None:
        return Finding.skipped(reason)
    labels = batch["labels"].clone()
    if labels.ndim > 1 and labels.shape[1] > 3:
        labels[0, 3:] = IGNORED_LABEL  # rows of unequal weight
    batch = {**batch, "labels": labels}
    whole = _step_gradient(trial, model, batches=[batch])
    half = len(labels) // 2
    halves = [{name: one[part] for name, one in batch.items()} for part in (slice(half), slice(half, None))]
    parts = _step_gradient(trial, model, batches=halves)
    error = float((whole - parts).norm() / whole.norm().clamp(min=1e-12))
    if error > _GRADIENT_TOLERANCE:
        return Finding.warning(
            f"the gradient of two microbatches differs from that of all rows at once by {error:.1%}",
            why="a mean of means weighs rows with few labels too much, so results depend on the microbatch",
            fix="a loss that returns (sum, number of labels) instead of their quotient",
        )
    return Finding.ok(f"microbatches add up to the whole gradient, within {error:.0e}")


def _step_gradient(trial: ModelTrial, model: nn.Module, *, batches: list[dict[str, Tensor]]) -> Tensor:
    """Returns the gradient of a step as fullshard computes it: summed losses over the summed count."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        result = trial.loss(model, batch)
        loss, count = result if isinstance(result, tuple) else (result, 1)
        loss.backward()
        total += float(count)
    found = [one.grad.flatten().float() for one in model.parameters() if one.grad is not None]
    return torch.cat(found) / total


def check_initial_values(trial: ModelTrial) -> Finding:
    """Looks for initial values that are not finite, very large, or constant in most matrices."""
    matrices, constant = 0, list[str]()
    for name, parameter in trial.build().named_parameters():
        values = parameter.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if not values.isfinite().all():
            return Finding.failure(
                f"{name} has values that are not finite",
                why="it is not initialised",
                fix="reset_parameters()",
            )
        if values.abs().max() > _LARGEST_VALUE:
            return Finding.warning(
                f"{name} has values up to {float(values.abs().max()):.3g}",
                why="it is probably memory that nothing has initialised",
                fix="reset_parameters() in its module, which sets it",
            )
        if values.ndim >= 2 and min(values.shape) > 1 and not name.endswith("bias"):
            matrices += 1
            constant += [name] if bool((values == values.flatten()[0]).all()) else []
    if constant and len(constant) > _CONSTANT_SHARE * matrices:
        return Finding.warning(
            f"{len(constant)} of {matrices} matrices are constant, such as {constant[0]}",
            why="equal rows get equal gradients, and never become different",
            fix="reset_parameters() with random values",
        )
    return Finding.ok(f"{matrices} matrices have finite values that vary")

"""Runs that should have the same numbers: sharded on the ranks of a pool, and unsharded here.

[Note: one run is one draw] Rank counts, microbatches and strategies sum the same gradients in other orders,
and scale them by other factors, so what a run in fp32 rounds is a draw from a distribution. Its width differs
between parameters: a gradient that is a small sum of large terms passes on the roundings of the terms. One
unsharded run does not show the width, for it may be lucky: in `layers.2.norm.bias` of the odd model 32 of
them, alike but for microbatches and the scale of their loss, were off by 6 to 26 units of 2**-24, and the
plain loop by 5.8. So the width is the root mean square over DRAWS unsharded runs, each with rows in another
order, in other microbatches, and with another scale of the loss, which change nothing in exact arithmetic.
Of 40 fresh ones of every model the largest error of any parameter was 2.5 widths; a sharded run may be off by
3. To leave out one label of the last step changes some parameter of each model by more than 600 widths.
"""

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import balance_experts
from tests.fakes.data import Rows, global_batch
from tests.fakes.models import VOCABULARY, OddModel
from tests.training.runs import whole

STEPS = 6
LENGTH = 9
DRAWS = 8

STRATEGIES: dict[str, list[str]] = {
    "no_shard": [],
    "zero1": [],
    "shard_grad_op": [],
    "full_shard": [],
    "hybrid_shard": ["sharding.shard_degree=2"],
    "hybrid_shard_zero2": ["sharding.shard_degree=2"],
}

# Experts of uneven numbers of tokens; 30 and 24 columns are aligned for the grouped kernel in one of them.
MIXTURES: dict[str, list[str]] = {
    "plain_mixture_decoder": ["model.experts=4"],
    "mixture_decoder": ["model.experts=4", "model.shared_experts=1", "model.balance_loss=0.1"],
    "biased_mixture_decoder": [
        *("model.experts=6", "model.expert_d_ff=20", "model.balance_bias_rate=0.05"),
        "model.experts_per_token=3",
    ],
}


def make_run(
    *,
    model: str,
    ranks: int,
    strategy: str,
    recompute: str = "none",
    accumulation: tuple[int, str] = (1, "every_microbatch"),
    units: str = "block",
    loss_chunk: int = 0,
    length: int = LENGTH,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    extra: Sequence[str] = (),
) -> Run:
    microbatches, sync = accumulation
    blocks = "layers.*" if model.startswith("odd") else "blocks.*"
    units_of = {
        "block": [],
        "size": ["sharding.units.min_parameters=150"],
        "names": [f'sharding.units.names=["{blocks[:-2]}.1", "embedding"]'],
        "unsharded_head": ['sharding.units.overrides=[{match="*head*", strategy="no_shard"}]'],
    }
    if "tied" in model and units == "unsharded_head":
        units_of["unsharded_head"] = [
            f'sharding.units.overrides=[{{match="{blocks[:-2]}.1", strategy="no_shard"}}]'
        ]
    return Run.load(
        overrides=[
            f"model.vocabulary={VOCABULARY}",
            "model.d_model=24",
            f"model.d_ff={32 if model == 'one_kv_head_decoder' else 30}",
            f"model.kv_heads={1 if model == 'one_kv_head_decoder' else 2}",
            "model.layers=3",
            "model.max_sequence=16",
            f"model.tied={'true' if model == 'tied_decoder' else 'false'}",
            f"data.sequence_length={length}",
            *(f"sharding.context_parallel={context}", f"sharding.tensor_parallel={tensor}"),
            f"sharding.expert_parallel={expert}",
            *MIXTURES.get(model, ()),
            "train.global_batch=24",
            f"train.microbatch={24 * context * tensor // ranks // microbatches}",
            f"train.gradient_sync={sync}",
            f"train.loss_chunk={loss_chunk}",
            f"train.steps={STEPS}",
            "schedule.warmup_steps=2",
            "optimizer.learning_rate=1e-2",
            "optimizer.eps=1e-4",
            "optimizer.clip_norm=0.7",
            "precision.mode=fp32",
            f"sharding.strategy={strategy}",
            f"recompute.mode={recompute}",
            *STRATEGIES[strategy],
            *units_of[units],
            *extra,
        ]
    )


def build(model: str, run: Run) -> nn.Module:
    with torch.device("meta"):
        if model.endswith("decoder"):
            return DecoderModel(run.decoder_config)
        return OddModel(tied=model == "odd_tied", mixture=model == "odd_mixture")


def train_sharded(model_name: str, run: Run) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """On every rank: whole parameters, losses and norms after the run."""
    world_size = torch.distributed.get_world_size()
    plan = Plan.from_run(run, world_size=world_size)
    model = shard(build(model_name, run), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    steps = list(train(state, plan, loss=choose_loss(run, model)))
    assert not any(step.skipped for step in steps)
    return whole(model), [step.loss for step in steps], [step.grad_norm for step in steps]


@cache
def train_unsharded(
    model_name: str, dtype: torch.dtype, *, draw: int = 0, length: int = LENGTH
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The plain loop that fullshard stands for: one process, one batch, torch's optimizer and clipping.

    `draw`: another that only rounds otherwise; see [Note: one run is one draw].
    """
    rng = random.Random(draw)
    order = rng.sample(range(24), 24) if draw else list(range(24))
    pieces, scale = (rng.choice((1, 2, 3, 4, 6, 8)), rng.uniform(1, 4)) if draw else (1, 1.0)
    run = make_run(model=model_name, ranks=1, strategy="no_shard", length=length)
    model = materialize(build(model_name, run), seed=run.run.seed).to(dtype)
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2]
    others = [p for p in trainable if p.ndim < 2]
    rate, section = run.optimizer.learning_rate, run.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=section.betas,
        eps=section.eps,
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step, sequences=24, length=length, vocabulary=VOCABULARY)
        count, mean = (batch["labels"] != -100).sum(), 0.0
        for rows in torch.tensor(order).chunk(pieces):
            output, labels = model(batch["tokens"][rows]), batch["labels"][rows]
            logits = getattr(output, "logits", output).flatten(0, 1)
            total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            if model_name == "mixture_decoder":
                total = total + (output.balance_loss * (labels != -100).sum(1)).sum()
            (total * (scale / count)).backward()
            mean += (total / count).item()
        for parameter in trainable:
            assert parameter.grad is not None, "all that is trained is used"
            parameter.grad /= scale
        norms.append(nn.utils.clip_grad_norm_(trainable, section.clip_norm).item())
        progress = (step - 2) / (STEPS - 2 - 1)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * ((step + 1) / 2 if step < 2 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        if model_name == "biased_mixture_decoder":
            balance_experts(model, rate=run.decoder_config.balance_bias_rate)
        losses.append(mean)
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return ((tensor.double() - exact).norm() / exact.norm()).item()


@cache
def rounding(model: str, *, length: int = LENGTH) -> dict[str, float]:
    """The relative error of each parameter in fp32, by name; see [Note: one run is one draw]."""
    exact, *_ = train_unsharded(model, torch.float64, length=length)
    draws = [train_unsharded(model, torch.float32, draw=1 + i, length=length)[0] for i in range(DRAWS)]
    return {
        name: math.sqrt(sum(relative_error(draw[name], tensor) ** 2 for draw in draws) / DRAWS)
        for name, tensor in exact.items()
    }


def assert_same_numbers(model: str, results: list[Any], *, length: int = LENGTH) -> None:
    exact, exact_losses, exact_norms = train_unsharded(model, torch.float64, length=length)
    expected = rounding(model, length=length)
    for parameters, losses, norms in results:
        assert losses == pytest.approx(exact_losses, rel=1e-5)
        assert norms == pytest.approx(exact_norms, rel=1e-4)
        assert parameters.keys() == exact.keys()
        for name, tensor in parameters.items():
            error = relative_error(tensor, exact[name])
            assert error <= 1e-5, name
            # Below half a unit in the last place of fp32 a comparison is one of luck.
            assert error <= 3 * max(expected[name], 2**-24), (name, error, expected[name])
    for parameters, *_ in results[1:]:
        for name, tensor in parameters.items():
            assert torch.equal(tensor, results[0][0][name]), f"{name} differs between ranks"

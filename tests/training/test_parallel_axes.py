"""Ranks that share matmuls or sequences, or divide experts, alone and at once: the numbers of one rank."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fullshard.checkpoint import load, save
from fullshard.errors import PlanError, ShardError, TrainError
from fullshard.models.experts import Router
from fullshard.models.loss import next_token_loss
from fullshard.offload.rounding import shard_index
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.architectures import whole
from tests.fakes.data import Rows, global_batch
from tests.fakes.models import VOCABULARY
from tests.parallel.operations import CountOperations
from tests.survival.test_replicas import flip
from tests.training.same_numbers import assert_same_numbers, build, make_run, train_sharded

LENGTH = 16
DECODER, TIED, ONE_HEAD = "decoder", "tied_decoder", "one_kv_head_decoder"
MIXTURE, BIASED, PLAIN = "mixture_decoder", "biased_mixture_decoder", "plain_mixture_decoder"
BF16 = "precision.mode=bf16"
NO_SHARD = 'sharding.units.overrides=[{match="*.experts", strategy="no_shard"}]'
OFFLOADED = {"extra": ["offload.tier=params+optimizer:cpu"]}
OPTIMIZER_OFFLOADED = {"extra": ["offload.tier=optimizer:cpu"]}
COMPILED = {"extra": ["run.compile=true"]}


class Axes(NamedTuple):
    """Ranks that share each matmul, that share each sequence, and that divide experts."""

    tensor: int = 1
    context: int = 1
    expert: int = 1


# ranks, axes, model, strategy, and what differs from the default
CASES: list[tuple[int, Axes, str, str, dict[str, Any]]] = [
    (2, Axes(tensor=2), DECODER, "full_shard", {"loss_chunk": 4}),
    (4, Axes(tensor=4), ONE_HEAD, "no_shard", {"recompute": "full"}),
    (4, Axes(tensor=2), TIED, "shard_grad_op", {"accumulation": (2, "last_microbatch"), "units": "size"}),
    (4, Axes(tensor=2), DECODER, "full_shard", {"units": "unsharded_head", "recompute": "selective"}),
    (2, Axes(tensor=2), TIED, "full_shard", COMPILED),
    (6, Axes(tensor=2), DECODER, "full_shard", {}),  # 13 rows: 3, 3, 1 and 2, 2, 2
    (4, Axes(tensor=2), ONE_HEAD, "full_shard", {"recompute": "full", **OPTIMIZER_OFFLOADED}),
    (2, Axes(context=2), DECODER, "full_shard", {}),
    (2, Axes(context=2), TIED, "no_shard", {"recompute": "full"}),
    (4, Axes(context=2), TIED, "shard_grad_op", {"accumulation": (2, "last_microbatch")}),
    (4, Axes(context=4), DECODER, "hybrid_shard", {"recompute": "selective", "loss_chunk": 4, "length": 16}),
    (4, Axes(context=2), DECODER, "zero1", {"accumulation": (2, "every_microbatch"), "units": "size"}),
    (3, Axes(context=3), DECODER, "full_shard", {"length": 12}),
    (2, Axes(), MIXTURE, "full_shard", {"recompute": "selective", "loss_chunk": 4}),
    (3, Axes(), BIASED, "zero1", {"accumulation": (2, "last_microbatch"), "recompute": "full"}),
    (4, Axes(), MIXTURE, "hybrid_shard", {"units": "size", "accumulation": (2, "every_microbatch")}),
    (2, Axes(), BIASED, "no_shard", {}),
    (2, Axes(expert=2), MIXTURE, "full_shard", {"recompute": "full", "loss_chunk": 4}),
    (4, Axes(expert=2), MIXTURE, "full_shard", {"accumulation": (2, "last_microbatch")}),
    (4, Axes(expert=4), MIXTURE, "no_shard", {"accumulation": (2, "every_microbatch")}),
    (4, Axes(expert=2), MIXTURE, "hybrid_shard", {"recompute": "selective"}),
    (3, Axes(expert=3), BIASED, "zero1", {"units": "unsharded_head"}),
    (4, Axes(expert=2), BIASED, "shard_grad_op", {"extra": [NO_SHARD]}),
    (4, Axes(expert=2), MIXTURE, "full_shard", OPTIMIZER_OFFLOADED),
    (4, Axes(2, 2, 1), ONE_HEAD, "zero1", {}),
    (4, Axes(1, 2, 4), MIXTURE, "hybrid_shard_zero2", {}),
    (4, Axes(2, 1, 1), MIXTURE, "full_shard", {}),
    (4, Axes(2, 1, 2), MIXTURE, "shard_grad_op", {"recompute": "full"}),
    (4, Axes(2, 1, 2), BIASED, "no_shard", {}),
    (4, Axes(4, 1, 2), PLAIN, "zero1", {"accumulation": (2, "last_microbatch")}),
    (4, Axes(1, 4, 2), MIXTURE, "hybrid_shard", {}),
    (4, Axes(2, 1, 4), MIXTURE, "full_shard", OFFLOADED),
    (8, Axes(2, 2, 4), MIXTURE, "full_shard", {"recompute": "selective", "loss_chunk": 4}),
]


def run_of(ranks: int, axes: Axes, model: str, strategy: str = "full_shard", **more: Any) -> Any:
    settings = {"length": LENGTH, **axes._asdict(), **more}
    return make_run(model=model, ranks=ranks, strategy=strategy, **settings)


# The compiler takes most of a minute, and the case with shared matmuls shows compiled blocks beside an axis.
LONG_CASE = (2, Axes(expert=2), BIASED, "shard_grad_op", COMPILED)


@pytest.mark.parametrize("case", [*CASES, pytest.param(LONG_CASE, marks=pytest.mark.long)], ids=str)
def test_the_same_numbers(case: tuple[Any, ...], ranks: Any) -> None:
    count, axes, model, strategy, more = case
    run = run_of(count, axes, model, strategy, **more)
    found = ranks(count).run(train_sharded, model, run)
    assert_same_numbers(model, found, length=more.get("length", LENGTH))


def state_of(axes: Axes, *extra: str, model: str = MIXTURE) -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    run = run_of(dist.get_world_size(), axes, model, extra=extra)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    module = shard(build(model, run), plan)
    return TrainState(module, build_optimizer(module, plan), data=Rows(VOCABULARY)), plan


class RowsByWorldSize(Rows):
    """Rows cut by the number of ranks that the plan has, as a source that knows of no axes does."""

    seen: list[list[int]]

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Any:
        self.seen = []
        for turn in range(plan.accumulation):
            first = (turn * plan.world_size + plan.data_rank(rank)) * plan.microbatch
            self.seen.append(list(range(first, first + plan.microbatch)))
        return super().microbatches(step, rank=rank, plan=plan)


def rows_of_a_step(axes: Axes) -> list[list[int]]:
    state, plan = state_of(axes, "train.microbatch=1")
    state.data = source = RowsByWorldSize(VOCABULARY)
    next(iter(train(state, plan)))
    return source.seen


@pytest.mark.parametrize("axes", [Axes(tensor=2), Axes(context=2), Axes(expert=2)], ids=str)
def test_a_source_that_counts_all_ranks_reads_each_row_once(axes: Axes, ranks: Any) -> None:
    found = ranks(4).run(rows_of_a_step, axes)
    of_groups = found if axes.expert > 1 else found[::2]
    rows = sorted(row for one in of_groups for microbatch in one for row in microbatch)
    assert rows == list(range(len(rows)))
    assert axes.expert > 1 or found[::2] == found[1::2]


def train_on_batches_of_each_rank(axes: Axes, is_of_group: bool) -> int:
    state, plan = state_of(axes)
    number = plan.data_rank(dist.get_rank()) if is_of_group else dist.get_rank()
    batch = Rows(VOCABULARY).microbatches(number, rank=0, plan=plan.for_data)
    state.data = list(batch)
    return next(iter(train(state, plan))).index


@pytest.mark.parametrize("axes", [Axes(tensor=2), Axes(context=2)], ids=str)
def test_ranks_that_share_sequences_and_have_different_batches_are_refused(axes: Axes, ranks: Any) -> None:
    assert ranks(2).run(train_on_batches_of_each_rank, axes, True) == [1, 1]
    with pytest.raises(TrainError, match="ranks that share each sequence have different batches"):
        ranks(2).run(train_on_batches_of_each_rank, axes, False)


def initial_values(axes: Axes, model: str) -> dict[str, Tensor]:
    return {name: whole(one) for name, one in state_of(axes, model=model)[0].model.named_parameters()}


@pytest.mark.parametrize("model", [DECODER, MIXTURE])
def test_initial_values_do_not_depend_on_the_mesh(model: str, ranks: Any) -> None:
    run = run_of(1, Axes(), model)
    expected = dict(materialize(build(model, run), seed=run.run.seed).named_parameters())
    for axes in (Axes(2, 2, 1), *([Axes(2, 1, 4), Axes(1, 2, 2)] if model == MIXTURE else ())):
        for values in ranks(4).run(initial_values, axes, model):
            assert all(torch.equal(values[name], expected[name]) for name in expected), axes


def saved_again(axes: Axes, source: Path | None, target: Path) -> dict[str, Tensor]:
    """Loads, or without a source trains two steps; saves, and returns all that was saved, whole."""
    state, plan = state_of(axes, BF16)
    if source is None:
        assert [step.index for step, _ in zip(train(state, plan), range(2), strict=False)] == [1, 2]
    else:
        load(state, source)
    save(state, target, plan=plan)
    return {name: whole(one) for name, one in state.tensors().items() if not name.startswith("rng.")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_passes_through_any_meshes_unchanged(ranks: Any, tmp_path: Path) -> None:
    """Weights and moments, bit for bit; torch.distributed.checkpoint alone reads them from any."""
    chain = (
        (4, Axes(2, 2, 1)),
        (4, Axes(1, 4, 1)),
        (3, Axes()),
        (4, Axes(2, 1, 4)),
        (2, Axes(1, 1, 2)),
    )
    written, source = dict[str, Tensor](), None
    for index, (count, axes) in enumerate(chain):
        target = tmp_path / str(index)
        for values in ranks(count).run(saved_again, axes, source, target):
            written = written or values
            for name, value in written.items():
                assert torch.equal(values[name], value), (axes, name)
        plain = {name: torch.empty_like(value) for name, value in written.items()}
        dcp.load(plain, checkpoint_id=next(target.glob("**/.metadata")).parent, no_dist=True)
        assert all(torch.equal(plain[name], value) for name, value in written.items()), axes
        source = target
    assert sum(name.startswith("optimizer.") for name in written) >= 2


def compared_replicas(axes: Axes, model: str, extra: tuple[str, ...], damaged: str | None) -> str | None:
    """Trains on 4 ranks, and compares replicas after each step; rank 1 damages its part after the first."""
    more = ("fault_tolerance.check_replicas_every=1", "precision.mode=bf16_pure", *extra)
    state, plan = state_of(axes, *more, model=model)
    try:
        for step in train(state, plan):
            if damaged is not None and step.index == 1 and dist.get_rank() == 1:
                flip(state.tensors()[damaged])
    except TrainError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("axes", "model", "extra", "damaged", "said"),
    [
        # Other parts of a matrix are not compared, and are rounded by other random numbers.
        (Axes(tensor=2), DECODER, (), "model.norm.weight", "differ"),
        (
            *(Axes(expert=2), MIXTURE, (NO_SHARD,), "model.blocks.1.feed_forward.experts.down"),
            "ranks 1, 3 differ in",
        ),
    ],
)
def test_replicas_are_compared_with_those_of_the_same_part(  # noqa: PLR0917
    axes: Axes, model: str, extra: tuple[str, ...], damaged: str, said: str, ranks: Any
) -> None:
    assert ranks(4).run(compared_replicas, axes, model, extra, None) == [None] * 4
    for message in ranks(4).run(compared_replicas, axes, model, extra, damaged):
        assert damaged.removeprefix("model.") in message
        assert said in message


def shard_indices() -> dict[str, int]:
    model = state_of(Axes(tensor=2), model=DECODER)[0].model
    return {name: shard_index(parameter) for name, parameter in model.named_parameters()}


def test_each_part_has_its_shard_index(ranks: Any) -> None:
    by_rank = ranks(4).run(shard_indices)
    for name, expected in (("head", [0, 1, 2, 3]), ("norm", [0, 0, 1, 1])):
        assert [indices[f"{name}.weight"] for indices in by_rank] == expected


def counted_and_compared() -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens of a step, and those expected. Compares the default loss with one that reads whole logits."""
    state, plan = state_of(Axes(tensor=2), model=DECODER)
    step = next(train(state, plan))
    batch = global_batch(0, sequences=4, length=LENGTH, vocabulary=VOCABULARY)
    found: list[list[Tensor]] = []
    for own in (False, True):
        if own:
            logits, labels = state.model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        else:
            total, _ = next_token_loss(state.model, batch)
        total.backward()
        gradients = [p.grad for p in state.model.parameters()]
        found.append([total.detach(), *(whole(one) for one in gradients if one is not None)])
        state.model.zero_grad()
    for parallel, plain in zip(*found, strict=True):
        torch.testing.assert_close(parallel, plain)
    expected = global_batch(0, sequences=24, length=LENGTH, vocabulary=VOCABULARY)
    valid = int((expected["labels"] != -100).sum())
    return (step.tokens, step.trained_tokens or 0), (plan.run.tokens_per_step, valid)


def test_tokens_count_once_and_any_loss_may_read_the_logits(ranks: Any) -> None:
    for tokens, expected in ranks(2).run(counted_and_compared):
        assert tokens == expected


def gradients_of_skewed_routing(expert: int) -> tuple[dict[str, Tensor], int]:
    """Gradients of one batch, by name, and grouped matmuls, if all tokens go to two of four experts."""
    state, _ = state_of(Axes(expert=expert))
    with torch.no_grad():
        for router in (one for one in state.model.modules() if isinstance(one, Router)):
            router.register_buffer("balance_bias", torch.tensor([9.0, 9.0, 0.0, 0.0]))
            router.has_bias = True
            router.register_buffer("tokens", torch.zeros(4))
    batch = global_batch(0, sequences=4, length=LENGTH, vocabulary=VOCABULARY)
    own = {name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()}
    with CountOperations() as counting:
        next_token_loss(state.model, own)[0].backward()
    gradients = {name: whole(p.grad) for name, p in state.model.named_parameters() if p.grad is not None}
    return gradients, sum(count for name, count in counting.counts.items() if "_grouped_mm" in name)


def test_a_rank_that_gets_no_token_takes_part_and_runs_no_kernel_of_experts(ranks: Any) -> None:
    expected, _ = ranks(2).run(gradients_of_skewed_routing, 1)[0]
    for rank, (found, matmuls) in enumerate(ranks(2).run(gradients_of_skewed_routing, 2)):
        assert (matmuls > 0) == (rank == 0)
        assert not found["blocks.0.feed_forward.experts.up"][2:].any()
        torch.testing.assert_close(found, expected)


def count_collectives_and_choices(axes: Axes, recompute: str) -> dict[str, int]:
    """Counts the collectives and choices of experts of a forward and backward, by operation."""
    state, plan = state_of(axes, f"recompute.mode={recompute}")
    with CountOperations() as counting:
        next(iter(train(state, plan)))
    names = ("reduce_sequence", "exchange_counts", "exchange_rows", "reduce_over_ranks", "topk")
    return {name: counting.total(name) for name in names}


def test_selective_recompute_repeats_no_reduction_no_exchange_and_no_choice_of_experts(ranks: Any) -> None:
    axes = Axes(tensor=2, expert=2)
    plain, selective = (
        ranks(2).run(count_collectives_and_choices, axes, m)[0] for m in ("none", "selective")
    )
    assert all(plain.values())
    assert selective == plain


def refused(axes: Axes, model: str, more: dict[str, Any]) -> str:
    count = dist.get_world_size()
    run = run_of(count, axes, model, **more)
    with pytest.raises(ShardError) as error:
        shard(build(model, run), Plan.from_run(run, world_size=count))
    return str(error.value)


NAMED_BLOCKS = ["sharding.units.names=['blocks.*']"]


@pytest.mark.parametrize(
    ("count", "axes", "model", "more", "said"),
    [
        (3, Axes(tensor=3), DECODER, {"length": 15}, ("model.heads = 4", "tensor_parallel = 2")),
        (2, Axes(expert=2), MIXTURE, {"extra": NAMED_BLOCKS}, ("blocks.0", "names of the experts too")),
    ],
)
def test_indivisible_models_are_refused_with_divisors(  # noqa: PLR0917
    count: int, axes: Axes, model: str, more: dict[str, Any], said: tuple[str, ...], ranks: Any
) -> None:
    for message in ranks(count).run(refused, axes, model, more):
        assert all(text in message for text in said)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["sharding.expert_parallel=4"], "one of [1, 2]"),
        (["sharding.expert_parallel=2", "model.experts=3"], "one of [1, 3]"),
        (["sharding.expert_parallel=2", "model.experts=0"], "no experts"),
        (
            [
                *("sharding.expert_parallel=2", "sharding.tensor_parallel=2"),
                'sharding.tensor_parallel_styles={head="head"}',
            ],
            "tensor_parallel_styles, sharding.expert_parallel = 2",
        ),
    ],
    ids=str,
)
def test_plans_that_cannot_divide_or_combine_are_refused(settings: list[str], reason: str) -> None:
    run = make_run(model="decoder", ranks=2, strategy="full_shard", extra=["model.experts=4", *settings])
    with pytest.raises(PlanError) as error:
        Plan.from_run(run, world_size=2)
    assert reason in str(error.value)

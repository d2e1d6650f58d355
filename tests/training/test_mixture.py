"""The mixture form of the reference decoder: its numbers, its balance, and what is known about it."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.models.build import build_model, decoder_flops_per_token
from fullshard.models.decoder import DecoderModel, Mixture
from fullshard.models.experts import clear_empty_groups, matmul_groups, matmul_groups_in_turn
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe import describe
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import balance_experts
from tests.parallel.operations import CountOperations
from tests.training.same_numbers import VOCABULARY, Rows, build, make_run


def biases_after_each_step() -> list[list[float]]:
    """On every rank: the balance biases before and after a step, and after one whose loss is not finite."""
    run = make_run(model="biased_mixture_decoder", ranks=2, strategy="full_shard")
    plan = Plan.from_run(run, world_size=2)
    model = shard(build("biased_mixture_decoder", run), plan)
    microbatches = iter([1.0] * plan.accumulation + [math.nan] * plan.accumulation)

    def loss(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = next_token_loss(module, batch)
        return total * next(microbatches), count

    def biases() -> list[float]:
        buffers = [one for name, one in model.named_buffers() if "balance_bias" in name]
        return torch.cat(buffers).tolist()

    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    return [biases(), *(biases() for _, _ in zip(range(2), train(state, plan, loss=loss), strict=False))]


def test_a_skipped_step_leaves_the_balance_biases(ranks: Any) -> None:
    for before, after, skipped in ranks(2).run(biases_after_each_step):
        assert before != after
        assert skipped == after


def mixture(**sizes: Any) -> Mixture:
    config = DecoderConfig.parse({"d_model": 16, "d_ff": 24, "layers": 1, "heads": 2, **sizes}, source="here")
    with torch.device("meta"):
        model = DecoderModel(config)
    layer = materialize(model, seed=0).blocks[0].feed_forward
    assert isinstance(layer, Mixture)
    return layer


def test_a_decoder_that_is_made_on_the_cpu_has_initialised_experts() -> None:
    config = DecoderConfig.parse(
        {"d_model": 64, "d_ff": 24, "layers": 1, "heads": 2, "experts": 4}, source=""
    )
    kept = [torch.full((4, 64, 24), 3e30) for _ in range(20)]  # memory that the parameters may get
    del kept
    layer = DecoderModel(config).blocks[0].feed_forward
    for parameter in (layer.router.weight, layer.experts.gate, layer.experts.up):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.3)


def one_by_one(layer: Mixture, x: Tensor) -> Tensor:
    """Each token by itself, as the papers write it."""
    experts, chosen = layer.experts, layer.router.experts_per_token
    rows: list[Tensor] = []
    for token in x.flatten(0, 1):
        scores = (layer.router.weight @ token).softmax(0)
        best = scores.topk(chosen)
        y = torch.zeros_like(token)
        for weight, e in zip(best.values / best.values.sum(), best.indices, strict=True):
            inner = F.silu(token @ experts.gate[e]) * (token @ experts.up[e])
            y = y + weight * (inner @ experts.down[e])
        rows.append(y if layer.shared is None else y + layer.shared(token))
    return torch.stack(rows).view_as(x)


def test_a_mixture_is_the_weighted_sum_of_the_best_experts_of_each_token() -> None:
    layer = mixture(experts=5, experts_per_token=3, shared_experts=2)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x)[0], one_by_one(layer, x))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_experts_are_gathered_and_never_added_row_by_row(compiled: bool) -> None:
    layer = mixture(experts=5, experts_per_token=3)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    variables = [x, *layer.parameters()]
    expected = torch.autograd.grad(one_by_one(layer, x).square().sum(), variables)
    forward, counting = layer, CountOperations()
    if compiled:
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with nullcontext() if compiled else counting:  # the compiler takes no other mode
        found = torch.autograd.grad(forward(x)[0].square().sum(), variables)
    torch.testing.assert_close(found, expected)
    assert compiled or counting.total("gather_rows") == 4
    assert counting.total("index_put") == 0


def test_groups_without_a_row_have_gradients_of_zero_whatever_a_kernel_leaves_there() -> None:
    product = torch.randn(4, 2, 3)
    product[0], product[2] = torch.nan, torch.inf
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    found = clear_empty_groups(product.clone(), ends)
    assert torch.equal(found[[1, 3]], product[[1, 3]])
    assert not found[[0, 2]].any()


# With torch's kernel, in turn, and padded.
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (5, torch.float32), (16, torch.bfloat16)])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (17, 16, 300)])
def test_grouped_matmuls_equal_plain_ones(counts: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), width, generator=rng).to(dtype).requires_grad_()
    matrices = torch.randn(len(counts), width, width, generator=rng).to(dtype).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    parts = zip(rows.split(counts), matrices, strict=True)
    plain = torch.cat([part @ matrix for part, matrix in parts]).square().sum()
    expected = torch.autograd.grad(plain, (rows, matrices))
    for product in (
        matmul_groups(rows, matrices, ends=ends),
        matmul_groups_in_turn(rows, matrices, ends),
    ):
        found = torch.autograd.grad(product.square().sum(), (rows, matrices))
        torch.testing.assert_close(found, expected)


def test_the_balance_loss_is_least_where_experts_are_equally_likely() -> None:
    layer = mixture(experts=4, experts_per_token=1, balance_loss=1.0).train()
    x = torch.randn(3, 64, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.router.weight.normal_()
        even = layer(x)[1]
        x[1] = x[1, :1]  # all tokens of one sequence go to one expert
        uneven = layer(x)[1]
    assert even is not None
    assert uneven is not None
    assert torch.equal(uneven[[0, 2]], even[[0, 2]]), "each sequence is balanced by itself"
    assert uneven[1] > even[1] >= 0.9
    assert layer.eval()(x)[1] is None


def test_biases_move_tokens_to_experts_that_have_few() -> None:
    layer = mixture(experts=4, experts_per_token=1, balance_bias_rate=0.02).train()
    x = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0)) + 1
    loads: list[Tensor] = []
    with torch.no_grad():
        layer.router.weight.normal_(generator=torch.Generator().manual_seed(1))
        for _ in range(60):
            before = layer.router.weight.clone()
            layer(x)
            loads.append(layer.router.tokens.clone())
            balance_experts(layer, rate=0.02)
    assert torch.equal(before, layer.router.weight)
    assert loads[0].max() > 2 * 64
    assert loads[-1].max() < 1.2 * 64


def test_active_parameters_and_flops_leave_out_experts_that_a_token_does_not_reach() -> None:
    bf16 = ["precision.mode=bf16"]  # described in fewer traces than fp32
    run = make_run(model="mixture_decoder", ranks=1, strategy="full_shard", extra=bf16)
    model = build_model(run)
    spec = describe(model, run, loss=next_token_loss)
    assert spec.numel == sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert spec.active_numel == spec.numel - 13 * 24 - vectors - run.decoder_config.inactive_parameters
    assert decoder_flops_per_token(model, run) == pytest.approx(spec.flops_per_token, rel=0.01)

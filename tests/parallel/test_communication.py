"""[communication]: what is sent and lost, in every strategy; hooks of a user; their state in checkpoints."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.checkpoint import load, save
from fullshard.distributed.collectives import REDUCTION
from fullshard.distributed.compression import CompressedCommunication, decode, encode
from fullshard.errors import PlanError, ShardError, SpecError
from fullshard.parallel.communication import find_hooks, settle_ranks_per_node
from fullshard.spec.plan import MergedUnitSettings, Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.communication_section import CommunicationSection, wire_bytes
from fullshard.torch_private.fsdp import engine_parameters, list_units, padded_shard_shape
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.parallel.hooks import Counting
from tests.training.runs import (
    advance,
    local_bits,
    logged,
    mean_square,
    pairs,
    run_of,
    same_bits,
    sharded,
    unsharded,
    whole,
)
from tests.training.same_numbers import build, make_run

BOTH = ("communication.gather=int8", "communication.reduce=int8")
COUNTING = "communication.hook=tests.parallel.hooks:Counting"
FEEDBACK = "communication.hook=tests.parallel.hooks:ErrorFeedback"
STRATEGIES: dict[str, tuple[int, list[str]]] = {
    "zero1": (2, []),
    "shard_grad_op": (3, []),
    "full_shard": (3, []),
    "hybrid_shard": (4, ["sharding.shard_degree=2"]),
    "hybrid_shard_zero2": (4, ["sharding.shard_degree=2"]),
}


# Formats #
def rows_of(count: int, n: int) -> Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, n)


@pytest.mark.parametrize("n", [1, 5, 256, 1000])
def test_int8_is_off_by_half_a_step_and_stochastic_by_one(n: int) -> None:
    rows = rows_of(3, n)
    for noise, most in ((None, 0.5), (torch.Generator().manual_seed(1), 1.0)):
        wire = encode(rows, "int8", noise=noise)
        assert wire.shape == (3, wire_bytes("int8", n))
        for block in range(0, n, 256):
            part = rows[:, block : block + 256]
            step = part.abs().amax(1, keepdim=True) / 127
            error = (decode(wire, n)[:, block : block + 256] - part).abs()
            assert (error <= most * step * 1.0001).all()


def test_int8_sends_a_quarter_of_fp32() -> None:
    assert wire_bytes("int8", 1_000_000) / 4_000_000 == pytest.approx(0.254, abs=1e-4)


def test_stochastic_rounding_is_right_on_average() -> None:
    rows = rows_of(1, 256).expand(4000, 256)
    mean = decode(encode(rows, "int8", noise=torch.Generator().manual_seed(2)), 256).mean(0)
    step = rows[0].abs().max() / 127
    assert ((mean - rows[0]).abs() < 5 * 0.5 * step / 4000**0.5).all()


@pytest.mark.parametrize("kind", ["int8", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_so(kind: Any, value: float) -> None:
    rows = rows_of(2, 300)
    rows[1, 270] = value
    found = decode(encode(rows, kind, noise=torch.Generator()), 300)
    assert not found[1, 270].isfinite()
    assert found[0].isfinite().all()
    assert decode(encode(torch.zeros(1, 7), kind), 7).equal(torch.zeros(1, 7))


# Training #
def gradient_error(more: list[str]) -> tuple[float, bool]:
    """Returns the relative error of a step's gradient, and whether all replicas of it are equal."""
    run = run_of(*more)
    state, plan = sharded(run)
    reference = unsharded(run)
    mean_square(reference, pairs(0)).backward()
    taken: dict[str, Tensor] = {}

    def take(*_: Any) -> None:
        for name, one in state.model.named_parameters():
            taken[name] = cast(Any, one.grad).full_tensor()

    state.optimizer.register_step_pre_hook(take)
    next(train(state, plan, loss=mean_square))
    own = torch.cat([one.flatten() for one in taken.values()])
    expected = torch.cat([cast(Tensor, one.grad).flatten() for one in reference.parameters()])
    own = own * (expected.norm() / own.norm())  # the step divides by another number, and clips
    return ((own - expected).norm() / expected.norm()).item(), True


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("form", "low", "high"), [("int8", 1e-4, 0.05), ("bf16", 1e-5, 0.02)])
def test_a_compressed_step_is_near_the_exact_one(
    strategy: str, form: str, low: float, high: float, ranks: Any
) -> None:
    world, more = STRATEGIES[strategy]
    both = [f"communication.gather={form}", f"communication.reduce={form}"]
    for error, _ in ranks(world).run(gradient_error, [f"sharding.strategy={strategy}", *more, *both]):
        assert low < error < high


def trained(more: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    state, plan = sharded(run_of(*more))
    return [step.loss for step in train(state, plan, loss=mean_square)], whole(state.model)


def test_a_hook_that_sends_all_trains_as_without_it(ranks: Any) -> None:
    for strategy in ("full_shard", "zero1"):
        own, exact = (
            ranks(2).run(trained, [f"sharding.strategy={strategy}", *more])[0] for more in ([COUNTING], [])
        )
        assert own[0] == pytest.approx(exact[0], rel=1e-6)
        assert all(torch.allclose(own[1][name], one, atol=1e-6) for name, one in exact[1].items())


def bytes_counted_and_expected(more: list[str], gathers: float) -> tuple[dict[str, int], dict[str, int]]:
    state, plan = sharded(run_of(*more))
    Counting.sent.clear()
    next(train(state, plan, loss=mean_square))
    others, sent = plan.shard_degree - 1, {"gather": 0.0, "reduce": 0.0}
    for unit in list_units(state.model):
        n = sum(padded_shard_shape(one).numel() for one in engine_parameters(unit))
        again = gathers if unit is not state.model else 1  # the root is kept until its backward
        sent["gather"] += 4 * n * others * again
        sent["reduce"] += 4 * n * others
    return dict(Counting.sent), {name: int(count) for name, count in sent.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_sees_every_byte_that_a_strategy_sends(strategy: str, ranks: Any) -> None:
    world, more = STRATEGIES[strategy]
    gathers = 2 if strategy in ("full_shard", "hybrid_shard") else 1
    overrides = [f"sharding.strategy={strategy}", *more, COUNTING]
    for counted, expected in ranks(world).run(bytes_counted_and_expected, overrides, gathers):
        assert counted["reduce"] == expected["reduce"]
        assert counted["gather"] <= expected["gather"]
        assert counted["gather"] >= expected["gather"] / 2


# Two levels #
NODES = "communication.ranks_per_node=2"
FP32_WITHIN = (NODES, "communication.reduce_within=fp32")
LEVELS = (*FP32_WITHIN, "communication.reduce=int8")


@pytest.mark.parametrize(
    "more",
    [
        ["sharding.strategy=full_shard"],
        ["sharding.strategy=shard_grad_op", "train.microbatch=1"],
        ["sharding.strategy=zero1"],
        ["sharding.strategy=full_shard", "offload.tier=params+optimizer:cpu"],
    ],
)
def test_two_levels_in_fp32_sum_as_one_does(more: list[str], ranks: Any) -> None:
    own, exact = (ranks(4).run(trained, [*more, *extra])[0] for extra in (FP32_WITHIN, ()))
    assert own[0] == pytest.approx(exact[0], rel=1e-6)
    assert all(torch.allclose(own[1][name], one, atol=1e-6) for name, one in exact[1].items())


def error_of_sum(kind: Any, within: Any, near: int, is_alike: bool = False) -> tuple[float, bool]:
    """Returns this rank's relative error of a sum, and whether NaN and infinity spoil their blocks alone.

    is_alike: whether all ranks have the same gradients; else they are independent
    """
    size, own, n = dist.get_world_size(), dist.get_rank(), 7000
    every = torch.randn(size, size, n, generator=torch.Generator().manual_seed(0))
    every = every[:1].expand(size, size, n).clone() if is_alike else every
    section = CommunicationSection(reduce=kind, reduce_within=within)
    hook = CompressedCommunication(section, near=near, seed=own)
    exact, group = every[:, own].sum(0), cast(Any, dist.group.WORLD)
    error = (hook.reduce(every[own].clone(), group) - exact).norm() / exact.norm()
    every[1, :, 3], every[2, :, 300] = float("nan"), float("inf")
    spoilt = hook.reduce(every[own].clone(), group)
    stays = not spoilt[3].isfinite() and not spoilt[300].isfinite() and spoilt[512:].isfinite().all()
    return error.item(), bool(stays)


def test_errors_of_two_levels(ranks: Any) -> None:
    """int8 rounds fewer sums, which are larger: as much in all if ranks are independent, else √2 of it."""

    def largest_error(*settings: Any) -> float:
        found = ranks(4).run(error_of_sum, *settings)
        assert all(stays for _, stays in found)
        return max(error for error, _ in found)

    everywhere, across = largest_error("int8", "none", 1), largest_error("int8", "fp32", 2)
    assert across == pytest.approx(everywhere, rel=0.1)
    alike, alike_across = largest_error("int8", "none", 1, True), largest_error("int8", "fp32", 2, True)
    assert alike_across == pytest.approx(2**0.5 * alike, rel=0.1)
    assert largest_error("bf16", "fp32", 2) < largest_error("bf16", "bf16", 2) < across
    assert largest_error("int8", "fp32", 1) == everywhere, "on nodes of one rank, all is sent across"
    assert largest_error("int8", "fp32", 4) < 1e-6, "on one node, nothing is"
    assert largest_error("auto", "fp32", 2) < 1e-6


def bytes_by_link(more: list[str]) -> tuple[Counter[str], list[int]]:
    """Counts the bytes of a step's reductions within this rank's node of two, and to the other node."""
    state, plan = sharded(run_of("sharding.strategy=full_shard", *more))
    sent, send = Counter[str](), dist.isend

    def counted(tensor: Tensor, group: Any, group_dst: int, tag: int = 0) -> Any:
        if tag == REDUCTION:
            sent["within" if group_dst // 2 == dist.get_rank() // 2 else "across"] += tensor.nbytes
        return send(tensor, group=group, group_dst=group_dst, tag=tag)

    dist.isend = cast(Any, counted)
    try:
        next(train(state, plan, loss=mean_square))
    finally:
        dist.isend = send
    units = [engine_parameters(unit) for unit in list_units(state.model)]
    return sent, [sum(padded_shard_shape(one).numel() for one in unit) for unit in units]


def of_int8(n: int) -> int:
    return wire_bytes("int8", n)


@pytest.mark.parametrize(
    ("more", "within", "across"),
    [
        (LEVELS[2:], of_int8, lambda n: 2 * of_int8(n)),  # in one level
        (LEVELS, lambda n: 8 * n, of_int8),
        ((*LEVELS, "communication.reduce_within=bf16"), lambda n: 4 * n, of_int8),
        (FP32_WITHIN, lambda n: 8 * n, lambda n: 4 * n),
    ],
)
def test_only_sums_of_nodes_are_sent_between_them(more: Any, within: Any, across: Any, ranks: Any) -> None:
    for sent, shards in ranks(4).run(bytes_by_link, list(more)):
        assert sent == {"within": sum(map(within, shards)), "across": sum(map(across, shards))}


def ranks_of_own_node(more: list[str], per_node: str) -> tuple[set[int], list[str]]:
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    with logged() as messages:
        state, _ = sharded(run_of(*more))
    return {cast(Any, one)._near for one in find_hooks(state.model).values()}, messages


def test_nodes_are_those_of_the_environment(ranks: Any) -> None:
    more = ["sharding.strategy=full_shard", *LEVELS[1:]]
    for near, said in (
        (2, ""),
        (4, "communication.reduce has no effect"),
        (1, "reduce_within has no effect"),
    ):
        degrees, messages = ranks(4).run(ranks_of_own_node, more, str(near))[0]
        assert degrees == {near}
        assert len(messages) == (1 if said else 0)
        assert said in "".join(messages)


def messages_of_nodes(more: list[str], per_node: str | None) -> list[str]:
    del os.environ["LOCAL_WORLD_SIZE"]
    if per_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = per_node
    run = run_of("sharding.strategy=full_shard", "data.sequence_length=8", *more)
    with logged() as messages:
        settle_ranks_per_node(Plan.from_run(run, world_size=dist.get_world_size()))
    return messages


@pytest.mark.parametrize(
    ("more", "per_node", "said"),
    [
        (LEVELS, None, []),
        (LEVELS, "4", []),
        (LEVELS, "1", ["ranks_per_node = 2: sums within nodes cross hosts, which have 1 rank"]),
        (LEVELS[1:2], "4", []),
        ((*LEVELS[1:], "sharding.tensor_parallel=2"), "4", ["communication.reduce has no effect"]),
        ((*LEVELS[1:], "sharding.tensor_parallel=2"), "2", ["communication.reduce_within has no effect"]),
    ],
)
def test_a_level_without_effect_is_logged(more: Any, per_node: Any, said: list[str], ranks: Any) -> None:
    messages = ranks(4).run(messages_of_nodes, list(more), per_node)[0]
    assert len(messages) == len(said)
    assert all(text in message for text, message in zip(said, messages, strict=True))


def test_nodes_of_unknown_size_are_refused(ranks: Any) -> None:
    with pytest.raises(ShardError, match=r"ranks per node is not known[\s\S]*communication.ranks_per_node"):
        ranks(2).run(messages_of_nodes, list(LEVELS[1:]), None)


@pytest.mark.parametrize(
    ("more", "near"),
    [
        (["sharding.strategy=full_shard"], 8),
        (["sharding.strategy=full_shard", "sharding.tensor_parallel=2"], 4),
        (["sharding.strategy=hybrid_shard", "sharding.shard_degree=16"], 8),
        (["sharding.strategy=hybrid_shard", "sharding.shard_degree=4"], 4),
        (["sharding.strategy=hybrid_shard", "sharding.shard_degree=4", "sharding.tensor_parallel=8"], 1),
    ],
)
def test_ranks_of_a_node_of_eight_sum_first(more: list[str], near: int) -> None:
    batch = ["train.global_batch=32", "data.sequence_length=8", "communication.ranks_per_node=8"]
    plan = Plan.from_run(run_of(*more, *LEVELS[1:], *batch), world_size=32)
    assert MergedUnitSettings.for_unit(plan, None, kept=False).near_degree == near


@pytest.mark.parametrize(("shards", "per_node"), [(3, 2), (2, 3)])
def test_shards_on_parts_of_nodes_are_refused(shards: int, per_node: int, ranks: Any) -> None:
    more = ["sharding.strategy=full_shard", *LEVELS[1:]]
    with pytest.raises(PlanError, match=f"{shards} ranks that shard, 1 apart, on nodes of {per_node}"):
        ranks(shards).run(ranks_of_own_node, more, str(per_node))


# Checkpoints #
def train_to(directory: Path, steps: list[int], more: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    with logged() as messages:
        for until in steps:
            state, plan = sharded(run_of(*more))
            load(state, directory, missing_ok=True)
            advance(state, plan, to=until)
            save(state, directory, plan=plan)
    return local_bits(state), messages


@pytest.mark.parametrize("more", [[FEEDBACK], list(BOTH)])
def test_a_resumed_run_feeds_back_the_same_errors(more: list[str], ranks: Any, tmp_path: Path) -> None:
    at_once = ranks(2).run(train_to, tmp_path / "at once", [5], more)
    broken = ranks(2).run(train_to, tmp_path / "broken", [2, 5], more)
    for (own, _), (other, messages) in zip(at_once, broken, strict=True):
        assert any(name.startswith("communication.") for name in own)
        assert same_bits(own, other)
        assert not messages


def test_other_numbers_of_ranks_begin_without_errors_and_print_so(ranks: Any, tmp_path: Path) -> None:
    ranks(3).run(train_to, tmp_path, [2], [FEEDBACK])
    _, messages = ranks(2).run(train_to, tmp_path, [3], [FEEDBACK])[0]
    assert any("state of communication hooks" in one for one in messages)


# Refused #
def refused(more: list[str], factor: bool) -> str:
    try:
        state, plan = sharded(run_of(*more))
        if factor:
            cast(FSDPModule, state.model).set_gradient_divide_factor(1.0)
            with pytest.raises(ShardError) as raised:
                mean_square(state.model, pairs(0)).backward()
            return str(raised.value)
        next(train(state, plan, loss=mean_square))
    except (ShardError, SpecError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("more", "factor", "text"),
    [
        (["communication.hook=tests.parallel.hooks:NotAHook"], False, "is not a hook"),
        (["communication.hook=tests.parallel.hooks:WrongShape"], False, "returned a wrong shape"),
    ],
)
def test_what_is_no_hook_is_refused(more: list[str], factor: bool, text: str, ranks: Any) -> None:
    assert all(text in one for one in ranks(2).run(refused, more, factor))


def test_settings_that_exclude_each_other_are_refused() -> None:
    for other in ("gather=int8", "reduce_within=fp32"):
        with pytest.raises(SpecError, match="gathers and reduces: leave out gather, reduce, reduce_within"):
            Run.load(overrides=[COUNTING, f"communication.{other}"])
    with pytest.raises(PlanError, match="replicas"):
        Plan.from_run(run_of(*BOTH, "sharding.strategy=no_shard"), world_size=2)


# With other axes #
def losses_of_decoder(extra: list[str], options: dict[str, Any]) -> list[float]:
    run = make_run(
        model=options.pop("model", "plain_decoder"),
        ranks=torch.distributed.get_world_size(),
        strategy="full_shard",
        extra=extra,
        **options,
    )
    plan = Plan.from_run(run, world_size=torch.distributed.get_world_size())
    name = "plain_mixture_decoder" if plan.expert_parallel > 1 else "plain_decoder"
    model = shard(build(name, run), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    return [step.loss for step in train(state, plan)]


AXES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tensor": ({"tensor": 2, "length": 8}, []),
    "expert": ({"expert": 2, "model": "plain_mixture_decoder"}, []),
    "offload": ({}, ["offload.tier=params+optimizer:cpu"]),
    "accumulated, recomputed": ({"accumulation": (2, "last_microbatch"), "recompute": "full"}, []),
}


@pytest.mark.parametrize(
    ("axis", "form"), [*((axis, BOTH) for axis in AXES), ("tensor", LEVELS), ("expert", LEVELS)]
)
def test_compression_goes_with_other_axes(axis: str, form: tuple[str, ...], ranks: Any) -> None:
    options, extra = AXES[axis]
    plain = ranks(4).run(losses_of_decoder, extra, options)[0]
    for losses in ranks(4).run(losses_of_decoder, [*extra, *form], options):
        assert losses != plain
        assert losses[0] == pytest.approx(plain[0], rel=2e-3)
        assert losses == pytest.approx(plain, rel=1e-2)

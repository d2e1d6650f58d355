"""shard(model, plan): the same numbers for any module tree, settings of units, wrong uses."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.errors import PlanError, ShardError
from fullshard.parallel.blocks import called_modules_with_parameters
from fullshard.parallel.materialize import materialize
from fullshard.training.shard import shard
from tests.fakes.architectures import ARCHITECTURES, Block, loss_of, on_meta, tokens_of, whole
from tests.fakes.plans import STRATEGIES, plan_of

POLICIES: dict[str, tuple[str, ...]] = {
    "block": (),
    "size": ("sharding.units.min_parameters=60",),
    "predicate": (),
}
RECOMPUTE = ("none", "full", "selective")
Mode = tuple[str, str]


def check_gradients(name: str, settings: tuple[str, ...], predicate: bool = False) -> None:
    """Two microbatches, of other tokens on each rank: the mean gradient over ranks, summed over both."""
    world_size = dist.get_world_size()
    plain, model = materialize(on_meta(name), seed=0), on_meta(name)
    third = list(called_modules_with_parameters(model))[1::3]
    units = (lambda name, _: name in third) if predicate else None
    shard(model, plan_of(world_size, *settings), units=units)
    for step in range(2):
        tokens = tokens_of(100 * step + dist.get_rank())
        loss_of(plain, tokens).backward()
        loss_of(model, tokens).backward()
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(whole(sharded[key]), parameter), key
        if parameter.requires_grad and parameter.ndim > 0:  # scalars are the training step's to reduce
            mean = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(mean)
            own = sharded[key].grad
            torch.testing.assert_close(
                torch.zeros_like(mean) if own is None else whole(own),
                mean / world_size,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, key=key: f"{name}, gradient of {key}: {text}",
            )


def check_gradients_in(name: str, modes: list[Mode]) -> None:
    for policy, recompute in modes:
        settings = (*POLICIES[policy], f"recompute.mode={recompute}")
        check_gradients(name, settings, policy == "predicate")


def some_modes() -> list[tuple[str, list[Mode]]]:
    """Each architecture in the default mode, and in one of the others, by turns."""
    modes = list(itertools.product(POLICIES, RECOMPUTE))
    # 7 shares no factor with the number of modes, 12: all of them have their turn.
    return [(name, [modes[0], modes[7 * i % len(modes)]]) for i, name in enumerate(ARCHITECTURES, start=1)]


@pytest.mark.parametrize(("name", "modes"), some_modes(), ids=ARCHITECTURES)
def test_sharded_gradients_are_the_unsharded_ones(name: str, modes: list[Mode], ranks: Any) -> None:
    ranks(2).run(check_gradients_in, name, modes)


def test_a_recurrent_block_is_recomputed_whole_in_selective_mode(ranks: Any) -> None:
    ranks(2).run(check_gradients_in, "recurrent", [("block", "selective")])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_gradients_are_the_unsharded_ones_in_every_strategy(strategy: str, ranks: Any) -> None:
    ranks(4).run(check_gradients, "shared_weight", STRATEGIES[strategy])


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_gradients_in_the_full_cross_of_modes(name: str, ranks: Any) -> None:
    ranks(2).run(check_gradients_in, name, list(itertools.product(POLICIES, RECOMPUTE)))


def check_gradients_of_unreached_experts() -> list[int]:
    """All tokens of a rank are one token, and so go to one expert of the first block."""
    rank = dist.get_rank()
    plain, model = materialize(on_meta("listed_experts"), seed=0), on_meta("listed_experts")
    shard(model, plan_of(dist.get_world_size()))
    tokens = torch.full((2, 6), 3 * rank)
    for one in (plain, model):
        loss_of(one, tokens).backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    first = plain.blocks[0].moe.experts
    reached = [i for i, expert in enumerate(first) if expert.weight.grad is not None]
    for name, parameter in plain.named_parameters():
        mean = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(mean)
        torch.testing.assert_close(whole(own[name]), mean / dist.get_world_size(), rtol=1e-4, atol=1e-6)
    return reached


def test_experts_that_a_rank_does_not_reach_have_the_right_gradient(ranks: Any) -> None:
    reached = ranks(2).run(check_gradients_of_unreached_experts)
    assert [len(one) for one in reached] == [1, 1]
    assert reached[0] != reached[1]


# Mixed in one model #
def settings_in_effect(*overrides: str) -> dict[str, dict[str, Any]]:
    """By unit: whether it is gathered after forward, the dtype it computes in, how its weight is placed."""
    model = shard(on_meta("decoder"), plan_of(dist.get_world_size(), *overrides))
    watched = {
        "embedding": "weight",
        "blocks.0": "attention.query.weight",
        "blocks.1": "attention.query.weight",
    }
    watched["head"] = "weight"
    seen: dict[str, dict[str, Any]] = {name: {} for name in watched}
    for name, key in watched.items():
        module, found = model.get_submodule(name), seen[name]
        parameter = module.get_parameter(key)
        assert isinstance(parameter, DTensor)
        found["rows"] = parameter.to_local().shape[0] / parameter.shape[0]
        found["mesh"] = parameter.device_mesh.shape
        module.register_forward_pre_hook(
            lambda m, _, key=key, found=found: found.update(dtype=str(m.get_parameter(key).dtype))
        )
    model(tokens_of(0))
    for name, key in watched.items():
        own = model.get_submodule(name).get_parameter(key)
        seen[name]["gathered"] = not isinstance(own, DTensor)
    return seen


def overrides_of(text: str) -> str:
    return f"sharding.units.overrides=[{text}]"


def test_without_overrides_all_units_except_the_last_are_alike(ranks: Any) -> None:
    for seen in ranks(2).run(settings_in_effect):
        alike = {"rows": 0.5, "mesh": (2,), "dtype": "torch.float32"}
        assert seen["blocks.0"] == seen["blocks.1"] == {**alike, "gathered": False}
        assert seen["head"]["gathered"]  # its backward comes next


def test_reshard_after_forward_can_be_overridden_per_unit(ranks: Any) -> None:
    text = '{match="blocks.0", reshard_after_forward=false}, {match="head", reshard_after_forward=true}'
    for seen in ranks(2).run(settings_in_effect, overrides_of(text)):
        gathered = {name for name, found in seen.items() if found["gathered"]}
        assert gathered == {"blocks.0"}


def test_precision_of_a_unit(ranks: Any) -> None:
    text = '{match="blocks.0", precision="fp32"}, {match="*head", precision="fp32"}'
    for seen in ranks(2).run(settings_in_effect, overrides_of(text), "precision.mode=bf16"):
        full = {name for name, found in seen.items() if found["dtype"] == "torch.float32"}
        assert full == {"blocks.0", "head"}


def test_a_small_unit_is_left_unsharded(ranks: Any) -> None:
    for seen in ranks(2).run(settings_in_effect, overrides_of('{match="embedding", strategy="no_shard"}')):
        assert seen["embedding"]["rows"] == 1.0
        assert seen["embedding"]["mesh"] == (2, 1)
        assert seen["blocks.0"]["rows"] == 0.5


# Other methods than forward #
class Speaking(nn.Module):
    """Calls its parts from a method that is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = on_meta("tied_decoder")
        self.scale = nn.Parameter(torch.empty(4, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * self.scale.sum()

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(2):
            logits = self.inner(tokens) * self.scale.sum()
            tokens = torch.cat([tokens[:, 1:], logits[:, -1:].argmax(-1)], dim=1)
        return tokens


def generated(methods: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    plain = materialize(Speaking(), seed=0)
    model = shard(Speaking(), plan_of(dist.get_world_size()), methods=methods)
    first = model.generate(tokens_of(0))
    loss_of(model, tokens_of(1)).backward()  # and training continues
    torch.testing.assert_close(model.generate(tokens_of(0)), first)
    return first, plain.generate(tokens_of(0))


def test_methods_named_to_shard_gather_parameters_as_forward_does(ranks: Any) -> None:
    for sharded, plain in ranks(2).run(generated, ("generate",)):
        assert torch.equal(sharded, plain)


def test_absent_method_is_refused(ranks: Any) -> None:
    with pytest.raises(ShardError, match="no method 'speak'"):
        ranks(1).run(generated, ("speak",))


def forward_of_batch_norm(*settings: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    names = ('sharding.units.names=["0", "1"]', *settings)
    shard(model, plan_of(dist.get_world_size(), *names))(torch.randn(8, 4)).sum().backward()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_batch_norm_in_half_precision_on_a_cpu_is_refused_by_name(mode: str, ranks: Any) -> None:
    with pytest.raises(ShardError, match=rf"batch norm of 0\.1\.weight in {mode} on a CPU"):
        ranks(1).run(forward_of_batch_norm, f"precision.mode={mode}")


def test_a_batch_norm_may_be_in_a_unit_in_fp32(ranks: Any) -> None:
    fp32 = overrides_of('{match="0", precision="fp32"}')
    ranks(1).run(forward_of_batch_norm, "precision.mode=bf16", fp32)


# Computing with what is not gathered #
class Reading(nn.Module):
    """As Whisper: multiplies with the embedding's weight, which no module of its own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def read_elsewhere(*settings: str) -> None:
    with torch.device("meta"):
        plain, model = Reading(), Reading()
    materialize(plain, seed=0)
    shard(model, plan_of(dist.get_world_size(), *settings))
    for one in (plain, model):
        loss_of(one, tokens_of(0)).backward()
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), expected.grad, rtol=1e-4, atol=1e-6)


def test_a_weight_that_is_read_elsewhere_is_named_as_the_cause(ranks: Any) -> None:
    with pytest.raises(
        ShardError, match="parameter that is not gathered(.|\n)*reshard_after_forward = false"
    ):
        ranks(2).run(read_elsewhere)


def test_a_weight_that_is_read_elsewhere_may_be_kept_gathered(ranks: Any) -> None:
    ranks(2).run(read_elsewhere, overrides_of('{match="embedding", reshard_after_forward=false}'))


# Refused #
def shard_twice() -> None:
    plan = plan_of(1)
    shard(shard(on_meta("decoder"), plan), plan)


def shard_dtensors() -> None:
    model = materialize(on_meta("decoder"), seed=0)
    mesh = init_device_mesh("cpu", (1,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh))
    shard(model, plan_of(1))


def shard_for_other_ranks() -> None:
    shard(on_meta("decoder"), plan_of(3))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (shard_twice, ShardError, "sharded already"),
        (shard_dtensors, ShardError, "holds DTensors already"),
        (shard_for_other_ranks, PlanError, "the plan is for 3 ranks"),
    ],
)
def test_sharded_models_and_other_world_sizes_are_refused(
    function: Callable[[], None], error: type[Exception], message: str, ranks: Any
) -> None:
    with pytest.raises(error, match=message):
        ranks(1).run(function)


def test_sharding_needs_a_process_group() -> None:
    with pytest.raises(PlanError, match="no process group"):
        shard(on_meta("decoder"), plan_of(1))

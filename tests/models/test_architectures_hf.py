"""Each architecture of transformers, sharded and described, equals the unsharded model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.models.build import build_model
from fullshard.models.loss import Loss, choose_loss
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe import describe
from fullshard.spec.run import Run
from fullshard.training.shard import shard
from tests.fakes.architectures import whole
from tests.fakes.architectures_hf import CONFIGS, LENGTH, QUICK, batch_of, write_config
from tests.fakes.plans import plan_of
from tests.fakes.sampling import sampled

SOME = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CONFIGS]


def built(name: str, *settings: str) -> tuple[nn.Module, Run]:
    with tempfile.TemporaryDirectory() as directory:
        write_config(name, Path(directory))
        run = Run.load(overrides=[f"model.hf={directory}", *settings])
        return build_model(run), run


def of_transformers(name: str, *, eager: bool = False, **changed: Any) -> Any:
    """As transformers builds it, with values. `eager`: attention and experts are spelled out in matmuls."""
    config = transformers.CONFIG_MAPPING[CONFIGS[name]["model_type"]].from_dict(CONFIGS[name] | changed)
    if eager:
        config._attn_implementation = config._experts_implementation = "eager"
    config.use_cache = False
    return getattr(transformers, CONFIGS[name]["architectures"][0])(config)


def loss_sum_and_count(loss: Loss, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    value = loss(model, batch)
    return value if isinstance(value, tuple) else (value, torch.tensor(1))


def check_against_the_unsharded(name: str, settings: tuple[str, ...] = ()) -> float:
    """Both lose the same, and the mean of the gradients over ranks, each with a batch of its own, is one."""
    world_size = dist.get_world_size()
    plain, (model, run) = of_transformers(name), built(name, "train.loss_chunk=5")
    plain.load_state_dict(materialize(built(name)[0], seed=0).state_dict())
    shard(model, plan_of(world_size, *settings))
    loss, batch = choose_loss(run, model), batch_of(name, dist.get_rank())
    whole_logits = choose_loss(built(name)[1], plain)
    expected = loss_sum_and_count(whole_logits, plain, batch)
    seen = loss_sum_and_count(loss, model, batch)
    assert expected[1] == seen[1]
    torch.testing.assert_close(seen[0], expected[0], rtol=1e-6, atol=1e-6)
    expected[0].backward()
    seen[0].backward()
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(whole(sharded[key]), parameter), key
        if parameter.ndim == 0:
            continue  # the training step's to reduce
        mean = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(mean)
        own = sharded[key].grad
        torch.testing.assert_close(
            torch.zeros_like(mean) if own is None else whole(own),
            mean / world_size,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, key=key: f"{name}, gradient of {key}: {text}",
        )
    return float(seen[0].detach())


@pytest.mark.parametrize("name", SOME)
def test_sharded_loss_and_gradients_equal_the_unsharded(name: str, ranks: Callable[..., Any]) -> None:
    ranks(2).run(check_against_the_unsharded, name)


@pytest.mark.parametrize("name", sampled(CONFIGS, here=["mixtral"]))
def test_described_counts_are_those_of_the_model_itself(name: str) -> None:
    """Parameters as they are; three times the FLOP that torch counts in a forward spelled out in matmuls."""
    (model, run), batch = built(name), batch_of(name, 0)
    plain, loss = of_transformers(name, eager=True), choose_loss(run, model)
    plan = plan_of(1, "train.global_batch=2", "recompute.mode=none", f"data.sequence_length={LENGTH}")
    meta = {key: tensor.to("meta") for key, tensor in batch.items()}
    spec = describe(model, plan, loss=loss, batch=meta)
    with FlopCounterMode(display=False) as counted:
        loss(plain, batch)
    assert spec.numel == sum(parameter.numel() for parameter in plain.parameters())
    assert spec.flops_per_token == pytest.approx(3 * counted.get_total_flops() / (2 * LENGTH), rel=1e-9)


def test_a_causal_model_is_described_with_the_kernel_that_it_runs() -> None:
    """Traced as transformers would by itself, it would make a mask, and leave the causal kernel."""
    model, run = built("llama", "recompute.mode=none", f"data.sequence_length={LENGTH}")
    spec = describe(model, run, loss=choose_loss(run, model), device_type="cpu")
    attention = [kernel for kernel in spec.kernels if kernel.kind == "attention"]
    assert attention
    assert all(kernel.causal for kernel in attention)


@pytest.mark.parametrize("name", SOME)
def test_buffers_are_those_that_transformers_computes(name: str) -> None:
    own, expected = dict(built(name)[0].named_buffers()), dict(of_transformers(name).named_buffers())
    assert own.keys() == expected.keys()
    for key, buffer in expected.items():
        assert torch.equal(own[key], buffer), key

"""Greedy generation: the tokens of the unsharded model, whatever ranks ask for, and no trace afterwards."""

import os
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.distributed.unit_order import take_unit_events
from fullshard.errors import TrainError
from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import meta_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.torch_private.fsdp import list_units, parameter_groups
from fullshard.training.generate import generate
from fullshard.training.shard import shard
from tests.fakes.plans import STRATEGIES

# Prompts of two lengths on one rank, of one on the other; none on a third, and one on a fourth.
PROMPTS = ([[1, 2, 3], [4, 5, 6], [7], [8, 9, 10], [11]], [[3, 1, 4, 1, 5]], [], [[2, 7]])
COUNT, LAYERS = 6, 3


def decoder(run: Run) -> nn.Module:
    with torch.device("meta"):
        return DecoderModel(run.decoder_config)


def llama(_run: Run) -> nn.Module:
    from transformers import LlamaConfig  # noqa: PLC0415

    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    tokens = {"bos_token_id": 1, "eos_token_id": 22, "pad_token_id": 0}
    with TemporaryDirectory() as directory:
        LlamaConfig(**sizes, **heads, **tokens).save_pretrained(directory)
        return meta_model(directory)


MODELS = {"decoder": decoder, "llama": llama}


def run_of(*settings: str) -> Run:
    sizes = (
        f"model.layers={LAYERS}",
        "model.d_model=16",
        "model.heads=2",
        "model.d_ff=24",
        "model.vocabulary=23",
    )
    return Run.load(overrides=[*sizes, "precision.mode=fp32", *settings])


def continue_unsharded(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Computes all logits of one sequence for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            output = model.eval()(torch.tensor([tokens]))
            tokens.append(int(getattr(output, "logits", output)[0, -1].argmax()))
    return tokens[len(prompt) :]


def generated(kind: str, settings: tuple[str, ...], *, end: bool) -> tuple[Any, Any, int, bool]:
    """Returns (answers, those of the unsharded model, gathers of units, whether units are as before)."""
    run, rank = run_of(*settings), dist.get_rank()
    plain = materialize(MODELS[kind](run), seed=run.run.seed)
    expected = [continue_unsharded(plain, prompt, COUNT) for prompt in PROMPTS[rank]]
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(MODELS[kind](run), plan)
    groups = [group for unit in list_units(model) for group in parameter_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    end_token = continue_unsharded(plain, PROMPTS[0][0], COUNT)[2] if end else None
    take_unit_events(model)
    found = generate(model, PROMPTS[rank], plan=plan, max_new_tokens=COUNT, end_token=end_token, batch=2)
    gathers = len(take_unit_events(model).numbers)
    is_as_before = all(not group.is_unsharded for group in groups) and model.training
    is_as_before &= [group.post_forward_mesh_info for group in groups] == before
    if end_token is not None:
        expected = [a[: a.index(end_token) + 1] if end_token in a else a for a in expected]
    return found, expected, gathers, is_as_before


@pytest.mark.parametrize("end", [False, True], ids=["all", "ended"])
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (3, STRATEGIES["full_shard"]),
        (3, STRATEGIES["shard_grad_op"]),
        (4, STRATEGIES["hybrid_shard"]),
        (2, ("offload.tier=params+optimizer:cpu",)),
    ],
    ids=lambda one: str(one)[:50],
)
@pytest.mark.parametrize("kind", MODELS)
def test_generated_tokens_are_those_of_the_unsharded_model(
    kind: str, world: int, settings: tuple[str, ...], end: bool, ranks: Any
) -> None:
    call = partial(generated, kind, settings, end=end)
    for found, expected, gathers, is_as_before in ranks(world).run(call):
        assert found == expected
        assert is_as_before
        assert gathers <= LAYERS + 3, "each unit is gathered once for all tokens"


def generated_without_memory() -> tuple[Any, Any, int, bool]:
    os.environ["LOCAL_WORLD_SIZE"] = str(10**15)  # among which the host's memory is shared
    return generated("llama", STRATEGIES["full_shard"], end=True)


def test_units_are_gathered_for_each_token_if_the_model_does_not_fit(ranks: Any) -> None:
    for found, expected, gathers, is_as_before in ranks(3).run(generated_without_memory):
        assert found == expected
        assert is_as_before
        assert gathers > 4 * LAYERS


def refused(settings: str, prompts: list[list[int]]) -> str:
    run = run_of(settings)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(decoder(run), plan)
    with pytest.raises(TrainError) as raised:
        generate(model, prompts, plan=plan, max_new_tokens=COUNT)
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "prompts", "message"),
    [
        ("sharding.tensor_parallel=2", [[1]], "sharding.tensor_parallel = 2"),
        ("sharding.context_parallel=2", [[1]], "sharding.context_parallel = 2"),
        ("model.max_sequence=64", [[1] * 59], "59 tokens, and 6 new ones"),
        ("model.max_sequence=64", [[]], "prompts of 0 to 0 tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    settings: str, prompts: list[list[int]], message: str, ranks: Any
) -> None:
    assert all(message in text for text in ranks(2).run(refused, settings, prompts))

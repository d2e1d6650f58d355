"""A base in 4 or 8 bits computes what the dequantised model does, at any rank count."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from fullshard.distributed.tensors import storage_key
from fullshard.errors import ShardError
from fullshard.models.build import build_model
from fullshard.models.loss import next_token_loss
from fullshard.models.packed_weights import (
    NF4_LEVELS,
    PackedWeight,
    count_elements,
    describe_packing,
    find_packed_weights,
    pack_frozen_weights,
    pack_rows,
    unpack_rows,
    unpack_weight,
)
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.gradients import sum_gradients_over_tensor_axis
from fullshard.training.shard import shard
from tests.fakes.architectures import whole
from tests.fakes.architectures_hf import CONFIGS
from tests.fakes.data import global_batch
from tests.fakes.families import MIXTURES

VOCABULARY = 32
DECODER = [
    *("model.d_model=128", "model.layers=2", "model.d_ff=256", f"model.vocabulary={VOCABULARY}"),
    "model.heads=4",
]
FIXED = ["train.global_batch=12", "data.sequence_length=8", "adapter.rank=4"]
MIXTURE = ("model.experts=4", "model.experts_per_token=2")
WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 128),
}
# Models of transformers, and their adapters: of experts or beside them, and of transposed matrices.
STACKS = "adapter.options={target_parameters = ['experts.gate_up_proj', 'experts.down_proj']}"
OF_TRANSFORMERS = {
    "mixtral": ('adapter.targets=["q_proj"]',),
    "qwen3_moe": ('adapter.targets=["q_proj", "gate_proj", "up_proj", "down_proj"]',),
    "gpt_oss": ('adapter.targets=["q_proj"]', STACKS),
    "gpt2": ('adapter.targets=["c_attn"]',),
}
Form = Literal["nf4", "int8"]
FORMS: list[Form] = ["nf4", "int8"]
Ranks = Callable[[int], Any]


def run_of(form: str, *settings: str) -> Run:
    shapes = [] if any(one.startswith("model.hf=") for one in settings) else DECODER
    return Run.load(overrides=[*shapes, *FIXED, f"adapter.base_dtype={form}", *settings])


def settings_of(settings: Sequence[str], directory: Path) -> list[str]:
    """The settings, with those of a model in the place of its name in OF_TRANSFORMERS."""
    if not settings or settings[0] not in OF_TRANSFORMERS:
        return [*settings]
    name, *others = settings
    config = {**CONFIGS, **MIXTURES}[name]
    (directory / "config.json").write_text(json.dumps({**config, **WIDTHS}))
    return [f"model.hf={directory}", *OF_TRANSFORMERS[name], *others]


# Rows #
def round_trip(weight: Tensor, form: Form) -> Tensor:
    packed = PackedWeight("w", form, (weight.shape[0], weight.shape[1]))
    return unpack_weight(pack_rows(weight, packed), packed, dtype=torch.float32)


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """QLoRA, appendix E: zero, and quantiles of N(0, 1) evenly spaced on either side, over the largest."""

    def quantiles(count: int) -> list[float]:
        places = torch.linspace(0.9677083, 0.5, count, dtype=torch.float64)[:-1]
        return torch.special.ndtri(places).tolist()

    levels = torch.tensor(sorted([*quantiles(9), 0.0, *(-one for one in quantiles(8))]))
    torch.testing.assert_close(levels / levels.abs().max(), torch.tensor(NF4_LEVELS), atol=2e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_each_element_takes_its_nearest_level(form: Form, seed: int, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
    levels = torch.tensor(NF4_LEVELS) if form == "nf4" else torch.arange(-127, 128) / 127
    found = round_trip(weight, form).view(3, 2, 64)
    # The scales of blocks that were stored: multiples of 1/255 of the row's largest value.
    factor = weight.float().abs().amax(1).view(3, 1, 1) / 255
    blocks = weight.float().view(3, 2, 64)
    scales = (blocks.abs().amax(2, keepdim=True) / factor).ceil().clamp(max=255) * factor
    errors = (blocks.unsqueeze(-1) - scales.unsqueeze(-1) * levels).abs().amin(-1)
    torch.testing.assert_close((found - blocks).abs(), errors, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_are_exact_and_signs_and_tiny_rows_are_kept(form: Form) -> None:
    weight = torch.randn(4, 128)
    weight[0], weight[1, :64], weight[2] = 0, 0, weight[2] * 1e-20
    found = round_trip(weight, form)
    assert torch.equal(found[0], torch.zeros(128))
    assert torch.equal(found[1, :64], torch.zeros(64))
    assert ((found - weight).norm(dim=1)[1:] / weight.norm(dim=1)[1:] < 0.11).all()
    assert (found * weight >= 0).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_infinity_or_nan_is_refused_by_name(value: float) -> None:
    weight = torch.ones(3, 64)
    weight[1, 7] = value
    with pytest.raises(ShardError, match=r"blocks\.0\.w cannot be packed"):
        pack_rows(weight, PackedWeight("blocks.0.w", "nf4", (3, 64)))


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_columns_are_packed_and_unpacked_alone(form: Form) -> None:
    weight = torch.randn(7, 192).bfloat16()
    packed = PackedWeight("w", form, (7, 192))
    rows = pack_rows(weight, packed)
    assert torch.equal(rows, torch.cat([pack_rows(one, packed) for one in weight.split(2)]))
    some = unpack_rows(rows[2:5], weight, form=form, first=64, columns=128)
    assert torch.equal(some, unpack_weight(rows, packed, dtype=torch.bfloat16)[2:5, 64:])


# Choice #
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wide, self.odd = nn.Linear(64, 2), nn.Linear(64, 7), nn.Linear(60, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 64), nn.Linear(64, 9)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layers[1].wide.weight = self.layers[0].wide.weight
        self.requires_grad_(False)


def test_what_is_not_packed_is_printed_with_names_and_counts() -> None:
    with torch.device("meta"):
        model = Mixed()
        elements = count_elements(model)
        pack_frozen_weights(model, "nf4")
    assert set(find_packed_weights(model)) == {
        f"layers.{i}.experts.{j}.weight" for i in (0, 1) for j in (0, 1)
    }
    assert count_elements(model) == elements
    text = describe_packing(model)
    parts = [
        *("4 frozen matrices in nf4", "2 outside of the blocks: embedding.weight, head.weight"),
        *("2 of routers: layers.0.gate.weight", "tied: layers.0.wide.weight"),
        "2 of columns that 64 does not divide: layers.0.odd.weight",
    ]
    for part in parts:
        assert part in text


def test_a_model_without_such_matrices_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ShardError, match="no matrix to pack"):
        pack_frozen_weights(nn.ModuleList([nn.Linear(60, 4)]).requires_grad_(False), "nf4")


def test_an_input_that_was_cast_to_the_dtype_of_bytes_is_refused_by_name() -> None:
    model = pack_frozen_weights(nn.ModuleList([nn.Linear(64, 4)]).requires_grad_(False), "nf4")
    with pytest.raises(ShardError, match=r"the input of 0\.weight was cast to uint8"):
        model[0](torch.ones(2, 64, dtype=torch.uint8))


# Matmuls #
def dequantised(run: Run) -> nn.Module:
    """The unsharded model of `run`, with matrices in the place of packed bytes."""
    model = materialize(build_model(run), seed=run.run.seed)
    for name, packed in find_packed_weights(model).items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        matrix = unpack_weight(getattr(module, key).data, packed, dtype=torch.float32)
        setattr(module, key, nn.Parameter(matrix, requires_grad=False))
        for attribute in ("forward", "_fullshard_reader"):
            vars(module).pop(attribute, None)
    for module in model.modules():
        vars(module).pop("_fullshard_packed", None)
    return model


def own_rows(plan: Plan, rank: int) -> dict[str, Tensor]:
    batch = global_batch(0, sequences=12, length=8, vocabulary=VOCABULARY)
    return {k: one.chunk(plan.data_parallel_degree)[rank // plan.tensor_parallel] for k, one in batch.items()}


@torch.no_grad()  # torch may choose another matmul for weights with gradients
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def logits_and_gradients(run: Run) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of this rank's rows, and the adapters' gradients of all."""
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(build_model(run), plan)
    batch = own_rows(plan, dist.get_rank())
    total, _ = next_token_loss(model, batch)
    (total * plan.data_parallel_degree).backward()
    sum_gradients_over_tensor_axis([p.grad for p in model.parameters() if p.grad is not None])
    logits = logits_of(model, batch["tokens"])
    return logits, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


BITWISE = [
    *(("nf4", 1), ("nf4", 2), ("int8", 2), ("nf4", 3)),
    *(("nf4", 1, *MIXTURE), ("int8", 2, *MIXTURE), ("nf4", 3, *MIXTURE)),
    *(("nf4", 2, "qwen3_moe"), ("nf4", 3, "gpt_oss")),
]


@pytest.mark.parametrize("case", BITWISE, ids=str)
def test_logits_in_bf16_are_bitwise_those_of_the_dequantised_model(
    ranks: Ranks, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    form, count, *settings = case
    run = run_of(form, "precision.mode=bf16", *settings_of(settings, tmp_path))
    reference, plan = dequantised(run), Plan.from_run(run, world_size=count)
    for parameter in reference.parameters():  # not buffers, which stay in fp32
        parameter.data = parameter.data.bfloat16()
    for rank, (logits, _) in enumerate(ranks(count).run(logits_and_gradients, run)):
        assert torch.equal(logits, logits_of(reference, own_rows(plan, rank)["tokens"]))


CASES = [
    (1, "nf4"),
    (3, "int8"),
    (2, "nf4", "recompute.mode=full"),
    (2, "int8", "recompute.mode=selective"),
    (2, "nf4", "sharding.tensor_parallel=2"),
    (4, "int8", "sharding.tensor_parallel=2"),
    (4, "nf4", "sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
    (2, "nf4", "offload.tier=params+optimizer:cpu"),
    (3, "nf4", *MIXTURE, "recompute.mode=selective"),
    (2, "int8", *MIXTURE, "offload.tier=params+optimizer:cpu"),
    (2, "nf4", *MIXTURE, "recompute.mode=offload"),
    (4, "nf4", *MIXTURE, "sharding.expert_parallel=2"),
    (2, "nf4", *MIXTURE, "model.shared_experts=1", "sharding.tensor_parallel=2"),
    (1, "int8", "mixtral", "recompute.mode=full"),
    (3, "nf4", "gpt_oss"),
    (4, "nf4", "qwen3_moe", "sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
    (2, "nf4", "gpt2"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_adapters_are_those_of_the_dequantised_model(
    ranks: Ranks, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    count, form, *settings = case
    run = run_of(form, "precision.mode=fp32", *settings_of(settings, tmp_path))
    reference = dequantised(run).float()
    total, _ = next_token_loss(reference, global_batch(0, sequences=12, length=8, vocabulary=VOCABULARY))
    total.backward()
    expected = {name: one.grad for name, one in reference.named_parameters() if one.requires_grad}
    for _, gradients in ranks(count).run(logits_and_gradients, run):
        assert gradients.keys() == expected.keys()
        for name, own in gradients.items():
            torch.testing.assert_close(own, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def refusal(run: Run) -> str:
    with pytest.raises(ShardError) as caught:
        logits_and_gradients(run)
    return str(caught.value)


def test_columns_that_ranks_cannot_divide_by_blocks_are_refused_by_name(ranks: Ranks) -> None:
    run = run_of("nf4", "model.d_ff=192", "sharding.tensor_parallel=2")
    for text in ranks(2).run(refusal, run):
        assert "feed_forward.down.base_layer.weight cannot be divided over 2 ranks" in text


@pytest.mark.filterwarnings("ignore:.*(script_method|not be instantiated):DeprecationWarning")  # torch's
def test_a_compiled_block_is_one_graph_that_saves_packed_bytes() -> None:
    torch._dynamo.reset()
    model = materialize(build_model(run_of("nf4")), seed=0).float()
    block, rotary = model.blocks[0], model.positions(8, None, torch.float32)
    x = torch.randn(2, 8, 128, requires_grad=True)
    wanted = [x, *(one for one in block.parameters() if one.requires_grad)]
    saved: dict[int, tuple[int, torch.dtype]] = {}

    def remember(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = (tensor.numel(), tensor.dtype)
        return tensor

    def outcomes(forward: Callable[..., Tensor]) -> list[Tensor]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            y = forward(x, rotary)
        assert sum(dtype == torch.uint8 for _, dtype in saved.values()) == 7
        assert max(numel for numel, _ in saved.values()) < 256 * 128  # no matrix
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    eager = outcomes(block.forward)
    compiled = outcomes(torch.compile(block.forward, backend=aot_eager_decomp_partition, fullgraph=True))
    for own, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)

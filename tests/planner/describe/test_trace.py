"""Models whose shapes and flow depend on integers of the batch are described with the values of these."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.errors import TraceError
from fullshard.models.build import attention_window_share
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe import describe
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.architectures import LENGTH as LENGTH_OF_OWN
from tests.fakes.architectures import VOCABULARY, WIDTH, Block, loss_of
from tests.fakes.families import LENGTH, VISION_LANGUAGE, batch_of_family
from tests.fakes.sampling import sampled
from tests.training.test_families import built, of_transformers


def described(name: str, batch: dict[str, Tensor]) -> ModelSpec:
    model, run = built(name, "recompute.mode=none", f"data.sequence_length={LENGTH}")
    plan = Plan.from_run(run, world_size=2)
    return describe(model, plan, loss=choose_loss(run, model), batch=batch)


@pytest.mark.parametrize("name", sampled(VISION_LANGUAGE, here=["qwen2_vl"]))
def test_a_vision_language_model_is_described_with_the_sizes_of_its_images(name: str) -> None:
    """Three times the FLOP that torch counts in a forward, spelled out in matmuls, within the windows."""
    batch = batch_of_family(name, 0)
    spec = described(name, batch)
    plain = of_transformers(name)
    for part in plain.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counted:
        plain(**batch)
    assert spec.numel == sum(parameter.numel() for parameter in plain.parameters())
    attention = counted.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)
    outside = (1 - attention_window_share(plain, sequence_length=LENGTH)) * attention
    assert spec.flops_per_token == pytest.approx(
        3 * (counted.get_total_flops() - outside) / (2 * LENGTH), rel=1e-9
    )


def test_without_the_sizes_of_its_images_it_cannot_be_described() -> None:
    batch = {key: tensor.to("meta") for key, tensor in batch_of_family("qwen2_vl", 0).items()}
    with pytest.raises(TraceError, match="with values"):
        described("qwen2_vl", batch)


class ChangingBlock(Block):
    """Changes the result of a matmul in place, which selective recompute has saved."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.mm(x.flatten(0, 1), self.down.weight[:, :WIDTH]).add_(1.0)).view_as(x)


class ChangingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ChangingBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_recompute_mode_that_cannot_be_traced_is_left_out_and_named() -> None:
    run = Run.load(overrides=["precision.mode=fp32", "train.global_batch=2"])
    batch = torch.empty((1, LENGTH_OF_OWN), dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = ChangingModel()
    spec = describe(model, run, loss=loss_of, batch=batch, device_type="cpu")
    (left_out,) = spec.untraced
    assert left_out.recompute.mode == "selective"
    assert "has been mutated" in str(left_out)
    traced = {trace.recompute.mode for trace in spec.traces}
    assert traced == {"none", "full"}
    alone = run.with_overrides(["recompute.mode=selective"])
    with pytest.raises(TraceError, match="has been mutated"):
        describe(model, alone, loss=loss_of, batch=batch, device_type="cpu")

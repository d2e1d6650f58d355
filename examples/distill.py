"""Two models: a small one learns from the probabilities of a larger one, sharded on the same ranks.

torchrun --nproc-per-node 2 examples/distill.py [section.key=value ...]

The loss of a token is the divergence KL(teacher || student) of the next token's probabilities, at a
temperature: Hinton et al., arXiv:1503.02531. The teacher here has random weights; fs.load_pretrained reads
others.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs

TEACHER = ["model.layers=3", "model.d_model=128", "model.d_ff=256"]
SETTINGS = [
    *("model.layers=2", "model.d_model=64", "model.d_ff=128", "data.sequence_length=64", "train.steps=30"),
    *("sharding.strategy=full_shard", "recompute.mode=none"),
]


def distillation_loss(
    model: nn.Module, batch: dict[str, Tensor], *, teacher: nn.Module, temperature: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Returns the sum over tokens whose label counts, times temperature², and their number."""
    counts = batch["labels"] != -100
    with torch.no_grad():  # frozen, and no activation is kept
        wanted = F.log_softmax(teacher(batch["tokens"]).float() / temperature, dim=-1)
    own = F.log_softmax(model(batch["tokens"]).float() / temperature, dim=-1)
    divergence = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
    return (divergence * counts).sum() * temperature**2, counts.sum()


class Both(nn.Module):
    """The student, which trains, and its frozen teacher, as one module: sharded and planned together."""

    def __init__(self, model: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.model, self.teacher = model, teacher.requires_grad_(False).eval()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return distillation_loss(self.model, batch, teacher=self.teacher)


def loss_of(both: Both, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return both(batch)


def main(overrides: list[str]) -> None:
    run = fs.Run.load(overrides=[*SETTINGS, *overrides])
    teacher = run.with_overrides(TEACHER).decoder_config  # with the same vocabulary and lengths
    with fs.process_group() as ranks:
        with torch.device("meta"):
            both = Both(fs.DecoderModel(run.decoder_config), fs.DecoderModel(teacher))

        def make_plan() -> fs.Plan:
            spec = fs.describe(both, run, loss=loss_of, device_type=ranks.device.type)
            hardware = fs.detect_hardware(
                ranks.device.type, ranks=ranks.world_size, ranks_per_node=ranks.local_world_size
            )
            return fs.plan(spec, hardware, run)

        plan = fs.call_on_rank_zero(make_plan)
        fs.shard(both, plan)
        optimizer = fs.build_optimizer(both, plan)
        state = fs.TrainState(both, optimizer, data=fs.build_data(run), saved="trained")
        for step in fs.train(state, plan, loss=loss_of):
            if ranks.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: divergence {step.loss:.4f} a token")


if __name__ == "__main__":
    main(sys.argv[1:])

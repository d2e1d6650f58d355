"""Two models: preferences (DPO), against a frozen reference that is sharded on the same ranks.

torchrun --nproc-per-node 2 examples/dpo.py [section.key=value ...]

A pair has one prompt and two answers, of which the first is preferred. The loss of a pair is
-log sigmoid(beta (r(first) - r(second))), where r is the log-probability of an answer under the model that
trains, less that under the reference: Rafailov et al., arXiv:2305.18290, equation 7.

The data are made here: a prompt counts upwards, the preferred answer counts on, the other one counts back.
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs

BETA, PROMPT, LENGTH, VOCABULARY = 0.1, 12, 24, 64
SETTINGS = [
    *(f"model.vocabulary={VOCABULARY}", "model.layers=2", "model.d_model=64", "model.d_ff=128"),
    *(f"data.sequence_length={2 * LENGTH}", "train.global_batch=8", "train.microbatch=2", "train.steps=30"),
    *("sharding.strategy=full_shard", "recompute.mode=none"),
    *("optimizer.learning_rate=1e-3", "schedule.warmup_steps=5"),
]


def log_probabilities(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the log-probability of each answer, (pairs, 2). A label of -100 does not count.

    batch["tokens"], batch["labels"]: (pairs, 2, length) int64, the preferred answer first
    """
    logits = model(batch["tokens"].flatten(0, 1)).float()  # (2 pairs, length, vocabulary)
    labels = batch["labels"].flatten(0, 1)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return -losses.sum(1).view(-1, 2)


def preference_loss(
    model: nn.Module, batch: dict[str, Tensor], *, reference: nn.Module, beta: float = BETA
) -> tuple[Tensor, int]:
    """Returns the sum over pairs, and their number. `batch`: see `log_probabilities`."""
    with torch.no_grad():  # frozen, and no activation is kept
        before = log_probabilities(reference, batch)
    gained = log_probabilities(model, batch) - before
    return -F.logsigmoid(beta * (gained[:, 0] - gained[:, 1])).sum(), len(gained)


class Both(nn.Module):
    """The model that trains, and its frozen reference, as one module: sharded and planned together."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.model, self.reference = model, reference.requires_grad_(False).eval()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return preference_loss(self.model, batch, reference=self.reference)


class Pairs:
    """A source of microbatches by step: the pairs that this rank computes."""

    def microbatches(self, step: int, *, rank: int, plan: fs.Plan) -> Iterator[dict[str, Tensor]]:
        for index in range(plan.accumulation):
            seed = (step * plan.accumulation + index) * plan.data_parallel_degree + plan.data_rank(rank)
            generator = torch.Generator().manual_seed(seed)
            start = torch.randint(VOCABULARY, (plan.microbatch, 1, 1), generator=generator)
            up = torch.arange(LENGTH + 1)
            down = torch.where(up < PROMPT, up, 2 * (PROMPT - 1) - up)
            rows = (start + torch.stack([up, down])) % VOCABULARY  # (pairs, 2, length + 1)
            labels = rows[..., 1:].clone()
            labels[..., : PROMPT - 1] = -100  # the prompt
            yield {"tokens": rows[..., :-1], "labels": labels}


def loss_of(both: Both, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return both(batch)


def main(overrides: list[str]) -> None:
    run = fs.Run.load(overrides=[*SETTINGS, *overrides])
    with fs.process_group() as ranks:
        with torch.device("meta"):
            both = Both(fs.DecoderModel(run.decoder_config), fs.DecoderModel(run.decoder_config))
        tokens = torch.zeros(2, 2, LENGTH, dtype=torch.int64, device="meta")
        batch = {"tokens": tokens, "labels": tokens}
        spec = fs.describe(both, run, loss=loss_of, batch=batch, device_type=ranks.device.type)
        hardware = fs.detect_hardware(
            ranks.device.type, ranks=ranks.world_size, ranks_per_node=ranks.local_world_size
        )
        plan = fs.plan(spec, hardware, run)
        # Random weights, of which a run would have those of a directory in both, after init="none":
        # fs.load_pretrained(both.model, directory, plan=plan), and the same for both.reference
        fs.shard(both, plan)
        optimizer = fs.build_optimizer(both, plan)
        state = fs.TrainState(both, optimizer, data=Pairs(), saved="trained")  # the reference is not saved
        for step in fs.train(state, plan, loss=loss_of):
            if ranks.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: loss {step.loss:.3f} a pair")


if __name__ == "__main__":
    main(sys.argv[1:])

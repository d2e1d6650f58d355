"""Two models: preferences (DPO), against a frozen reference that is sharded on the same ranks.

torchrun --nproc-per-node 2 examples/dpo.py [section.key=value ...]

A pair has one prompt and two answers, of which the first is chosen. The loss of a pair is
-log sigmoid(beta (r(first) - r(second))), where r is the log-probability of an answer under the model that
trains, less that under the reference: Rafailov et al., arXiv:2305.18290, equation 7.

The data are examples/preferences.jsonl: a prompt counts up the alphabet, the chosen answer continues, and the
rejected one counts back.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs

BETA, LENGTH = 0.1, 24
SETTINGS = [
    *("model.layers=2", "model.d_model=64", "model.d_ff=128"),
    *("data.source=jsonl", f"data.paths=['{Path(__file__).with_name('preferences.jsonl')}']"),
    *("data.records=completion", "data.completion_field=chosen", "data.rejected_field=rejected"),
    *("data.train_on=completion", "data.validation_fraction=0", f"data.sequence_length={2 * LENGTH}"),
    *("train.global_batch=8", "train.microbatch=2", "train.steps=30"),
    *("sharding.strategy=full_shard", "recompute.mode=none"),
    *("optimizer.learning_rate=1e-3", "schedule.warmup_steps=5"),
]


def log_probabilities(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the log-probability of each answer, (pairs, 2). A label of -100 does not count.

    batch["tokens"], batch["labels"]: (pairs, 2 length) int64, the chosen answer in the first half of each row
    """
    tokens, labels = (batch[key].unflatten(1, (2, -1)).flatten(0, 1) for key in ("tokens", "labels"))
    output = model(tokens)  # (2 pairs, length, vocabulary), or an object with such logits
    logits = getattr(output, "logits", output).float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return -losses.sum(1).view(-1, 2)


def preference_loss(
    model: nn.Module, batch: dict[str, Tensor], *, reference: nn.Module, beta: float = BETA
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of pairs, and the number of pairs. `batch`: see `log_probabilities`."""
    with torch.no_grad():  # frozen, and no activation is kept
        before = log_probabilities(reference, batch)
    gained = log_probabilities(model, batch) - before
    # A pair without labels in both halves does not count: some fill up the last batch of a validation.
    counts = (batch["labels"] != -100).unflatten(1, (2, -1)).any(2).all(1)
    losses = -F.logsigmoid(beta * (gained[:, 0] - gained[:, 1]))
    return (losses * counts).sum(), counts.sum()


def loss_with_adapters(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns `preference_loss` of a model with LoRA. The reference is the model without adapters.

    A run file names it as `train.loss`.
    """

    def without_adapters(tokens: Tensor) -> Tensor:
        with fs.adapters_off(model):
            return model(tokens)

    return preference_loss(model, batch, reference=without_adapters)


class Both(nn.Module):
    """The model that trains, and its frozen reference, as one module: sharded and planned together."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.model, self.reference = model, reference.requires_grad_(False).eval()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return preference_loss(self.model, batch, reference=self.reference)


def loss_of(both: Both, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return both(batch)


def main(overrides: list[str]) -> None:
    run = fs.Run.load(overrides=[*SETTINGS, *overrides])
    with fs.process_group() as ranks:
        with torch.device("meta"):
            both = Both(fs.DecoderModel(run.decoder_config), fs.DecoderModel(run.decoder_config))

        def make_plan() -> fs.Plan:
            spec = fs.describe(both, run, loss=loss_of, device_type=ranks.device.type)
            hardware = fs.detect_hardware(
                ranks.device.type, ranks=ranks.world_size, ranks_per_node=ranks.local_world_size
            )
            return fs.plan(spec, hardware, run)

        plan = fs.call_on_rank_zero(make_plan)
        # Random weights, of which a run would have those of a directory in both, after init="none":
        # fs.load_pretrained(both.model, directory, plan=plan), and the same for both.reference
        fs.shard(both, plan)
        optimizer, data = fs.build_optimizer(both, plan), fs.build_data(run)
        state = fs.TrainState(both, optimizer, data=data, saved="trained")  # the reference is not saved
        for step in fs.train(state, plan, loss=loss_of):
            if ranks.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: loss {step.loss:.3f} a pair")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Error and bytes of [communication], and whether losses stay within the spread of seeds. On CPU ranks.

python bench/compression.py errors               one step of a small decoder in each format, beside fp32
python bench/compression.py losses [STEPS]       six seeds uncompressed, and in int8 both ways; 500 steps

`errors` prints, for each format, the relative error of the whole gradient, that of the worst tensor, and
the bytes of gathers and of reductions (of two levels: within nodes, and between them), as fractions of fp32.
Four ranks are two nodes of two. `losses` trains on the text of Python's library, on two ranks. It prints the
mean loss of the last tenth of the steps of each run, whether int8's mean lies between the lowest and the
highest of the uncompressed seeds, and the mean difference of pairs with its standard error.
"""

import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

import fullshard as fs
from fullshard.spec.settings.communication_section import wire_bytes

ROWS, LENGTH, VOCABULARY = 8, 64, 256
RANKS = {"errors": 4, "losses": 2}
FORMATS = [  # gather, reduce, reduce_within
    ("auto", "auto", "none"),
    ("bf16", "bf16", "none"),
    ("int8", "auto", "none"),
    ("auto", "int8", "none"),
    ("int8", "int8", "none"),
    ("auto", "int8", "fp32"),
    ("auto", "int8", "bf16"),
    ("auto", "bf16", "fp32"),
    ("auto", "auto", "fp32"),
]


def make_run(
    gather: str, reduce: str, within: str = "none", *, ranks: int, seed: int = 0, steps: int = 1
) -> fs.Run:
    sizes = "vocabulary=256 d_model=128 layers=3 heads=4 kv_heads=4 d_ff=384 max_sequence=64"
    overrides = [f"model.{one}" for one in sizes.split()]
    overrides += [f"communication.gather={gather}", f"communication.reduce={reduce}", f"run.seed={seed}"]
    overrides += [f"communication.reduce_within={within}", "communication.ranks_per_node=2"]
    overrides += [
        f"data.sequence_length={LENGTH}",
        f"train.global_batch={ROWS * ranks}",
        f"train.steps={steps}",
    ]
    return fs.Run.load(overrides=[*overrides, "precision.mode=fp32", "sharding.strategy=full_shard"])


class Walks:
    """Random walks over the vocabulary, which a model can learn to continue: the same for all seeds."""

    def microbatches(self, step: int, *, rank: int, plan: fs.Plan) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step * plan.world_size + rank)
        moves = torch.randint(1, 4, (plan.microbatch, LENGTH + 1), generator=generator)
        rows = moves.cumsum(1) % VOCABULARY
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def make_state(run: fs.Run, data: Any) -> tuple[fs.TrainState, fs.Plan]:
    plan = fs.Plan.from_run(run, world_size=run.train.global_batch // ROWS)
    with torch.device("meta"):
        model = fs.DecoderModel(run.decoder_config)
    model = fs.shard(model, plan)
    return fs.TrainState(model, fs.build_optimizer(model, plan), data=data), plan


def gradients_of_first_step(run: fs.Run) -> dict[str, Tensor]:
    """Returns the whole gradients of the first step. Collective."""
    state, plan = make_state(run, Walks())
    taken: dict[str, Tensor] = {}

    def take(*_: Any) -> None:
        for name, one in state.model.named_parameters():
            taken[name] = cast(Any, one.grad).full_tensor()

    state.optimizer.register_step_pre_hook(take)
    next(iter(fs.train(state, plan)))
    return taken


def print_errors(rank: int) -> None:
    reference: dict[str, Tensor] = {}
    for gather, reduce, within in FORMATS:
        found = gradients_of_first_step(make_run(gather, reduce, within, ranks=RANKS["errors"]))
        reference = reference or found
        difference = {name: found[name] - one for name, one in reference.items()}
        errors = {name: (one.norm() / reference[name].norm()).item() for name, one in difference.items()}
        whole = [torch.cat([t.flatten() for t in each.values()]).norm() for each in (difference, reference)]
        sent = [
            1.0 if kind in ("auto", "fp32") else wire_bytes(cast(Any, kind), 10**6) / 4e6
            for kind in (gather, *([] if within == "none" else [within]), reduce)
        ]
        if rank == 0:
            print(
                f"gather {gather:4} reduce {reduce:4} within {within:4}  error {whole[0] / whole[1]:.1e}  "
                f"worst tensor {max(errors.values()):.1e}  bytes {' '.join(f'{one:.3f}' for one in sent)}",
                flush=True,
            )


def last_loss(run: fs.Run) -> float:
    """Returns the mean loss of the last tenth of the steps. Collective."""
    state, plan = make_state(run, fs.build_data(run))
    losses = [step.loss for step in fs.train(state, plan)]
    return sum(losses[-(len(losses) // 10 or 1) :]) / (len(losses) // 10 or 1)


def print_losses(rank: int, steps: int) -> None:
    found: dict[str, list[float]] = {"auto": [], "int8": []}
    for seed, (kind, losses) in itertools.product(range(6), found.items()):
        run = make_run(kind, kind, ranks=RANKS["losses"], seed=seed, steps=steps)
        losses.append(last_loss(run))
        if rank == 0:
            print(f"seed {seed}, {kind}: {losses[-1]:.4f}", flush=True)
    if rank == 0:
        plain, mean = found["auto"], statistics.mean(found["int8"])
        inside = min(plain) <= mean <= max(plain)
        print(f"uncompressed: {min(plain):.4f} to {max(plain):.4f}, mean {statistics.mean(plain):.4f}")
        print(f"int8: mean {mean:.4f}, {'within' if inside else 'outside'} this spread")
        pairs = [int8 - other for other, int8 in zip(plain, found["int8"], strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        print(f"int8 - uncompressed, by seed: {statistics.mean(pairs):+.4f} ± {error:.4f}")


def main() -> None:
    what, *rest = sys.argv[1:] or ["errors"]
    if what.startswith("rank-"):
        with fs.process_group("cpu") as ranks:
            if what == "rank-errors":
                print_errors(ranks.rank)
            else:
                print_losses(ranks.rank, int(rest[0]))
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS[what]}", __file__]
    steps = rest or ["500"]
    subprocess.run([*command, f"rank-{what}", *itertools.islice(steps, 1)], check=True)


if __name__ == "__main__":
    main()

"""Models, losses, optimizers and data with one fault each, by name; `none` has no fault."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

VOCABULARY, WIDTH, LENGTH = 41, 16, 16


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.mixed, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unsqueeze(1) for one in self.mixed(x).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.fault != "attends to all")
        x = x + self.output(seen.squeeze(1))
        return x + self.feed(x)


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))


class ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Decoder(nn.Module):
    """tokens (rows, sequence) -> logits (rows, sequence, vocabulary)."""

    def __init__(self, fault: str = "none", vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        self._add_fault(fault)

    def _add_fault(self, fault: str) -> None:  # noqa: C901
        if fault == "copied tie":
            self.head.weight = nn.Parameter(self.embedding.weight.data)
        elif fault == "unused":
            self.extra = nn.Linear(WIDTH, WIDTH)
        elif fault == "batch norm":
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        elif fault == "uninitialised":
            self.extra_gain = Uninitialised()
        elif fault == "zeros":
            for block in self.blocks:
                block.mixed, block.output = ZeroLinear(WIDTH, 3 * WIDTH), ZeroLinear(WIDTH, WIDTH)
                block.feed = nn.Sequential(ZeroLinear(WIDTH, 2 * WIDTH), ZeroLinear(2 * WIDTH, WIDTH))
        elif fault == "lost table":
            self.table = torch.empty(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        fault = self.fault
        if fault == "shifted":
            tokens = tokens.roll(-1, 1)
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            is_sharded = dist.is_initialized() and hasattr(self, "unshard")
            if fault == "differs sharded" and is_sharded:
                x = 2 * x
            if fault == "drops by rank" and is_sharded and index == dist.get_rank() % 2:
                continue
            x = block(x)
        x = self._apply_fault(x)
        logits = self.head(self.norm(x))
        if fault == "hot":
            return 12 * logits
        return logits.detach() + 0 * self.embedding.weight.sum() if fault == "detached" else logits

    def _apply_fault(self, x: Tensor) -> Tensor:  # noqa: PLR0911
        match self.fault:
            case "mixes rows":
                return x + x.mean(0)
            case "batch norm":
                return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
            case "not finite":
                return x / (0 * x.detach()).sum()
            case "gradient not finite":
                return x + (0 * x).abs().sqrt()
            case "differs by rank":
                wrong = dist.is_initialized() and dist.get_rank() == 1
                return x + float(wrong) * torch.linspace(0, 1, WIDTH)
        return x


def mean_of_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total, count = next_token_loss(model, batch)
    return total / count


def with_penalty_on_rank_zero(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total, count = next_token_loss(model, batch)
    is_added = dist.is_initialized() and dist.get_rank() == 0
    return total + 0.1 * count * is_added, count


class Batches:
    """Random tokens; `data.options.fault` names the fault."""

    read = 0  # batches, in this process

    def __init__(self, run: Run) -> None:
        self.fault = run.data.options.get("fault", "none")
        self.calls = 0

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        for accumulated in range(plan.accumulation):
            first = step * plan.run.train.global_batch
            first += (accumulated * plan.world_size + rank) * plan.microbatch
            yield self._cut(range(first, first + plan.microbatch), rank=rank)

    def _cut(self, samples: range, *, rank: int) -> dict[str, Tensor]:
        self.calls += 1
        Batches.read += 1
        match self.fault:
            case "same on all ranks":
                samples = range(samples.start - rank * len(samples), samples.stop - rank * len(samples))
            case "repeats":
                samples = range(len(samples) * rank, len(samples) * (rank + 1))
            case "depends on what was read":
                samples = range(self.calls * 100, self.calls * 100 + len(samples))
            case "depends on ranks":
                samples = range(samples.start + 1000 * rank, samples.stop + 1000 * rank)
        drawn = torch.stack([_row(sample) for sample in samples])
        tokens, labels = drawn[:, :-1].clone(), drawn[:, 1:].clone()
        match self.fault:
            case "token too large":
                tokens[0, 0] = VOCABULARY
            case "masked":
                labels[:, : LENGTH - 1] = -100
                labels[0] = -100
            case "all masked":
                labels.fill_(-100)
            case "labels not shifted":
                labels = tokens.clone()
        return {"tokens": tokens, "labels": labels}


def _row(sample: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(sample))

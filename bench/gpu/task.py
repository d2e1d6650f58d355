"""The task of an item's process: item, ranks and record; and a model that trains on random tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.items import Item
from bench.gpu.record import Record
from fullshard.launch.detect import detect_hardware
from fullshard.models.build import build_model
from fullshard.models.loss import Loss, choose_loss
from fullshard.parallel.mesh import RankInfo
from fullshard.planner.predict.offload import with_infinitely_fast_drive
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState


@dataclass(frozen=True)
class Task:
    """An item, the ranks that measure it, where its figures go, and a directory for files of the run.

    asked_ranks: number of ranks on this machine; more than those of `ranks` for kinds that start their own
    """

    item: Item
    ranks: RankInfo
    record: Record
    work: Path
    is_toy: bool
    asked_ranks: int = 1

    @property
    def device(self) -> DeviceType:
        return "cuda" if self.ranks.device.type == "cuda" else "cpu"

    @property
    def window_seconds(self) -> float:
        """Approximate duration of one of the timed windows."""
        return 0.1 if self.is_toy else 2.0

    def hardware(self) -> Hardware:
        found = detect_hardware(self.device, ranks=self.ranks.world_size)
        return found if found.disk_bytes_per_second is not None else with_infinitely_fast_drive(found)

    def load_run(self, microbatches: int, *settings: str) -> Run:
        """Returns the item's run with `microbatches` for each group of ranks that has its own sequences."""
        asked = Run.load(overrides=[*self.item.settings, *settings, f"run.dir={self.work / 'run'}"])
        groups = self.ranks.world_size // asked.sharding.ranks_per_sequence
        batch = microbatches * groups * (asked.train.microbatch or 1)
        return asked.with_overrides([f"train.global_batch={batch}"])


class RandomTokens:
    """Microbatches of random tokens, made on the host as a loader's are.

    documents: of equal lengths in each sequence; 0: the batches have none
    """

    def __init__(self, vocabulary: int, *, documents: int = 0) -> None:
        self.vocabulary, self.documents = vocabulary, documents

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step * plan.world_size + rank)
        rows, length = plan.microbatch, plan.run.data.sequence_length
        for _ in range(plan.accumulation):
            tokens = torch.randint(self.vocabulary, (rows, length + 1), generator=generator)
            batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            if self.documents:
                each = length // self.documents
                batch["documents"] = (torch.arange(length) // each).expand(rows, length).contiguous()
                ends = torch.arange(each, length + 1, each, dtype=torch.int32)
                batch["document_ends"] = ends.expand(rows, self.documents).contiguous()
            yield {key: one.pin_memory() for key, one in batch.items()} if plan.device == "cuda" else batch


def vocabulary_of(plan: Plan) -> int:
    """Returns the number of tokens of the run's model."""
    head: Any = build_model(plan.run)
    return head.get_output_embeddings().out_features


def start_training(plan: Plan, *, documents: int = 0) -> tuple[TrainState, Loss]:
    """Returns the state of the plan's model that trains on random tokens, and its loss."""
    model = build_model(plan.run)
    loss = choose_loss(plan.run, model)
    model = shard(model, plan)
    source = RandomTokens(vocabulary_of(plan), documents=documents)
    return TrainState(model, build_optimizer(model, plan), data=source), loss

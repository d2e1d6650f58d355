"""Mistakes around a sharded model that torch accepts in silence: an old optimizer, and shards saved alone."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fullshard.errors import PlanError, ShardError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.shard import shard


def two_ranks_plan() -> Plan:
    return Plan.from_run(Run.load(overrides=["sharding.strategy=full_shard"]), world_size=2, device="cpu")


class Records(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def step_with_optimizer_from_before_shard() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    early = torch.optim.AdamW(model.parameters())
    shard(model, two_ranks_plan())
    model(torch.ones(2, 8)).sum().backward()
    late = torch.optim.AdamW(model.parameters())
    late.step()
    with pytest.raises(ShardError) as caught:
        early.step()
    unsharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(PlanError):
        shard(unsharded, Plan.from_run(Run(), world_size=4, device="cpu"))
    torch.optim.AdamW(unsharded.parameters()).step()  # its parameters are still the model's
    return str(caught.value)


def test_an_optimizer_from_before_shard_cannot_step(ranks: Any) -> None:
    for text in ranks(2).run(step_with_optimizer_from_before_shard):
        assert "holds parameters that the model no longer has" in text
        assert "4 of 4" in text


def notes_of_state_dicts(directory: str) -> tuple[list[str], list[str]]:
    heard = Records()
    logging.getLogger("fullshard").addHandler(heard)
    model = shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), two_ranks_plan())
    get_model_state_dict(model)
    unasked = list(heard.messages)
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
    model.state_dict()
    return unasked, heard.messages


def test_the_first_state_dict_of_shards_is_noted_once_on_rank_0(ranks: Any, tmp_path: Any) -> None:
    (unasked, noted), (_, elsewhere) = ranks(2).run(notes_of_state_dicts, str(tmp_path))
    assert unasked == elsewhere == []
    assert len(noted) == 1
    assert "torch.save on one rank loses those of the others" in noted[0]

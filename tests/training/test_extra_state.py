"""Extra state of modules: saved and loaded without pickle; what a checkpoint does not hold is named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.checkpoint import load, save
from fullshard.errors import CheckpointError
from fullshard.training.state import TrainState


class Counting(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def state_of(extra: Any) -> TrainState:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
    model[1].extra = extra
    return TrainState(model, torch.optim.SGD(model.parameters()))


def test_extra_state_is_loaded_with_its_types(tmp_path: Path) -> None:
    saved = {"calls": 3, "text": "a", "none": None, "far": float("-inf"), "pair": (1, [2.5, True]), "in": {}}
    state = state_of({**saved, "largest": torch.tensor([3.5]), "empty": torch.empty(0, dtype=torch.uint8)})
    save(state, tmp_path)
    other = state_of(None)
    load(other, tmp_path)
    loaded: dict[str, Any] = other.model[1].extra
    tensors = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
    assert {key: loaded[key] for key in saved} == saved
    assert type(loaded["pair"]) is tuple
    assert tensors["largest"].tolist() == [3.5]
    assert tensors["empty"].dtype == torch.uint8
    assert tensors["empty"].numel() == 0


def test_extra_state_that_needs_pickle_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        state = state_of({"codes": {1, 2}})
    assert "extra.1.codes is a set" in caplog.text
    with pytest.raises(CheckpointError, match=r"extra\.1\.codes is a set"):
        save(state, tmp_path)


def test_checkpoint_without_extra_state_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(TrainState(model, torch.optim.SGD(model.parameters())), tmp_path)
    state = state_of({"calls": 7})
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        load(state, tmp_path)
    assert "has no extra state of 1, which keep theirs" in caplog.text
    assert state.model[1].extra == {"calls": 7}


def test_changes_of_state_dict_hooks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def hook(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}table"] = torch.ones(1)
        state["0.weight"] = state["0.weight"] * 2

    model.register_state_dict_post_hook(hook)
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        TrainState(model, torch.optim.SGD(model.parameters()))
    assert "add, leave out or change: 0.weight, table." in caplog.text

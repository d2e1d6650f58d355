"""The work of a save does not grow with the checkpoints that are kept."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.save import CheckpointSaver
from tests.checkpoint.states import State, numbers

FILE_CALLS = ("open", "stat", "lstat", "scandir", "listdir", "fsync")
REQUESTS = ("ls", "info", "cat_file", "pipe_file", "exists")


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, names: tuple[str, ...]) -> Counter[str]:
    calls = Counter[str]()

    def counted(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return act(*arguments, **named)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


@pytest.mark.parametrize(("keep", "keep_every"), [(2, 1), (50, 0)])
@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_save_makes_as_many_calls_however_many_checkpoints_are_kept(
    kind: str, keep: int, keep_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = location_of(tmp_path if kind == "directory" else f"memory://kept/{keep}")
    saver, found = CheckpointSaver(place, keep=keep, keep_every=keep_every), list[Counter[str]]()
    owner, names = (os, FILE_CALLS) if kind == "directory" else (MemoryFileSystem, REQUESTS)
    for step in range(1, 9):
        with monkeypatch.context() as patched:
            calls = count_calls(patched, owner, names)
            saver.save(State(step, numbers(step)))
        found.append(calls)
    assert len(place.list_steps()) == 8
    assert found[-1] == found[3]

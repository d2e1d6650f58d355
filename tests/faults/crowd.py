"""A directory of checkpoints that others use too: what they leave there, and a reader beside the writer."""

import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.load import load
from fullshard.checkpoint.manifest import SavedTensor

_PAUSE_SECONDS = 0.02  # from one load to the next, so that the writer has the processor too


def litter(directory: Path) -> None:
    """Puts into `directory` what no save has made, also under the names of saves; once."""
    if (directory / "loop").is_symlink():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("notes.txt", ".metadata", "manifest.json", "step-99999999", ".tmp-00000002-aa"):
        (directory / name).write_bytes(b"")
    for name in ("latest", "step-99999998", ".del-step-00000001-aa"):
        (directory / name).symlink_to("nowhere")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "step-99999997")


def left_by_saves(directory: Path) -> list[str]:
    """Returns the names in `directory` that `litter` has not put there."""
    with_others = {path.name for path in directory.iterdir()}
    own = directory.parent / f"{directory.name}-litter"
    litter(own)
    return sorted(with_others - {path.name for path in own.iterdir()})


@dataclass
class Anything:
    """A state that takes whatever tensors a checkpoint holds.

    seen: the step of each checkpoint that it took -> a sum of all elements.
    """

    step: int = 0
    seen: dict[int, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def values(self) -> dict[str, Any]:
        return {}

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return {name: torch.empty(one.shape, dtype=one.torch_dtype) for name, one in saved.items()}

    def load_values(self, values: Mapping[str, Any], received: Mapping[str, Tensor]) -> None:
        self.step = values["step"]
        total = sum(one.double().sum().item() for one in received.values())
        assert self.seen.setdefault(self.step, total) == total, f"two loads of step {self.step} differ"


@contextmanager
def reader_beside(directory: Path) -> Generator[list[int]]:
    """Loads the newest checkpoint of `directory` again and again. Yields the steps that were loaded.

    Raises whatever a load raises, when the block ends.
    """
    state, loaded, failed, stopped = Anything(), list[int](), list[Exception](), threading.Event()

    def read() -> None:
        while not stopped.is_set():
            try:
                if load(state, directory, missing_ok=True):
                    loaded.append(state.step)
            except Exception as error:  # noqa: BLE001
                failed.append(error)
                return
            time.sleep(_PAUSE_SECONDS)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield loaded
    finally:
        stopped.set()
        thread.join()
        with suppress(IndexError):
            raise failed[0]

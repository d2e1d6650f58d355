"""`ForeignCheckpoint`, which readers of foreign checkpoints return: values, and tensors read later."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.system.small_files import VALUE_BYTES, parse_json, read_bytes

T = TypeVar("T")
TRAINER = "trainer_state.json"
"""The file of transformers' Trainer beside weights and state."""


@dataclass(frozen=True)
class SavedBox:
    """A box of elements of a tensor, at `offsets` in it. `read` returns its elements, of this shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A whole tensor of a foreign checkpoint. `read` returns it on the CPU, with this shape and dtype.

    `read` may return a view of a mapped file, which the caller does not change. It may raise CheckpointError.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        """Returns `tensor` itself, for example one of a mapped file, as a LazyTensor."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @classmethod
    def from_boxes(
        cls, name: str, boxes: Sequence[SavedBox], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Self:
        """Returns a tensor that `boxes` fill. Raises DamagedCheckpointError, with its `name`, if they do not.

        Copies of a box, which several ranks have, are read once. What a box reads is checked then.
        """
        distinct = sorted({box.offsets: box for box in boxes if math.prod(box.shape)}.items())
        inside = all(
            len(box.offsets) == len(box.shape) == len(shape)
            and all(0 <= at <= size - n for at, n, size in zip(box.offsets, box.shape, shape, strict=True))
            for _, box in distinct
        )
        found, wanted = sum(math.prod(box.shape) for _, box in distinct), math.prod(shape)
        if not inside or found != wanted or _overlap([box for _, box in distinct]):
            raise DamagedCheckpointError(
                f"the files of the source do not hold all of {name}.",
                got=f"{found} of its {wanted} elements, of shape {list(shape)}",
                why="files of some ranks are missing or of another checkpoint, or state is on an NVMe drive",
                fix="all files of the checkpoint in one directory",
            )

        def read() -> Tensor:
            result = torch.empty(shape, dtype=dtype)
            for offsets, box in distinct:
                part: Any = box.read()
                if (getattr(part, "shape", None), getattr(part, "dtype", None)) != (box.shape, dtype):
                    got = f"{getattr(part, 'dtype', part)} for {dtype} {[*box.shape]}"
                    raise DamagedCheckpointError(f"another tensor is in the place of {name}.", got=got)
                if len(distinct) == 1:
                    return part.detach()
                result[tuple(slice(at, at + n) for at, n in zip(offsets, box.shape, strict=True))] = part
            return result

        return cls(shape, dtype, read)

    def check_equal_when_read(self, other: "LazyTensor", error: CheckpointError) -> "LazyTensor":
        """Returns a tensor whose `read` raises `error` unless, in the dtype of `other`, both are equal."""

        def read() -> Tensor:
            found = self.read()
            if not torch.equal(found.to(other.dtype), other.read()):
                raise error
            return found

        return replace(self, read=read)


def _overlap(boxes: Sequence[SavedBox]) -> bool:
    """Returns whether two of `boxes`, which lie in the order of their first offsets, share an element."""
    for index, box in enumerate(boxes):
        ends = [at + n for at, n in zip(box.offsets, box.shape, strict=True)]
        for other in takewhile(lambda one, ends=ends: one.offsets[0] < ends[0], boxes[index + 1 :]):
            corners = zip(box.offsets, ends, other.offsets, other.shape, strict=True)
            if all(at < there + n and there < end for at, end, there, n in corners):
                return True
    return False


@dataclass(frozen=True)
class ForeignGroup:
    """A parameter group of a foreign optimizer.

    names: its parameters as `ForeignOptimizer.moments` names them, in the group's order
    settings: {entry of a group of torch, such as `lr` or `betas`: its numbers, or a name}
    others: entries that are not known here
    """

    names: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]] = field(hash=False)
    others: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class ForeignOptimizer:
    """State of a foreign optimizer.

    moments: {name of a parameter: {`exp_avg`, `exp_avg_sq` or `momentum_buffer`: tensor}}. With
        `has_numbered_moments`, the keys are "0", "1" … in the order of the optimizer's groups.
    updates: number of updates of each parameter, by the keys of `moments`, if its optimizer counts them
    groups: its parameter groups
    """

    moments: Mapping[str, Mapping[str, LazyTensor]]
    updates: Mapping[str, float]
    groups: tuple[ForeignGroup, ...]
    has_numbered_moments: bool = False


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Content of a foreign checkpoint. Generators and the position in the data are never part of it.

    optimizer: its ForeignOptimizer
    weights: parameters and buffers by name; masters (fp32) where the source has them
    step: number of finished optimizer steps
    format: name of the format, for people: "DeepSpeed ZeRO-2"
    files: the files that tensors and values come from
    default_order: order of numbered moments, see `names.ORDERS`; None if the format has none: it is asked for
    has_order: whether `weights` are in the order of the model, as in files other than of safetensors; else,
        numbers count the parameters of the model in memory
    tokens: trained tokens, or None
    skipped_steps: number of steps that were skipped
    settings: {dotted key of run.toml: value} that the source holds, for the offered run.toml
    config: text of the trainer's own settings, for `fullshard convert`, or None
    version: version of the library that wrote it, or None
    notes: sentences for the report about what was not taken, and why
    """

    optimizer: ForeignOptimizer
    weights: Mapping[str, LazyTensor]
    step: int
    format: str
    files: tuple[Path, ...]
    default_order: str | None = None
    has_order: bool = True
    tokens: int | None = None
    skipped_steps: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: str | None = None
    version: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def update_steps(self) -> int:
        """Number of steps that updated parameters: those that were not skipped."""
        return self.step - self.skipped_steps


def change_names(tensors: Mapping[str, T], new_names: Mapping[str, str], *, fix: str) -> dict[str, T]:
    """Returns `tensors` under their `new_names`. Raises CheckpointError if two would have one name."""
    old_names: dict[str, str] = {}
    for old in tensors:
        new = new_names[old]
        if (other := old_names.setdefault(new, old)) != old:
            what = f"two tensors of the source would be {new}."
            raise CheckpointError(what, got=f"{other} and {old}", fix=fix)
    return {new: tensors[old] for new, old in old_names.items()}


def read_trainer_files(directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the settings of a run that files of transformers hold, and the content of Trainer's, if any."""
    settings: dict[str, Any] = {"model.hf": str(directory)} if (directory / "config.json").is_file() else {}
    if not (file := directory / TRAINER).is_file():
        return settings, None
    state: Any = parse_json(read_bytes(file, most_bytes=VALUE_BYTES))
    return settings | {"train.steps": int(state["max_steps"])}, state

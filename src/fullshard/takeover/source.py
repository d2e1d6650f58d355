"""`ForeignCheckpoint`, which readers of foreign checkpoints return: values, and tensors that are read later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class ForeignGroup:
    """A parameter group of a foreign optimizer. None stands for a value that the source does not hold.

    names: its parameters as `ForeignCheckpoint.moments` names them, in the group's order
    learning_rate: the rate of the next step, after the schedule
    """

    names: tuple[str, ...]
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Content of a foreign checkpoint. Generators and the position in the data are never part of it.

    format: name of the format, for people: "DeepSpeed ZeRO-2"
    files: the files that tensors and values come from
    weights: parameters and buffers by name; masters (fp32) where the source has them
    moments: {name of a parameter: {`exp_avg`, `exp_avg_sq` or `momentum_buffer`: tensor}}. With
        `has_numbered_moments`, the keys are "0", "1" … in the order of the optimizer's groups.
    step: number of finished optimizer steps
    parameter_steps: the optimizer's own count of updates per parameter, if the source has one
    tokens: trained tokens, or None
    skipped_steps: number of steps that were skipped
    groups: the optimizer's parameter groups
    schedule_position: number of steps that the learning rate schedule took, or None
    settings: {dotted key of run.toml: value} that the source holds, for the offered run.toml
    version: version of the library that wrote it, or None
    notes: sentences for the report about what was not taken, and why
    """

    format: str
    files: tuple[Path, ...]
    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    step: int
    has_numbered_moments: bool = False
    parameter_steps: Mapping[str, float] = field(default_factory=dict[str, float])
    tokens: int | None = None
    skipped_steps: int = 0
    groups: tuple[ForeignGroup, ...] = ()
    schedule_position: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str | None = None
    notes: tuple[str, ...] = ()

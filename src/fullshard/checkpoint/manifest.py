"""The manifest: what a checkpoint holds, and so whether it is whole. Written last, read first.

    checkpoints/step-00000300/    __0_0.distcp  __1_0.distcp …  .metadata     written by DCP, readable by it
                                  writer.json                                 which process made it
                                  manifest.json                               the Manifest below

A directory is a checkpoint when its manifest is there and every file has the size that the manifest gives.
There is no `latest` file: the newest checkpoint is the highest step that is whole.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import JsonValue, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from fullshard.checkpoint.disk import os_error
from fullshard.errors import CheckpointError
from fullshard.spec.value import Value

FORMAT = 1
MANIFEST = "manifest.json"
MODEL_PREFIX = "model."
_STEP_DIRECTORY = re.compile(r"step-([0-9]{8,})")
_NAMES_SHOWN = 3

logger = logging.getLogger("fullshard")


class SavedTensor(Value):
    """Shape of the whole tensor (not of a shard), and dtype as torch spells it: `float32`, `bfloat16` …"""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises CheckpointError where the installed torch has no such dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                "the checkpoint holds a dtype that the installed torch does not have.",
                got=self.dtype,
                fix="a newer torch",
            )
        return dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class SavedFile(Value):
    """A file of a checkpoint, as it was when the checkpoint was committed."""

    size_bytes: NonNegativeInt


class Manifest(Value):
    """What a checkpoint holds. `files` names every file but the manifest itself.

    `plan` is the Plan that the state was trained with, as JSON, where it was given.
    """

    format: Literal[1] = FORMAT
    step: NonNegativeInt
    values: dict[str, JsonValue]
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    world_size: PositiveInt
    torch_version: str
    fullshard_version: str
    plan: dict[str, JsonValue] | None = None

    @property
    def model_tensors(self) -> dict[str, SavedTensor]:
        """The tensors of the model, without the optimizer's and the random states; names as they stand."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(MODEL_PREFIX)}


def step_directory(directory: Path, step: int) -> Path:
    """`checkpoints/step-00000300`: where the checkpoint of a step stands."""
    return directory / f"step-{step:08d}"


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything in `directory` that is named as a checkpoint is, the highest step first."""
    if not directory.is_dir():
        return []
    try:
        matches = [(_STEP_DIRECTORY.fullmatch(path.name), path) for path in directory.iterdir()]
    except OSError as error:
        raise os_error(f"{directory} cannot be read.", error) from error
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint directory `path`, as it stands there; `verify` also looks at the files.

    Raises CheckpointError where there is none, or none that can be read.
    """
    file = Path(path) / MANIFEST
    try:
        data: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint.",
            got=f"{MANIFEST}: {error.strerror}",
            why="the manifest is written last, so without it a save was broken off",
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged.", got=str(error)) from error
    written_as = data.get("format") if isinstance(data, dict) else None
    if written_as != FORMAT:
        raise CheckpointError(
            f"{file} cannot be read by this fullshard.",
            got=f"format {written_as!r}",
            why=f"this fullshard reads format {FORMAT}",
            fix="the fullshard that wrote it, or a newer one",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file} is damaged.", got=f"{where}: {first['msg']}") from error


def verify(path: str | Path) -> Manifest:
    """The manifest of `path`, once every file that it names has the size that it gives.

    Raises CheckpointError that names the first file that has not.
    """
    path = Path(path)
    manifest = read_manifest(path)
    named = _STEP_DIRECTORY.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{path} is not what its name says.", got=f"the manifest of step {manifest.step}"
        )
    for name, file in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is not whole.", got=f"{name}: {error.strerror}") from error
        if size != file.size_bytes:
            raise CheckpointError(
                f"{path} is not whole.", got=f"{name} has {size} bytes, its manifest says {file.size_bytes}"
            )
    return manifest


def newest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step that is whole, or None.

    What is not whole is passed over, with a warning; so is what a broken-off save left behind.
    """
    directory = Path(directory)
    if directory.is_dir():
        for path in sorted(directory.glob(".tmp-*")):
            logger.warning("passing over %s: a save that was not finished", path)
    for _, path in step_directories(directory):
        try:
            verify(path)
        except CheckpointError as error:
            logger.warning("passing over %s: %s", path, error.got or error.what)
        else:
            return path
    return None


def compare_names(expected: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> None:
    """Raises CheckpointError unless `saved` has exactly the names, shapes and dtypes of `expected`."""
    wanted = {name: SavedTensor.of(tensor) for name, tensor in expected.items()}
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    other = [name for name, tensor in wanted.items() if name in saved and saved[name] != tensor]
    if not (missing or unexpected or other):
        return
    found = [
        _some("not in the checkpoint: ", missing),
        _some("only in the checkpoint: ", unexpected),
        _some("", [f"{name} is {saved[name]} there and {wanted[name]} here" for name in other]),
    ]
    raise CheckpointError(
        "the checkpoint is of another model or optimizer: "
        f"{len(missing)} tensors missing, {len(unexpected)} not expected, "
        f"{len(other)} of another shape or dtype.",
        got="; ".join(part for part in found if part),
        why="names, shapes and dtypes must agree, else weights would silently stay as they were initialised",
        fix=f"the model, optimizer and precision that it was saved with ({MANIFEST} holds the plan)",
    )


def _some(label: str, items: Sequence[str]) -> str:
    more = f" and {len(items) - _NAMES_SHOWN} more" if len(items) > _NAMES_SHOWN else ""
    return f"{label}{', '.join(items[:_NAMES_SHOWN])}{more}" if items else ""

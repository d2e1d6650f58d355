"""The manifest: the list of a checkpoint's content. It is written last and read first.

    checkpoints/step-00000300/    __0_0.distcp  __1_0.distcp …             see `shard_file`
                                  .metadata                                as DCP writes it
                                  shards.json                              where each shard is: `ShardIndex`
                                  writer.json                              which process made it
                                  manifest.json                            the Manifest below

A directory is a complete checkpoint if its manifest is undamaged, and every file has the size that the
manifest states. The manifest also has the digests of small files and of the tables of data files, and tables
have those of blocks. There is no `latest` file: the newest is the complete checkpoint of the highest step.
"""

import errno
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, cast, runtime_checkable

import torch
from pydantic import Field, JsonValue, ValidationError, model_validator
from torch import Tensor

from fullshard.checkpoint.files import (
    MANIFEST,
    SMALL_BYTES,
    CheckpointFiles,
    LocalFiles,
    ObjectFiles,
    write_file,
)
from fullshard.checkpoint.shard_file import SUFFIX, Dims, new_hash_of_same_kind
from fullshard.errors import CheckpointError, DamagedCheckpointError, FullshardError
from fullshard.quantities import count_text, format_bytes, join_names
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel, PositiveInt
from fullshard.system.files import xxh3_digest
from fullshard.system.object_store import is_remote_url
from fullshard.system.small_files import VALUE_BYTES, parse_json

FORMAT = 4
_READ_FORMATS = (2, 3, FORMAT)
METADATA = ".metadata"
SHARDS = "shards.json"
MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."
AVERAGE_PREFIX = "ema."
"""Begins the names of averages of trained parameters, which follow the parameters' names."""
SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Key in the values of a state: number of steps that were skipped in a row, up to the last one."""
_NO_DIGEST = "0" * 32
# Bytes are lost, or the file is a link, directory or device. Not a missing file: other ranks may find it.
_BYTES_LOST = {errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO}

# A file name is one path component: a checkpoint must not reach out of its own directory.
FileName = Annotated[str, Field(pattern=r"^\.?[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=255)]
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class SavedTensor(FrozenModel):
    """Shape of a whole saved tensor, and its dtype as torch spells it: `float32`, `bfloat16` …"""

    shape: Dims
    dtype: str

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch.dtype. Raises CheckpointError if the installed torch does not have it."""
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


class SavedFile(FrozenModel):
    """A file of a checkpoint, as it was when the checkpoint was committed.

    size_bytes: size of the file
    digest: digest of the bytes from `digest_begin` on; None for a data file of format 2 or 3
    digest_begin: byte at which the table of a data file begins; 0 for other files, and in formats 2 and 3
    """

    size_bytes: _Size
    digest: str | None = None
    digest_begin: _Size = 0


class Manifest(FrozenModel):
    """Content of a checkpoint.

    format: version of this format
    step: number of finished steps
    values: small values of the state
    tensors: saved tensors, by name
    files: every file except the manifest itself
    world_size: number of ranks that saved it
    torch_version: version of torch that saved it
    fullshard_version: version of fullshard that saved it
    plan: the Plan of the training (and in it the Run) as JSON, or None if none was given
    attempt: id of the save, if it is a prefix in an object store; else None
    unusable: number that no training can continue from, with its tensor; None if the save found none
    digest: digest of the manifest's own bytes, with zeros in its place
    """

    format: Literal[2, 3, 4] = FORMAT
    step: _Size
    values: dict[str, JsonValue]
    tensors: dict[str, SavedTensor]
    files: dict[FileName, SavedFile]
    world_size: PositiveInt
    torch_version: str
    fullshard_version: str
    plan: dict[str, JsonValue] | None = None
    attempt: FileName | None = None
    unusable: str | None = None
    digest: str = _NO_DIGEST

    @model_validator(mode="after")
    def _check_manifest_is_not_listed(self) -> Self:
        if MANIFEST in self.files:
            raise ValueError(f"the manifest names {MANIFEST}, which is itself")
        return self

    @property
    def model_tensors(self) -> dict[str, SavedTensor]:
        """Tensors of the model by their full names."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(MODEL_PREFIX)}

    @property
    def why_avoided(self) -> str | None:
        """Why an older checkpoint is loaded rather than this one: [Note: the last good checkpoint]."""
        skipped = steps_skipped_in_a_row(self.values)
        return self.unusable or (
            f"{count_text(skipped, 'step')} skipped right before it" if skipped else None
        )

    @property
    def data_file_names(self) -> list[str]:
        """Names of the data files; each has a table of pieces."""
        names = self.files.keys()
        return [name for name in names if self.files[name].digest_begin or f"{name}{SUFFIX}" in names]

    @property
    def checkpoint_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def values_with_run(self) -> dict[str, JsonValue]:
        """The state's values, with the settings of its run from the plan if the state has none itself."""
        known = self.values.get("run") is not None or self.plan is None
        return self.values if known else self.values | {"run": (self.plan or {}).get("run")}

    @property
    def run_settings(self) -> Run | None:
        """Settings of the run that saved the checkpoint, or None. Raises CheckpointError if unreadable."""
        if self.plan is None:
            return None
        try:
            return Plan.model_validate(self.plan, extra="ignore").run
        except (ValidationError, FullshardError) as error:
            raise CheckpointError(
                "the plan in the checkpoint's manifest cannot be read.",
                got=error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.what,
                fix="the fullshard that wrote it; --format safetensors does without",
            ) from error

    def encode(self) -> bytes:
        """Returns the bytes of `manifest.json`, with their own digest. Raises CheckpointError over 32 MiB."""
        text = self.model_copy(update={"digest": _NO_DIGEST}).model_dump_json(indent=1).encode() + b"\n"
        if len(text) > VALUE_BYTES:
            raise CheckpointError(
                f"{MANIFEST} would be too large to be read.",
                got=f"{format_bytes(len(text))}, more than {format_bytes(VALUE_BYTES)}",
                fix="tensors in place of large values of the state",
            )
        return _replace_last_json_string(text, before=_NO_DIGEST, after=xxh3_digest(text))


def steps_skipped_in_a_row(values: Mapping[str, JsonValue]) -> int:
    """Returns how many steps were skipped in a row before the save of a state with these values."""
    count = values.get(SKIPPED_IN_A_ROW, 0)
    return count if isinstance(count, int) else 0


def read_manifest(checkpoint: CheckpointFiles | str | Path) -> Manifest:
    """Returns the manifest of a checkpoint, after checking its digest.

    Raises DamagedCheckpointError if the manifest is missing, damaged, or of another step than that in the
    directory's name. Raises CheckpointError if it has another format, or that of an earlier version.
    """
    files = checkpoint_files_at(checkpoint)
    try:
        text = files.read_file(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            f"{files} is not a complete checkpoint.",
            got=f"{MANIFEST}: {error.strerror}",
            why="the manifest is written last, so its save is still running, or was broken off",
        ) from error
    except OSError as error:
        raise read_failure_error(error, f"{files} cannot be read.", name=MANIFEST) from error
    where = f"{files}/{MANIFEST}"
    data = _verify_and_parse_manifest(text, where)
    if data.get("format") not in _READ_FORMATS:
        raise CheckpointError(
            f"{where} cannot be read by this fullshard.",
            got=f"format {data.get('format')!r}",
            why=f"this fullshard reads the formats {_READ_FORMATS[0]} to {FORMAT}",
            fix="the fullshard that wrote it, or a newer one",
        )
    try:
        manifest = Manifest.model_validate(data, extra="ignore")  # earlier versions wrote more keys
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedCheckpointError(f"{where} is damaged.", got=f"{place}: {first['msg']}") from error
    if files.name.startswith("step-") and files.name != step_name(manifest.step):
        other = f"the manifest of step {manifest.step}"
        raise DamagedCheckpointError(f"{files} is not what its name says.", got=other)
    if SHARDS not in manifest.files or data.get("nodes", 1) != 1:
        raise CheckpointError(
            f"{where} cannot be read by this fullshard.",
            got=f"no {SHARDS}" if SHARDS not in manifest.files else "files of disks that nodes do not share",
            why="an earlier version wrote it",
            fix="the fullshard that wrote it",
        )
    return manifest


def read_manifest_and_check_sizes(checkpoint: CheckpointFiles | str | Path) -> Manifest:
    """Returns a checkpoint's manifest after `check_file_sizes`. Raises as that and `read_manifest` do."""
    files = checkpoint_files_at(checkpoint)
    manifest = read_manifest(files)
    check_file_sizes(files, manifest)
    return manifest


def check_file_sizes(files: CheckpointFiles, manifest: Manifest) -> None:
    """Raises DamagedCheckpointError unless every file of `manifest` exists with its size."""
    sizes = sizes_by_name(files)
    for name, file in manifest.files.items():
        if sizes.get(name) != file.size_bytes:
            if name in sizes:
                found = f"{name} has {sizes[name]} bytes, its manifest says {file.size_bytes}"
            else:
                found = f"{name}: {missing_file_reason(files, name)}"
            raise DamagedCheckpointError(f"{files} is not whole.", got=found)


def sizes_by_name(files: CheckpointFiles) -> dict[str, int]:
    """Returns the size in bytes of each regular file by name. Raises CheckpointError."""
    try:
        return files.file_sizes_bytes()
    except OSError as error:
        raise read_failure_error(error, f"{files} cannot be read.", name="its files") from error


def missing_file_reason(files: CheckpointFiles, name: str) -> str:
    """Returns the reason why `name` is not a regular file of a checkpoint: missing, a link, a directory."""
    try:
        with files.open_file(name):
            return "no such file"
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return str(error.strerror or error)


def read_verified_file(files: CheckpointFiles, manifest: Manifest, *, name: str) -> bytes:
    """Returns the bytes of a small file, or of the table in a data file.

    Raises DamagedCheckpointError if they differ from their digest.
    """
    entry = manifest.files.get(name, SavedFile(size_bytes=0))
    try:
        data = files.read_file(name, begin=entry.digest_begin)
    except OSError as error:
        raise read_failure_error(error, f"{files} is not whole.", name=name) from error
    if (saved := entry.digest) is None or new_hash_of_same_kind(saved, data).hexdigest() != saved:
        other = f"{files}/{name} holds other bytes than were saved."
        what = "the digest of its table" if entry.digest_begin else "its digest"
        raise DamagedCheckpointError(other, got=f"{what} is another")
    return data


def write_small_file(draft: CheckpointFiles, name: str, *, data: bytes) -> SavedFile:
    """Writes a small file, and returns its entry for the manifest. Raises CheckpointError for a large one."""
    entry = file_entry(name, data)
    write_file(draft, name, data=data)
    return entry


def file_entry(name: str, data: bytes, *, begin: int = 0) -> SavedFile:
    """Returns the manifest's entry for a small file `data`, or a data file whose table `data` is at `begin`.

    Raises CheckpointError if `data` is too large.
    """
    if len(data) > SMALL_BYTES:
        got = f"{format_bytes(len(data))}, more than {format_bytes(SMALL_BYTES)}"
        what = f"the table of {name}" if begin else name
        raise CheckpointError(f"{what} would be too large to be read.", got=got)
    return SavedFile(size_bytes=begin + len(data), digest=xxh3_digest(data), digest_begin=begin)


def read_failure_error(error: OSError, what: str, *, name: str) -> CheckpointError:
    """Returns a DamagedCheckpointError if the bytes of `name` are lost, else a CheckpointError."""
    kind = DamagedCheckpointError if error.errno in _BYTES_LOST else CheckpointError
    return kind(what, got=f"{name}: {error.strerror or error}")


def checkpoint_files_at(checkpoint: CheckpointFiles | str | Path) -> CheckpointFiles:
    """Returns the files of the checkpoint at a path or URL; returns `CheckpointFiles` unchanged."""
    if isinstance(checkpoint, str) and is_remote_url(checkpoint):
        return ObjectFiles(checkpoint.rstrip("/"))
    if isinstance(checkpoint, str | Path):
        return LocalFiles(Path(str(checkpoint).removeprefix("file://")))
    return checkpoint


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint: `step-00000300`."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Returns the step in a checkpoint's name, such as 300 for `step-00000300`; None for any other name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name == step_name(int(digits)) else None


def _verify_and_parse_manifest(text: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object in the bytes of a manifest, after checking its digest. Errors name `where`."""
    try:
        data: Any = parse_json(text)
    except ValueError as error:
        raise DamagedCheckpointError(f"{where} is damaged.", got=f"{MANIFEST}, no JSON: {error}") from error
    if not isinstance(data, dict):
        raise DamagedCheckpointError(f"{where} is damaged.", got="no JSON object")
    fields = cast(dict[str, Any], data)
    stated = str(fields.get("digest"))
    digested = _replace_last_json_string(text, before=stated, after=_NO_DIGEST)
    if fields.get("format") != 1 and xxh3_digest(digested) != stated:  # format 1 had no digest
        raise DamagedCheckpointError(f"{where} is damaged.", got="its own digest is another")
    return fields


def _replace_last_json_string(text: bytes, *, before: str, after: str) -> bytes:
    head, found, tail = text.rpartition(f'"{before}"'.encode())
    return head + f'"{after}"'.encode() + tail if found else text


def check_same_tensors(expected: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> None:
    """Raises CheckpointError unless `saved` has exactly the names, shapes and dtypes of `expected`."""
    wanted = {name: SavedTensor.from_tensor(tensor) for name, tensor in expected.items()}
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    other = [f"{n} is {saved[n]} there and {t} here" for n, t in wanted.items() if saved.get(n, t) != t]
    if not (missing or unexpected or other):
        return
    found = [("not in the checkpoint: ", missing), ("only in the checkpoint: ", unexpected), ("", other)]
    raise CheckpointError(
        "the checkpoint is of another model or optimizer: "
        f"{count_text(len(missing), 'tensor')} missing, {len(unexpected)} not expected, "
        f"{len(other)} of another shape or dtype.",
        got="; ".join(f"{label}{join_names(names, most=3)}" for label, names in found if names),
        why="names, shapes and dtypes must agree, else weights would silently stay as they were initialised",
        fix=f"the model, optimizer and precision that it was saved with ({MANIFEST} holds the plan)",
    )


class Checkpointable(Protocol):
    """A state that can be saved and loaded; `fullshard.training.state.TrainState` is one.

    Tensors go to data files (each rank writes its own shards of DTensors), values into the manifest.
    """

    @property
    def step(self) -> int:
        """Number of finished steps, equal on all ranks; the checkpoint is named by it."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns the Tensors and DTensors to save, by flat name.

        A tensor that belongs to one rank alone carries the rank in its name. Any other plain tensor is equal
        on all ranks, and one of them writes it.
        """
        ...

    def values(self) -> dict[str, JsonValue]:
        """Returns small values, equal on all ranks; `tied` holds {alias: name} of tied parameters."""
        ...

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Returns the tensors to fill from a checkpoint of the tensors `saved`, with their shapes and dtypes.

        Raises CheckpointError that names the differences (see `check_same_tensors`).
        """
        ...

    def load_values(self, values: Mapping[str, JsonValue], received: Mapping[str, Tensor]) -> None:
        """Takes over the saved values, and `received`, the load targets, which are filled now."""


@runtime_checkable
class StateRequiringFiniteTensors(Protocol):
    """A state some of whose tensors must be finite to train on; others, such as masks, may hold infinity."""

    def select_names_that_must_be_finite(self, names: Iterable[str]) -> Collection[str]:
        """Returns those of `names` whose tensors must be finite: if one is not, the state is not saved."""
        ...


@runtime_checkable
class StateLoadedInPortions(Protocol):
    """A state with tensors too large for memory, which are loaded in portions after the load targets."""

    def iterate_load_targets(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields portions of tensors to fill, equal on all ranks. The caller fills each before the next."""
        ...

"""Reads the weights of a Hugging Face directory directly into a model's shards.

Each rank reads only the bytes of its own rows and converts them to its dtype. No whole tensor exists
anywhere.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.checkpoint.shard_file import shard_begin
from fullshard.distributed.agreement import on_all_ranks, on_rank_zero, world_size
from fullshard.distributed.tensors import local_shard
from fullshard.errors import CheckpointError
from fullshard.spec.weight_map import Naming, Shape, WeightMap, by_name
from fullshard.weights.files import PretrainedFiles, open_weights
from fullshard.weights.read_ahead import carry_out
from fullshard.weights.safetensors_header import FileTensor
from fullshard.weights.strided import moves_into

_SHOWN = 4
_COPIES = 1.5  # copies of the model over all ranks; above this, several ranks read the same bytes
_FLOAT8 = tuple(dtype for name in ("float8_e4m3fn", "float8_e5m2") if (dtype := getattr(torch, name, None)))


@dataclass(frozen=True)
class LoadReport:
    """Result of reading weights.

    directory: where they were read from
    tensors: number of tensors filled
    missing: parameters and buffers that the files have under none of their names
    surplus: tensors of the files that the model does not have
    tied: (alias, name) of tensors filled once
    converted: tensors assembled from others, or extracted from them
    dtypes: number of tensors per conversion, such as "bfloat16 → float32"
    read_bytes: bytes that this rank read
    seconds: time that this rank took
    """

    directory: str
    tensors: int
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    converted: tuple[str, ...]
    dtypes: Mapping[str, int]
    read_bytes: int
    seconds: float

    def describe(self) -> str:
        """Returns one line about the tensors read, and one for each kind of difference from the model."""
        turned = ", ".join(f"{count} {kind}" for kind, count in self.dtypes.items())
        lines = [f"{self.tensors} tensors from {self.directory}" + (f": {turned}" if turned else "")]
        if self.converted:
            lines.append(
                f"{len(self.converted)} of them put together as the model has them: {_some(self.converted)}"
            )
        if self.surplus:
            lines.append(
                f"{len(self.surplus)} in the files that the model does not have: {_some(self.surplus)}"
            )
        lines += [self.missing_message] if self.missing_message else []
        return "\n".join(lines)

    @property
    def missing_message(self) -> str | None:
        """A line about the tensors that the files lack; None if none is missing.

        Adapters of peft are not counted.
        """
        missing = [name for name in self.missing if ".lora_" not in name]
        return (
            f"{len(missing)} that the files do not have, initialised: {_some(missing)}" if missing else None
        )


def read_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    naming: Naming | None = None,
    wanted: Callable[[Tensor], bool] = lambda _tensor: True,
) -> LoadReport:
    """Fills `model`, sharded or not, with the weights of `directory` (or of one safetensors file).

    Collective.

    naming: maps the files' tensors to the model's (`weights.names`); by default names must match, except for
        a prefix `model.` or `transformer.`
    wanted: selects the parameters and buffers that are filled

    Tensors that the files lack are unchanged, and are reported as missing.

    Raises CheckpointError if there are no weights, for different shapes (with both shapes and the names), and
    for quantised weights; DamagedCheckpointError for incomplete files.
    """
    began = time.perf_counter()
    path = Path(directory)
    files = on_rank_zero(lambda: open_weights(path), doing=f"reading {path}")
    reading = on_all_ranks(lambda: _Reading.of(model, files, naming=naming), doing=f"reading {path}")
    read_bytes = on_all_ranks(lambda: reading.fill(wanted), doing=f"reading {path}")
    return LoadReport(
        directory=str(path),
        tensors=len(reading.filled),
        missing=reading.missing,
        surplus=reading.map.surplus,
        tied=reading.tied,
        converted=reading.map.converted,
        dtypes=reading.dtypes(),
        read_bytes=read_bytes,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Reading:
    """Assignment of file tensors to model tensors.

    files: the opened files
    map: parts of the file tensors for each model tensor
    filled: tensors to fill; one with several names is listed by the name that the files have
    missing: tensors that the files lack
    tied: (alias, name) of tensors with several names
    """

    files: PretrainedFiles
    map: WeightMap
    filled: Mapping[str, Tensor]
    missing: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: nn.Module, files: PretrainedFiles, *, naming: Naming | None) -> "_Reading":
        tensors = _tensors(model)
        shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        naming = naming or partial(by_name, shapes, prefixes=("model", "transformer"))
        found = naming({name: tensor.shape for name, tensor in files.tensors.items()})
        _require_shapes(shapes, found, path=files.directory)
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        filled: dict[str, Tensor] = {}
        missing: list[str] = []
        tied: list[tuple[str, str]] = []
        for own in names.values():
            name = next((one for one in own if one in found.parts), None)
            if name is None:
                missing.append(own[0])
                continue
            filled[name] = tensors[name]
            tied += [(alias, name) for alias in own if alias != name]
        _require_memory(filled)
        reading = cls(files, found, filled, tuple(missing), tuple(tied))
        reading._require_plain_dtypes()
        return reading

    def fill(self, wanted: Callable[[Tensor], bool]) -> int:
        """Fills the wanted tensors. Returns the bytes that this rank read."""
        filled = {name: tensor for name, tensor in self.filled.items() if wanted(tensor)}
        moves = (
            move
            for name, tensor in filled.items()
            for move in moves_into(local_shard(tensor), self.map.parts[name], offsets=shard_begin(tensor))
        )
        held = sum(local_shard(tensor).numel() for tensor in filled.values())
        every = sum(tensor.numel() for tensor in filled.values())
        return carry_out(moves, self.files, cached=held * world_size() > _COPIES * every)

    def dtypes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, tensor in self.filled.items():
            source = self._source(name).dtype
            if source != tensor.dtype:
                kind = f"{str(source).removeprefix('torch.')} → {str(tensor.dtype).removeprefix('torch.')}"
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    def _source(self, name: str) -> FileTensor:
        return self.files.tensors[self.map.parts[name][0].source]

    def _require_plain_dtypes(self) -> None:
        """Raises CheckpointError for quantised weights, whose values depend on separate scales."""
        for name, tensor in self.filled.items():
            dtype = self._source(name).dtype
            is_code = dtype in _FLOAT8 or not (dtype.is_floating_point or dtype.is_complex)
            if tensor.is_floating_point() and is_code and dtype != tensor.dtype:
                raise CheckpointError(
                    f"{self.files.directory} holds quantised weights.",
                    got=f"{name} is {str(dtype).removeprefix('torch.')}",
                    why="they are codes, whose values depend on scales beside them",
                    fix="the model's directory in bfloat16 or float32",
                )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers in the state dict by every name; a tied parameter is one object."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves units unsharded
    return model.state_dict(keep_vars=True)


def _require_memory(filled: Mapping[str, Tensor]) -> None:
    name = next((name for name, tensor in filled.items() if tensor.is_meta), None)
    if name is not None:
        raise CheckpointError(
            "the model has no memory to read weights into.",
            got=f"{name} on the meta device",
            fix='shard(model, plan, values="unset") before; or model.to_empty(device="cpu"), for a plain one',
        )


def _require_shapes(shapes: Mapping[str, Shape], found: WeightMap, *, path: Path) -> None:
    other = [
        f"{name} is {list(found.shapes[name])} there and {list(shape)} here"
        for name, shape in shapes.items()
        if name in found.parts and found.shapes[name] != shape
    ]
    if other:
        raise CheckpointError(
            f"{path} holds another model: {len(other)} tensors of another shape.",
            got=_some(other, between="; "),
            fix='the config.json that stands beside the weights; or weights = "none", to start without',
        )


def _some(items: Iterable[str], *, between: str = ", ") -> str:
    every = list(items)
    return between.join(every[:_SHOWN]) + (f"{between}..." if len(every) > _SHOWN else "")

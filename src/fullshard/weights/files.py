"""The safetensors files of a Hugging Face model: one file, or several and an index."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.small_files import parse_json, read_bytes
from fullshard.weights.safetensors_header import FileTensor, read_header

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class PretrainedFiles:
    """Tensors of the files in one directory, by name."""

    directory: Path
    tensors: Mapping[str, FileTensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def find_weights(directory: Path) -> Path | None:
    """Returns the file to read first in `directory`: the only file, or the index of several.

    None without weights.
    """
    if directory.is_file():
        return directory if directory.suffix == ".safetensors" else None
    return next((directory / name for name in (ONE_FILE, INDEX) if (directory / name).is_file()), None)


def open_weights(path: Path) -> PretrainedFiles:
    """Returns the tensors of a Hugging Face directory or of one safetensors file. Reads only the headers.

    Raises CheckpointError if there are no weights, DamagedCheckpointError for incomplete files; OSError.
    """
    found = find_weights(path)
    if found is None:
        raise _none(path)
    if found.name != INDEX:
        return PretrainedFiles(found.parent, read_header(found))
    return PretrainedFiles(found.parent, _indexed(found))


def _indexed(index: Path) -> dict[str, FileTensor]:
    try:
        data: Any = parse_json(read_bytes(index, most_bytes=_INDEX_BYTES))
    except ValueError as error:
        raise DamagedCheckpointError(f"{index} is no JSON.", got=str(error)) from error
    weight_map: Any = cast(dict[str, Any], data).get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise DamagedCheckpointError(f"{index} names no files.", got="no weight_map in it")
    names = cast(dict[str, Any], weight_map)
    inside: dict[str, dict[str, FileTensor]] = {}
    for file in sorted({str(file) for file in names.values()}):
        path = index.parent / file
        if Path(file).name != file or not os.path.isfile(path):
            raise CheckpointError(
                f"{path} is not there.", got=f"{INDEX} names it", fix="fetch it, or the right index"
            )
        inside[file] = read_header(path)
    for name, file in names.items():
        if name not in inside[str(file)]:
            raise DamagedCheckpointError(
                f"{index} does not belong to its files.",
                got=f"{name} is not in {file}",
                fix="fetch both again",
            )
    return {name: inside[str(file)][name] for name, file in names.items()}


def _none(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"{path} is not there.", fix="a directory with model.safetensors")
    several = sorted(one.name for one in path.glob("*.safetensors")) if path.is_dir() else []
    if several:
        shown = f"{', '.join(several[:3])}{', ...' if len(several) > 3 else ''}"
        return CheckpointError(
            f"{path} holds files without their index.",
            got=shown,
            why=f"{INDEX} says which of them belong to the model",
            fix=f"fetch {INDEX} too, or give the one file",
        )
    other = sorted(one.name for one in path.glob("*.bin")) if path.is_dir() else []
    return CheckpointError(
        f"{path} holds no weights in safetensors.",
        got=", ".join(other[:3]) or "no *.safetensors",
        why="a .bin is a pickle, which can run code" if other else None,
        fix="transformers' save_pretrained writes them from what it loads" if other else None,
    )

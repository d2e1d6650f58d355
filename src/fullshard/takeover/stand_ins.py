"""Reads files of torch.save without running their pickles.

[Note: stand-ins] `torch.load(weights_only=True)` makes tensors and plain values, and refuses every other
class. Some formats keep facts in classes of their library. Each class of a fixed list is replaced by an inert
one, whose instances keep their arguments and state. A file that asks for any other name is refused by that
name before its pickle is read.

A nested class is pickled as `getattr(Class, "Nested")`. `builtins.getattr` is never called: in its place,
`_find_nested_class` accepts only stand-ins, and returns another stand-in.
"""

import pickle
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import format_bytes, join_names

_GETATTR = "builtins.getattr"
LEGACY_BYTES = 256 << 20
"""Largest file in the format before torch 1.6, which cannot be mapped, and is read into memory as a whole."""


class StandIn:
    """An instance of a class of the list. `args` are its constructor's arguments, `state` is its state."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        is_of_slots = isinstance(state, tuple) and cast(Any, state)[:1] == (None,)
        self.args, self.state = getattr(self, "args", ()), state[1] if is_of_slots else state


class StandInNested(StandIn):
    """An instance of a class that is nested in another one of the list."""


class StandInTensor(Tensor):
    """An instance of a subclass of Tensor. `state` is its state; it has no elements."""

    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:  # signature: torch's
        return NotImplemented


def read_torch_file(
    path: Path, *, classes: Collection[str] = (), tensor_classes: Collection[str] = ()
) -> Any:
    """Returns the content of a file of torch.save. Its tensors are views of the mapped file.

    classes, tensor_classes: dotted names of classes that get a StandIn or a StandInTensor; the stand-in's
        `__name__` is the last part

    Raises CheckpointError for a file that asks for any other name, and for a large file in the legacy format;
    DamagedCheckpointError for one that cannot be read. See [Note: stand-ins].
    """
    known: dict[str, Any] = {name: _make_stand_in(name, StandIn) for name in classes}
    known |= {name: _make_stand_in(name, StandInTensor) for name in tensor_classes}
    if known:
        known |= {_GETATTR: _find_nested_class, "stand-in.nested": StandInNested}
    is_mapped = _check_is_mappable(path)
    try:
        asked = set(torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_mapped else ())
        if unknown := asked - known.keys():
            raise unknown_name_error(path, unknown)
        allowed = [(one, name) for name, one in known.items()]
        with torch.serialization.safe_globals(cast(Any, allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not read.",
            got=_refusal_text(error),
            why="reading a pickle can run code, so only tensors and plain values are read",
            fix="the weights as safetensors, or the file written anew by its own trainer",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, IndexError, struct.error) as error:
        raise damaged_file_error(path, error) from error
    except (TypeError, AttributeError) as error:  # arguments that no torch.save writes
        raise damaged_file_error(path, error) from error


def unknown_name_error(path: Path, names: Collection[str]) -> CheckpointError:
    """Returns the error for a pickle that asks for `names`, which no format needs."""
    return CheckpointError(
        f"{path} is not read.",
        got=f"its pickle asks for {join_names(sorted(names), most=3)}",
        why="reading a pickle can run code, so only the names that checkpoints need are accepted",
        fix="the weights as safetensors, or the file written anew by its own trainer",
    )


def damaged_file_error(path: Path, error: Exception) -> DamagedCheckpointError:
    """Returns the error for a file that is truncated, or not what its name says."""
    return DamagedCheckpointError(
        f"{path} cannot be read.",
        got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        why="it is truncated, damaged, or no file of torch.save",
        fix="the checkpoint before it, or a new copy of the file",
    )


def _refusal_text(error: pickle.UnpicklingError) -> str:
    """Returns the reason in an error of torch, without its advice to run the pickle."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return " ".join(text.split("\n\n")[0].split())


def _make_stand_in(dotted: str, base: type) -> type:
    module, _, name = dotted.rpartition(".")
    return type(name, (base,), {"__module__": f"stand-in for {module}"})


def _find_nested_class(owner: Any, name: Any) -> type:
    """Returns the stand-in for a class nested in `owner`. Raises UnpicklingError if that is no stand-in."""
    if not (isinstance(owner, type) and issubclass(owner, StandIn | StandInTensor)):
        raise pickle.UnpicklingError(f"its pickle asks for {_GETATTR} of {owner!r} and {name!r}")
    return StandInNested


def _check_is_mappable(path: Path) -> bool:
    """Returns whether the file is a zip archive. Raises CheckpointError for a large one that is none."""
    try:
        is_zip, size_bytes = zipfile.is_zipfile(path), path.stat().st_size
    except OSError as error:
        raise damaged_file_error(path, error) from error
    if not is_zip and size_bytes > LEGACY_BYTES:
        raise CheckpointError(
            f"{path} is not read.",
            got=f"{format_bytes(size_bytes)} in a format that is not a zip archive, or a truncated one",
            why="the format before torch 1.6 cannot be mapped, and would be in memory as a whole",
            fix="torch.save(torch.load(path, weights_only=True), path) on a machine with the memory",
        )
    return is_zip

"""Reads pickles of other trainers without running them.

[Note: stand-ins] `torch.load(weights_only=True)` makes tensors and plain values, and refuses every other
class. Some formats keep facts in classes of their library. Each class of a fixed list is replaced by an inert
one, whose instances keep their arguments and state. A pickle that names any other class is refused.

A nested class is pickled as `getattr(Class, "Nested")`. `builtins.getattr` is never called: in its place,
`_find_nested_class` accepts only stand-ins, and returns another stand-in.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import format_bytes, join_names
from fullshard.system.files import open_regular_file
from fullshard.system.small_files import read_bytes
from fullshard.torch_private.tensors import dcp_file_view

LEGACY_BYTES = 256 << 20
"""Largest file in the format before torch 1.6, which cannot be mapped, and is read into memory as a whole."""

_PICKLE_BYTES = 1 << 30
# Of what programs save beside weights: their arguments, and states of numpy's generators.
_PLAIN_CLASSES = (
    *("argparse.Namespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "numpy.ndarray", "numpy.dtype"),
    *(f"numpy.{core}.multiarray.{one}" for core in ("core", "_core") for one in ("_reconstruct", "scalar")),
)
# Raised while a truncated or changed pickle is read.
_DAMAGE = (
    *(OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError),
    *(struct.error, ImportError, MemoryError),
)


class StandIn:
    """An instance of a class of the list. `args` are its constructor's arguments, `state` is its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        is_of_slots = isinstance(state, tuple) and cast(Any, state)[:1] == (None,)
        self.state = state[1] if is_of_slots else state


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

    classes, tensor_classes: dotted names of further classes that get a StandIn or a StandInTensor; the
        stand-in's `__name__` is the last part

    Raises CheckpointError for a file that asks for any other name, and for a large file in the legacy format;
    DamagedCheckpointError for one that cannot be read. See [Note: stand-ins].
    """
    known: dict[str, Any] = {name: _make_stand_in(name, StandIn) for name in (*_PLAIN_CLASSES, *classes)}
    known |= {name: _make_stand_in(name, StandInTensor) for name in tensor_classes}
    known |= {"builtins.getattr": _find_nested_class, "stand-in": StandIn}
    known |= {name: _read_scalar for name in _PLAIN_CLASSES if name.endswith(".scalar")}
    with _refused_or_damaged(path):
        is_zip, size_bytes = zipfile.is_zipfile(path), path.stat().st_size
        if not is_zip and size_bytes > LEGACY_BYTES:
            got = f"{format_bytes(size_bytes)} in a format that is not a zip archive, or a truncated one"
            why = "the format before torch 1.6 cannot be mapped, and would be in memory as a whole"
            fix = "torch.save(torch.load(path, weights_only=True), path) on a machine with the memory"
            raise CheckpointError(f"{path} is not read.", got=got, why=why, fix=fix)
        asked = set(torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else ())
        if unknown := asked - known.keys():
            raise _refusal_error(path, f"its pickle asks for {join_names(sorted(unknown), most=3)}")
        with torch.serialization.safe_globals(cast(Any, [(one, name) for name, one in known.items()])):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def read_torch_part(path: Path, *, begin: int, length: int) -> Any:
    """Returns the content of what torch.save wrote into a part of a file. Raises as `read_torch_file`."""
    with _refused_or_damaged(path), open(path, "rb", opener=open_regular_file) as file:
        part = dcp_file_view(file, begin=begin, length=length)
        return torch.load(part, map_location="cpu", weights_only=True)


def read_pickle(path: Path, *, classes: Collection[str], values: Mapping[str, Any]) -> Any:
    """Returns the content of a bare pickle, at most 1 GiB. See [Note: stand-ins]. Raises CheckpointError.

    classes: dotted names that get a StandIn, as in `read_torch_file`
    values: other names, and what they stand for
    """
    names = {name: _make_stand_in(name, StandIn) for name in classes} | dict(values)
    with _refused_or_damaged(path):
        try:
            return _TableUnpickler(read_bytes(path, most_bytes=_PICKLE_BYTES), names, path=path).load()
        except pickle.UnpicklingError as error:
            raise EOFError(str(error)) from error  # of a truncated or changed pickle


class _TableUnpickler(pickle.Unpickler):
    """An unpickler that knows only the names of a table."""

    def __init__(self, data: bytes, names: Mapping[str, Any], *, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._path = names, path

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._names:
            raise _refusal_error(self._path, f"its pickle asks for {name}")
        return self._names[name]


@contextmanager
def _refused_or_damaged(path: Path) -> Generator[None]:
    """Converts the errors of reading a pickle into CheckpointError and DamagedCheckpointError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # The reason itself, which torch wraps into advice to run the pickle.
        inner = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
        raise _refusal_error(path, str(inner).partition(" Please use")[0]) from error
    except _DAMAGE as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        why = "it is truncated, damaged, or is not a file of torch.save"
        fix = "the checkpoint before it, or a new copy of the file"
        raise DamagedCheckpointError(f"{path} cannot be read.", got=got, why=why, fix=fix) from error


def _refusal_error(path: Path, got: str) -> CheckpointError:
    why = "reading a pickle can run code, so only what checkpoints need is accepted"
    fix = "the weights as safetensors, or the file written anew by its own trainer"
    return CheckpointError(f"{path} is not read.", got=got, why=why, fix=fix)


def _make_stand_in(dotted: str, base: type) -> type:
    module, _, name = dotted.rpartition(".")
    return type(name, (base,), {"__module__": f"stand-in for {module}"})


def _find_nested_class(owner: Any, name: Any) -> type:
    """Returns the stand-in for a class nested in `owner`. Raises UnpicklingError if that is no stand-in."""
    if not (isinstance(owner, type) and issubclass(owner, StandIn | StandInTensor)):
        raise pickle.UnpicklingError(f"its pickle asks for builtins.getattr of {owner!r} and {name!r}")
    return StandIn


def _read_scalar(dtype: StandIn, data: bytes) -> Any:
    """Returns the number in a scalar of numpy. The stand-in of its dtype has the name and byte order."""
    return np.frombuffer(data, np.dtype(dtype.args[0]).newbyteorder(dtype.state[1])).item()

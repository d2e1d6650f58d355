"""The modules that read foreign checkpoints, in the order in which they are asked."""

from pathlib import Path
from zipfile import BadZipFile

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.takeover import dcp, torch_files, zero
from fullshard.takeover.source import ForeignCheckpoint

_READERS = (zero, dcp, torch_files)
# Raised by readers for values of other types and sizes than a format has.
_DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, BadZipFile)


def open_foreign_checkpoint(path: Path) -> ForeignCheckpoint:
    """Opens a checkpoint of another trainer. Raises CheckpointError."""
    reader = next((one for one in _READERS if one.recognises(path)), None)
    if reader is None:
        what = f"{path} is not a checkpoint that can be taken over."
        inside = sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []
        near = [str(one) for one in inside if any(reader.recognises(one) for reader in _READERS)]
        any_of = "the directory with .metadata, trainer_state.json or latest in it, or a file of torch.save"
        fix = near[-1] if near else any_of
        raise CheckpointError(what, got="no such file or directory" if not path.exists() else None, fix=fix)
    try:
        return reader.open_source(path)
    except _DAMAGE as error:
        what, got = f"{path} is not as its trainer writes checkpoints.", f"{type(error).__name__}: {error}"
        why = "a file is damaged, or of a version that is not known here"
        raise DamagedCheckpointError(what, got=got, why=why, fix="the checkpoint before it") from error

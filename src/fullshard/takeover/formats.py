"""The modules that read foreign checkpoints, in the order in which they are asked."""

import zipfile
from pathlib import Path
from types import ModuleType

from fullshard.errors import CheckpointError, DamagedCheckpointError, SpecError
from fullshard.takeover import dcp, torch_files, zero
from fullshard.takeover.source import ForeignCheckpoint

READERS: dict[str, ModuleType] = {"deepspeed": zero, "dcp": dcp, "torch": torch_files}
"""Reader modules by the names that `--format` takes: each has `recognises(path)` and `open_source(path)`."""
# Raised by readers for values of other types and sizes than a format has.
_DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, zipfile.BadZipFile)


def open_foreign_checkpoint(path: Path, *, format_name: str = "auto") -> ForeignCheckpoint:
    """Opens a checkpoint of another trainer. Raises CheckpointError, SpecError for an unknown format."""
    if format_name != "auto" and format_name not in READERS:
        raise SpecError("--format takes a format.", got=format_name, fix=", ".join(("auto", *READERS)))
    readers = READERS.values() if format_name == "auto" else [READERS[format_name]]
    reader = next((one for one in readers if one.recognises(path)), None)
    if reader is None:
        what = f"{path} is not a checkpoint that can be taken over."
        fix = "the directory with .metadata, trainer_state.json or latest in it, or a file of torch.save"
        raise CheckpointError(what, got="no such file or directory" if not path.exists() else None, fix=fix)
    try:
        found = reader.open_source(path)
    except _DAMAGE as error:
        what, got = f"{path} is not as its trainer writes checkpoints.", f"{type(error).__name__}: {error}"
        why = "a file is damaged, or of a version that is not known here"
        raise DamagedCheckpointError(what, got=got, why=why, fix="the checkpoint before it") from error
    if found.step < 0:
        why = "its optimizer has no count, and there is no step or global_step"
        fix = '"step" beside "model" in the file; 0 to begin with the weights alone'
        raise CheckpointError("the source does not say how many steps it was trained.", why=why, fix=fix)
    return found

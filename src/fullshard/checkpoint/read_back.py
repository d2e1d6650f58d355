"""Verification of a save's bytes before it is acknowledged, since a disk may store other bytes.

The bytes are read from the disk, as far as the system drops them from its page cache on request.
"""

from fullshard.checkpoint.files import Files, LocalFiles
from fullshard.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fullshard.checkpoint.verify import damaged_files
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.system import disk


def require_written(draft: Files, manifest: Manifest) -> None:
    """Reads every byte of the files that `manifest` names.

    Raises CheckpointError for the first file whose bytes differ from those written.
    """
    for name in manifest.own_files:
        _forget(draft, name)
    for damage in damaged_files(draft, manifest, sizes=draft.sizes()):
        raise _altered(draft, damage.file, got=damage.what)


def require_manifest(files: Files) -> None:
    """Reads the manifest of a checkpoint. Raises CheckpointError if it differs from the one written."""
    _forget(files, MANIFEST)
    try:
        read_manifest(files)
    except DamagedCheckpointError as error:
        raise _altered(files, MANIFEST, got=str(error.got)) from error


def _altered(files: Files, name: str, *, got: str) -> CheckpointError:
    return CheckpointError(
        f"{files}/{name} was read back, and is other than was written.",
        got=got,
        why="the disk, or something on the way to it, changed it",
        fix="save again; another disk, if it happens again",
    )


def _forget(files: Files, name: str) -> None:
    if isinstance(files, LocalFiles):
        disk.forget(files.path / name)
